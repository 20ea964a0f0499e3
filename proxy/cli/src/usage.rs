//! `baton usage`: who used what, as a table or as JSON.

use std::collections::BTreeMap;
use std::time::Duration;

use baton_proxy::serve::CommandFailure;
use baton_proxy::usage::UsageReport;
use baton_proxy::usage::report::{DEFAULT_DAYS, MAX_DAYS, UsageRow};
use clap::Args;
use reqwest::Client;

use super::columns::table;
use super::endpoint::EndpointArgs;
use super::terminal;

/// The endpoint answers after it has written what is pending.
const DEADLINE: Duration = Duration::from_secs(15);

/// Ten thousand rows.
const MAX_REPORT_BYTES: usize = 16 << 20;

/// Options of `baton usage`.
#[derive(Args)]
pub(super) struct UsageArgs {
    #[command(flatten)]
    endpoint: EndpointArgs,
    /// Days up to today (UTC)
    #[arg(long, value_name = "N", default_value_t = DEFAULT_DAYS, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_DAYS)))]
    days: u32,
    /// Only this key, by its name
    #[arg(long, value_name = "NAME")]
    key: Option<String>,
    /// Only this model, by its public name
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// A line for each day, instead of one for all days
    #[arg(long)]
    daily: bool,
    /// Print the rows of all days as JSON
    #[arg(long)]
    json: bool,
}

/// Prints the usage. Errors: the endpoint cannot be reached or refuses.
pub(super) async fn run(args: UsageArgs) -> Result<(), CommandFailure> {
    let UsageArgs { endpoint, days, key, model, daily, json } = args;
    let days = days.to_string();
    let filters = [("days", Some(days)), ("key", key.clone()), ("model", model.clone())];
    let query: Vec<(&str, String)> = filters.into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
    let ask = |client: &Client, base: &str| client.get(format!("{base}/baton/usage")).query(&query);
    let report: UsageReport = endpoint.json(DEADLINE, MAX_REPORT_BYTES, ask).await?;
    let is_filtered = key.is_some() || model.is_some();
    let text = if json { serde_json::to_string(&report)? + "\n" } else { render(&report, daily, is_filtered) };
    terminal::print(text)?;
    Ok(())
}

fn render(report: &UsageReport, daily: bool, is_filtered: bool) -> String {
    let UsageReport { since, until, is_kept, is_truncated, rows } = report;
    let mut sums: BTreeMap<(&str, &str, &str), UsageRow> = BTreeMap::new();
    let mut total = UsageRow::default();
    for row in rows {
        let day = if daily { row.day.as_str() } else { "" };
        add(sums.entry((day, &row.key, &row.model)).or_default(), row);
        add(&mut total, row);
    }
    let mut text = format!("{since} to {until} (UTC)\n");
    if rows.is_empty() {
        text += if is_filtered { "  nothing of that key or model\n" } else { "  no engine has begun a request\n" };
    } else {
        let heads = ["DAY", "KEY", "MODEL", "REQUESTS", "PROMPT", "CACHED", "GENERATED", "ENGINE S"];
        let first = usize::from(!daily);
        let line = |names: [&str; 3], row: &UsageRow| -> Vec<String> {
            names.map(str::to_owned).into_iter().chain(counts(row)).skip(first).collect()
        };
        let rows = sums.iter().map(|((day, key, model), row)| line([day, key, model], row));
        let last = line(if daily { ["all", "", ""] } else { ["", "all", ""] }, &total);
        text += &table(&heads[first..], rows.chain([last]));
    }
    if *is_truncated {
        text += "There is more: ask for fewer days, or for one key.\n";
    }
    if !is_kept {
        text += "It began with the endpoint's process and ends with it: the endpoint has no state folder.\n";
    }
    text
}

fn add(sum: &mut UsageRow, row: &UsageRow) {
    let sums = [
        (&mut sum.requests, row.requests),
        (&mut sum.prompt_tokens, row.prompt_tokens),
        (&mut sum.cached_tokens, row.cached_tokens),
        (&mut sum.generated_tokens, row.generated_tokens),
    ];
    // The numbers come from another machine.
    sums.into_iter().for_each(|(sum, n)| *sum = sum.saturating_add(n));
    sum.engine_seconds += row.engine_seconds;
}

fn counts(row: &UsageRow) -> [String; 5] {
    let UsageRow { requests, prompt_tokens, cached_tokens, generated_tokens, engine_seconds, .. } = row;
    let [requests, prompt, cached, generated] =
        [requests, prompt_tokens, cached_tokens, generated_tokens].map(ToString::to_string);
    [requests, prompt, cached, generated, format!("{engine_seconds:.1}")]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(day: &str, key: &str, requests: u64) -> UsageRow {
        UsageRow {
            day: day.into(),
            key: key.into(),
            model: "m".into(),
            requests,
            prompt_tokens: 100 * requests,
            cached_tokens: 10 * requests,
            generated_tokens: requests,
            engine_seconds: 0.25 * requests as f64,
        }
    }

    #[test]
    fn days_are_summed_up_by_key_and_model_unless_asked_otherwise() {
        let rows = vec![row("2026-11-02", "anna", 1), row("2026-11-02", "ben", 1), row("2026-11-01", "anna", 3)];
        let (since, until) = ("2026-11-01".to_owned(), "2026-11-02".to_owned());
        let report = UsageReport { since, until, is_kept: true, is_truncated: false, rows };
        let expected = "2026-11-01 to 2026-11-02 (UTC)\n\
                        \x20 KEY   MODEL  REQUESTS  PROMPT  CACHED  GENERATED  ENGINE S\n\
                        \x20 anna  m      4         400     40      4          1.0\n\
                        \x20 ben   m      1         100     10      1          0.2\n\
                        \x20 all          5         500     50      5          1.2\n";
        assert_eq!(render(&report, false, false), expected);
        let daily = render(&report, true, false);
        assert!(
            daily.contains("  DAY         KEY   MODEL") && daily.contains("  2026-11-01  anna  m      3 "),
            "{daily}"
        );
        assert!(daily.lines().last().unwrap().starts_with("  all "), "{daily}");
        let empty = render(&UsageReport::default(), false, false);
        assert!(empty.contains("no engine") && empty.contains("no state folder"), "{empty}");
        assert!(render(&UsageReport::default(), false, true).contains("nothing of that key"));
    }
}

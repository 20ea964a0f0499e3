//! The figures of one stand, as a table.

use std::collections::BTreeMap;
use std::fmt::Display;

use super::{Counts, Level};

/// The counts of both parts of the run, what was held between them and at the end, and the stand's own rows. A row that has
/// nothing to say is left out.
pub(super) fn table(both: [&Counts; 2], levels: [Level; 2], own: Vec<(&'static str, String)>) -> String {
    let [_, main] = both;
    let sum = |of: fn(&Counts) -> usize| both.iter().map(|counts| of(counts)).sum::<usize>();
    let wrong = both.iter().flat_map(|counts| counts.chats.wrong.iter().chain(&counts.mixed.wrong));
    let (hung, wrong): (Vec<_>, Vec<_>) = wrong.partition(|wrong| wrong.contains("hung for "));
    let differing: Vec<_> = both.iter().flat_map(|counts| &counts.chats.differing).collect();
    let largest = |of: &dyn Fn(&Counts) -> f32| both.iter().map(|counts| of(counts)).fold(0.0, f32::max);
    let margins =
        largest(&|counts| counts.chats.differing.iter().map(|divergence| divergence.margin).fold(0.0, f32::max));
    let noise = largest(&|counts| counts.chats.noise);
    let has_logprobs = noise > 0.0;
    let mut rows = vec![
        ("chats, half of them streams", sum(|counts| counts.chats.n_requests).to_string()),
        (
            "other requests: tools, images, completions, vectors, other dialects",
            some(sum(|counts| counts.mixed.n)).unwrap_or_default(),
        ),
        ("wrong or lost", wrong.len().to_string()),
        ("hung", hung.len().to_string()),
        ("differ at a near tie", differing.len().to_string()),
        ("the largest margin of these, nats", if has_logprobs { format!("{margins:.3}") } else { String::new() }),
        (
            "largest difference of a log-probability before a difference, nats",
            if has_logprobs { format!("{noise:.3}") } else { String::new() },
        ),
        (
            "time of a chat, p50 / p95 / max",
            [0.5, 0.95, 1.0].map(|s| format!("{:.2} s", main.chats.quantile(s).as_secs_f64())).join(" / "),
        ),
        ("requests that may fail, and how they ended", listed(both.map(|counts| &counts.ends))),
        ("misbehaving clients", {
            let named =
                both.map(|counts| counts.misconduct.n.iter().map(|(kind, n)| (format!("{kind:?}"), *n)).collect());
            listed(named.each_ref())
        }),
        ("faults", listed(both.map(|counts| &counts.faults))),
        ("reloads", both.iter().map(|counts| counts.n_reloads).sum::<u64>().to_string()),
    ];
    rows.extend(own);
    let mib =
        |of: fn(&Level) -> u64| levels.each_ref().map(|level| format!("{:.1}", of(level) as f64 / 1024.0)).join(" / ");
    let files = |of: fn(&Level) -> usize| levels.each_ref().map(|level| of(level).to_string()).join(" / ");
    rows.extend([
        ("endpoint's memory after the warm-up and at the end, MiB", mib(|level| level.endpoint_kib)),
        ("endpoint's open files", files(|level| level.endpoint_files)),
        ("memory of the others that live from the start, MiB", mib(|level| level.others_kib)),
        ("their open files", files(|level| level.others_files)),
    ]);
    let rows = rows.iter().filter(|(_, value)| !value.is_empty());
    let rows: String = rows.map(|(name, value)| format!("| {name} | {value} |\n")).collect();
    format!("| | |\n|---|---|\n{rows}")
}

fn some(n: usize) -> Option<String> {
    (n > 0).then(|| n.to_string())
}

/// The sums of both parts by name.
fn listed<K: Display + Ord>(both: [&BTreeMap<K, u64>; 2]) -> String {
    let mut sums = BTreeMap::new();
    for (name, n) in both.into_iter().flatten() {
        *sums.entry(name).or_insert(0) += n;
    }
    sums.iter().map(|(name, n)| format!("{name} {n}")).collect::<Vec<_>>().join(", ")
}

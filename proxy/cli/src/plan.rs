//! `baton plan`: how a running endpoint would serve a request, as a table.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_planner::cost::Prediction;
use baton_planner::policy::PolicyName;
use baton_proxy::observe::glossary::{label, problem};
use baton_proxy::request::plan::explanation::{Explanation, NodeWorkers, RouteExplanation};
use baton_proxy::serve::CommandFailure;
use baton_proxy::targets::nodes::WorkerReport;
use baton_schemas::counted::counted;
use clap::Args;
use clap::builder::PossibleValuesParser;
use reqwest::header::CONTENT_TYPE;
use serde::Deserialize;

use super::endpoint::EndpointArgs;
use super::terminal;

/// Rendering a long prompt on a busy node takes seconds.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The largest request. Endpoints refuse larger ones by default.
const MAX_BODY_BYTES: u64 = 64 << 20;

/// A plan has a line for each pair of nodes.
const MAX_PLAN_BYTES: usize = 16 << 20;

/// Options of `baton plan`.
#[derive(Args)]
pub(super) struct PlanArgs {
    /// A chat request in JSON, as for /v1/chat/completions; - is standard input
    #[arg(default_value = "-")]
    file: PathBuf,
    #[command(flatten)]
    endpoint: EndpointArgs,
    /// Plan by this policy instead of the configured one
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(PolicyName::ALL.map(PolicyName::as_str)))]
    policy: Option<String>,
    /// Print the endpoint's reply as JSON
    #[arg(long)]
    json: bool,
}

/// Prints the plan, or the endpoint's error.
pub(super) async fn run(args: PlanArgs) -> Result<(), CommandFailure> {
    let body = read(&args.file)?;
    let call = |client: &reqwest::Client, base: &str| {
        let call = client.post(format!("{base}/baton/plan")).header(CONTENT_TYPE, "application/json").body(body);
        match args.policy {
            Some(policy) => call.header("x-baton-policy", policy),
            None => call,
        }
    };
    let reply = args.endpoint.ask(TIMEOUT, call).await?;
    let status = reply.status().as_u16();
    let base = args.endpoint.base()?;
    let answer = args.endpoint.answer(reply, MAX_PLAN_BYTES).await?;
    if status != 200 {
        return Err(CommandFailure(match answer["error"]["message"].as_str() {
            Some(message) => format!("{base} answered {status}: {message}"),
            None => format!("{base} is not a Baton endpoint: it answered {status}"),
        }));
    }
    let plan = Explanation::deserialize(&answer);
    let text = match plan {
        Ok(_) if args.json => answer.to_string(),
        Ok(plan) => table(&plan),
        Err(_) => return Err(CommandFailure(format!("{base} is not a Baton endpoint of this version"))),
    };
    Ok(terminal::print_line(text.trim_end())?)
}

fn read(file: &Path) -> Result<Vec<u8>, CommandFailure> {
    let mut body = Vec::new();
    let source: Box<dyn Read> = if file.as_os_str() == "-" {
        Box::new(std::io::stdin())
    } else {
        let open = std::fs::File::open(file);
        Box::new(open.map_err(|error| CommandFailure(format!("cannot read {}: {error}", file.display())))?)
    };
    source.take(MAX_BODY_BYTES + 1).read_to_end(&mut body)?;
    if body.len() as u64 > MAX_BODY_BYTES {
        return Err(CommandFailure(format!("the request is larger than {MAX_BODY_BYTES} bytes")));
    }
    Ok(body)
}

const HEADER: [&str; 2] = [
    "  route                              cached",
    "    wait  restore  prefill transfer  after it     step     TTFT     complete\n",
];

/// The column of routes with machines that sleep.
const WAKE: &str = "    wake ";

fn table(plan: &Explanation) -> String {
    let Explanation { model, policy, reason, n_prompt, expected_output, routes, workers } = plan;
    let has_sleeper = routes.iter().any(|route| route.prediction.is_some_and(|times| times.wake_ms > 0.0));
    let why = reason.as_deref().map_or("no route can be taken", label);
    let mut lines = format!(
        "{model}: {n_prompt} prompt tokens, about {expected_output:.0} of reply; policy {policy}: {why}\n\
         Milliseconds:\n{}{}{}",
        HEADER[0],
        if has_sleeper { WAKE } else { "" },
        HEADER[1]
    );
    for route in routes {
        lines.push_str(&line(route, has_sleeper));
    }
    for NodeWorkers { node, workers } in workers {
        let share = |worker: &WorkerReport| format!("{} {}", worker.name, counted(worker.layers, "layer"));
        let shares: Vec<String> = workers.iter().map(share).collect();
        lines.push_str(&format!("{node} computes with {}\n", shares.join(", ")));
    }
    lines
}

fn line(route: &RouteExplanation, has_sleeper: bool) -> String {
    let RouteExplanation {
        kind: _,
        decode,
        prefill,
        chosen,
        cached_on_decode,
        cached_on_prefill,
        prediction,
        unused_reason,
    } = route;
    let mark = if *chosen { '*' } else { ' ' };
    let name = prefill.as_ref().map_or_else(|| decode.clone(), |prefill| format!("{prefill} → {decode}"));
    let cached =
        cached_on_prefill.map_or_else(|| cached_on_decode.to_string(), |there| format!("{there}→{cached_on_decode}"));
    let times = match (prediction, unused_reason) {
        (_, Some(reason)) => format!("   {}", problem(reason)),
        (None, None) => "   rates not known yet".to_owned(),
        (Some(p), None) => {
            let Prediction { wake_ms, queue_ms, restore_ms, prefill_ms, wire_ms, .. } = p;
            let Prediction { after_prefill_ms, step_ms, ttft_ms, completion_ms, .. } = p;
            let wake = if has_sleeper { format!("{wake_ms:8.0} ") } else { String::new() };
            format!(
                "{wake}{queue_ms:8.0} {restore_ms:8.0} {prefill_ms:8.0} {wire_ms:8.0} {after_prefill_ms:9.0} {step_ms:8.1} {ttft_ms:8.0} \
                 {completion_ms:12.0}"
            )
        }
    };
    format!("{mark} {name:<32} {cached:>8}{times}\n")
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn an_unknown_policy_is_refused_by_its_flag() {
        #[derive(Parser)]
        struct Command {
            #[command(flatten)]
            plan: PlanArgs,
        }
        let parse = |policy| Command::try_parse_from(["plan", "--policy", policy]);
        let error = parse("foo").err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains("--policy") && error.contains("always_handoff"), "{error}");
        assert_eq!(parse("direct").unwrap().plan.policy.as_deref(), Some("direct"));
    }

    #[test]
    fn the_chosen_route_is_marked_and_an_unused_one_says_why() {
        let route = |prefill: Option<&str>, chosen, prediction, unused: Option<&str>| RouteExplanation {
            kind: "direct".into(),
            decode: "mac".into(),
            prefill: prefill.map(str::to_owned),
            chosen,
            cached_on_decode: 8,
            cached_on_prefill: prefill.map(|_| 64),
            prediction,
            unused_reason: unused.map(str::to_owned),
        };
        let prediction = Prediction { ttft_ms: 61.4, completion_ms: 200.0, ..Prediction::default() };
        let plan = Explanation {
            model: "m".into(),
            policy: "fastest".into(),
            reason: Some("faster".into()),
            n_prompt: 100,
            expected_output: 12.0,
            routes: vec![
                route(None, false, None, None),
                route(Some("spark"), true, Some(prediction), None),
                route(Some("old"), false, None, Some("prefill_down")),
            ],
            workers: vec![NodeWorkers {
                node: "spark".into(),
                workers: [16, 1]
                    .map(|layers| WorkerReport { name: "worker-1".into(), address: None, devices: Vec::new(), layers })
                    .to_vec(),
            }],
        };
        let table = table(&plan);
        assert!(table.ends_with("\nspark computes with worker-1 16 layers, worker-1 1 layer\n"), "{table}");
        let lines: Vec<&str> = table.lines().skip(3).collect();
        assert!(lines[0].starts_with("  mac ") && lines[0].ends_with("rates not known yet"), "{table}");
        assert!(lines[1].starts_with("* spark → mac") && lines[1].contains(" 61 ") && lines[1].contains("64→8"));
        assert!(lines[2].ends_with("the prefill node cannot be reached"), "{table}");
        assert!(!table.contains("wake"), "none sleeps: {table}");
    }

    #[test]
    fn the_time_to_wake_stands_with_the_routes_if_a_machine_sleeps() {
        let route = |decode: &str, prediction| RouteExplanation {
            kind: "direct".into(),
            decode: decode.into(),
            prefill: None,
            chosen: false,
            cached_on_decode: 0,
            cached_on_prefill: None,
            prediction: Some(prediction),
            unused_reason: None,
        };
        let awake = Prediction { ttft_ms: 70.0, completion_ms: 200.0, ..Prediction::default() };
        let plan = Explanation {
            model: "m".into(),
            policy: "fastest".into(),
            reason: None,
            n_prompt: 100,
            expected_output: 12.0,
            routes: vec![route("mac", awake), route("spark", Prediction { wake_ms: 12_345.4, ..awake })],
            workers: Vec::new(),
        };
        let table = table(&plan);
        let lines: Vec<&str> = table.lines().skip(2).collect();
        let ends = lines[0].find("wake").map(|at| at + "wake".len()).unwrap_or_default();
        assert_eq!((&lines[1][ends - 5..ends], &lines[2][ends - 5..ends]), ("    0", "12345"), "{table}");
    }
}

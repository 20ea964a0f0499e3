//! A state as tables of text.

use std::collections::BTreeSet;
use std::fmt::Write;

use baton_proxy::observe::glossary::{label, problem, state_label};
use baton_proxy::observe::snapshot::{
    BreakerReport, EndpointState, LinkState, LoadStateReport, ModelState, NodeReport, RatePoint, UpstreamReport,
};
use baton_proxy::observe::{RequestOutcome, RouteRecord};
use baton_proxy::targets::nodes::NodeState;
use baton_schemas::counted::counted;
use baton_schemas::sequence::DraftCounts;

use crate::columns::{seconds_ago, table};
use crate::discover;

/// Requests that are shown: served ones, and others.
const N_SERVED: usize = 10;
const N_UNSERVED: usize = 4;

/// Models of an upstream that are shown.
const N_MODELS: usize = 3;

/// The whole state, in lines that end with a newline.
pub(super) fn render(state: &EndpointState) -> String {
    let requests = &state.requests;
    let stops = if state.is_stopping { "; stopping, and waiting for these requests" } else { "" };
    let mut out = format!(
        "baton {}: {} running in {} of {} slots, {} waiting{stops}\n",
        state.version,
        counted(requests.running, "request"),
        requests.slots,
        requests.limit,
        requests.waiting
    );
    for warning in &state.warnings {
        let _ = writeln!(out, "WARNING {warning}");
    }
    for model in &state.models {
        let name = if model.name.is_empty() { "(not known yet)" } else { &model.name };
        let _ = write!(out, "\nMODEL {name}  policy {}", model.policy);
        if model.nodes.iter().any(|node| node.simulated) {
            out += "  simulated machines: so are the figures";
        }
        if model.prediction_error > 0.0 {
            let share = model.prediction_error * 100.0;
            let _ = write!(out, "  half of the first tokens within {share:.0} % of their prediction");
        }
        if let Some(loading) = &model.load_state {
            out += &load_state(loading, state.at_ms);
        }
        out.push('\n');
        out += &nodes(model);
        if model.nodes.iter().any(|node| !node.workers.is_empty()) {
            out += &workers(model);
        }
        if !model.links.is_empty() {
            out += &links(model);
        }
        if model.nodes.iter().any(|node| !node.kv_losses.is_empty()) {
            out += &losses(model);
        }
        if !model.fallbacks.is_empty() {
            out += &fallbacks(model, state.at_ms);
        }
    }
    if let Some(discovery) = &state.discovery {
        let _ = writeln!(out, "\n{}", discover::lines(discovery));
    }
    if !state.upstreams.is_empty() {
        out.push('\n');
        out += &upstreams(state);
    }
    if !state.routes.is_empty() {
        out.push('\n');
        out += &routes(state);
    }
    out
}

/// A model's state, its memory, and when it is unloaded.
fn load_state(loading: &LoadStateReport, now_ms: u64) -> String {
    let mib = |bytes: u64| bytes >> 20;
    let mut text = format!("  {} ({} MiB", loading.state.as_str(), mib(loading.bytes));
    if loading.measured_bytes > 0 {
        let _ = write!(text, ", holds {}", mib(loading.measured_bytes));
    }
    text.push(')');
    if loading.waiting > 0 {
        let _ = write!(text, ", {} waiting", loading.waiting);
    }
    if let Some(at) = loading.expires_at_ms.filter(|_| loading.active == 0) {
        let _ = write!(text, ", goes in {} s", at.saturating_sub(now_ms) / 1_000);
    }
    text
}

fn nodes(model: &ModelState) -> String {
    let head = ["NODE", "TASK", "STATE", "SLOTS", "QUEUED", "PREFILL/S", "DECODE/S", "BREAKER"];
    let row = |node: &NodeReport| {
        let words = match &node.unused_reason {
            Some(reason) if node.reason.is_none() || node.unused.is_some() => format!("not used: {}", problem(reason)),
            _ if node.state.is_gone() && !node.has_answered => {
                format!("no answer yet: {}", node.reason.as_deref().unwrap_or_default())
            }
            _ => state_words(node.state, node.reason.as_deref()),
        };
        let breaker = breaker(&node.breaker);
        vec![
            node.name.clone(),
            node.task.as_str().to_owned(),
            words,
            known(node, format!("{}/{}", node.active_slots, node.slots)),
            known(node, node.queued.to_string()),
            rate(node.prefill_rates.last()),
            rate(node.decode_rates.first()),
            breaker,
        ]
    };
    table(&head, model.nodes.iter().map(row))
}

/// Lists the workers of each node with their layers. Each node is shown once, even if it has two tasks.
fn workers(model: &ModelState) -> String {
    let mut shown = BTreeSet::new();
    let rows = model.nodes.iter().filter(|node| shown.insert(&node.name)).flat_map(|node| {
        node.workers.iter().map(|worker| {
            vec![
                worker.name.clone(),
                node.name.clone(),
                worker.address.clone().unwrap_or_else(|| "-".to_owned()),
                worker.layers.to_string(),
                worker.devices.join(", "),
            ]
        })
    });
    table(&["WORKER", "OF NODE", "ADDRESS", "LAYERS", "DEVICES"], rows)
}

/// Shows `-` for a node that does not run or has not answered yet.
fn known(node: &NodeReport, text: String) -> String {
    if node.slots > 0 { text } else { "-".to_owned() }
}

fn breaker(breaker: &BreakerReport) -> String {
    match (&breaker.last_reason, breaker.is_open) {
        (Some(reason), true) => format!("open: {}", problem(reason)),
        (_, true) => "open".to_owned(),
        (Some(reason), false) => format!("closed, was: {}", label(reason)),
        (None, false) => "closed".to_owned(),
    }
}

fn state_words(state: NodeState, reason: Option<&str>) -> String {
    let state = state_label(state);
    reason.map_or_else(|| state.clone(), |reason| format!("{state}: {reason}"))
}

/// An upstream's state, and the longest time for which one of its models still gets no requests.
fn busy(upstream: &UpstreamReport) -> String {
    let words = state_words(upstream.state, upstream.reason.as_deref());
    match upstream.busy_ms {
        0 => words,
        ms => format!("{words}, busy {} s", ms.div_ceil(1_000)),
    }
}

fn upstreams(state: &EndpointState) -> String {
    let head = ["UPSTREAM", "KIND", "STATE", "RUNNING", "WAITING", "MODELS", "BREAKER"];
    let row = |upstream: &UpstreamReport| {
        let more = upstream.models.len().saturating_sub(N_MODELS);
        let named: Vec<&str> = upstream.models.iter().take(N_MODELS).map(String::as_str).collect();
        let models = if more > 0 { format!("{} and {more} more", named.join(", ")) } else { named.join(", ") };
        vec![
            upstream.name.clone(),
            upstream.kind.clone(),
            busy(upstream),
            format!("{}/{}", upstream.running, upstream.limit),
            upstream.waiting.to_string(),
            models,
            breaker(&upstream.breaker),
        ]
    };
    table(&head, state.upstreams.iter().map(row))
}

fn links(model: &ModelState) -> String {
    let is_gone = |name: &&str| model.nodes.iter().any(|node| node.name == **name && node.state.is_gone());
    let row = |link: &LinkState| {
        let measured = |known: bool, text: String| if known { text } else { "-".to_owned() };
        let gone: Vec<&str> = [link.prefill.as_str(), &link.decode].into_iter().filter(is_gone).collect();
        vec![
            format!("{} > {}", link.prefill, link.decode),
            measured(link.bytes_per_second > 0.0, format!("{:.1} MB/s", link.bytes_per_second / 1e6)),
            measured(link.rtt_ms > 0.0, format!("{:.2} ms", link.rtt_ms)),
            measured(link.tail_ms > 0.0, format!("{:.1} ms", link.tail_ms)),
            match &link.unused_reason {
                Some(reason) => format!("not used: {}", problem(reason)),
                None if !gone.is_empty() => format!("no handoffs: {} cannot be reached", gone.join(" and ")),
                None => breaker(&link.breaker),
            },
        ]
    };
    table(&["LINK", "RATE", "ROUND TRIP", "TAIL", "BREAKER"], model.links.iter().map(row))
}

/// The losses of lossy codecs. Each node is shown once, even if it has two tasks.
fn losses(model: &ModelState) -> String {
    let mut shown = BTreeSet::new();
    let rows = model.nodes.iter().filter(|node| shown.insert(&node.name)).flat_map(|node| {
        node.kv_losses.iter().map(|loss| {
            vec![
                node.name.clone(),
                loss.codec.as_str().to_owned(),
                format!("{:.1}e-3", 1e3 * loss.mean_kl),
                format!("{:.2}", loss.ratio),
            ]
        })
    });
    table(&["KV OF", "LOSSY CODEC", "MEAN KL", "TIMES SMALLER"], rows)
}

fn fallbacks(model: &ModelState, now_ms: u64) -> String {
    let row = |(reason, fallback): (&String, &baton_proxy::observe::snapshot::FallbackState)| {
        let meaning = problem(reason).to_owned();
        vec![reason.clone(), fallback.count.to_string(), ago(now_ms, fallback.last_ms), meaning]
    };
    table(&["FALLBACK", "COUNT", "LAST", "MEANING"], model.fallbacks.iter().map(row))
}

fn routes(state: &EndpointState) -> String {
    let head =
        ["WHEN", "MODEL", "ROUTE", "REASON", "PROMPT", "CACHED", "OUT", "GUESSED", "TTFT MS", "PREDICTED", "ENDED"];
    let mut n_left = [N_UNSERVED, N_SERVED];
    let is_shown = |route: &&RouteRecord| {
        let n = &mut n_left[usize::from(route.is_served())];
        std::mem::replace(n, n.saturating_sub(1)) > 0
    };
    let rows = state.routes.iter().filter(is_shown).map(|route| {
        let ms = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |ms| format!("{ms:.0}"));
        let path = match &route.prefill {
            Some(prefill) => format!("{prefill} > {}", route.decode),
            None if route.decode.is_empty() => "-".to_owned(),
            None => route.decode.clone(),
        };
        let outcome = route.outcome.map_or("running", RequestOutcome::as_str);
        let failure = route.handoff.and_then(|handoff| handoff.failure).map(|failure| failure.as_str());
        let fell_back = failure.map(|failure| format!(", fell back: {}", label(failure))).unwrap_or_default();
        let moved = route.moved_to.as_ref().map(|node| format!(", moved to {node}")).unwrap_or_default();
        let ended = format!("{outcome}{fell_back}{moved}");
        vec![
            ago(state.at_ms, route.at_ms),
            route.model.clone(),
            path,
            reason(route).to_owned(),
            route.n_prompt.to_string(),
            route.n_cached.to_string(),
            route.n_vectors.unwrap_or(route.n_completion.into()).to_string(),
            guessed(route.drafts),
            ms(route.first_token_ms()),
            ms(route.predicted_first_token_ms()),
            ended,
        ]
    });
    table(&head, rows)
}

/// How many of a request's verified guesses were right.
fn guessed(drafts: DraftCounts) -> String {
    if drafts.is_empty() { "-".to_owned() } else { format!("{}/{}", drafts.n_accepted, drafts.n) }
}

/// Why a request has its route, or why it was refused.
fn reason(route: &RouteRecord) -> &str {
    match (&route.error, route.n_vectors) {
        (Some(error), _) if route.outcome == Some(RequestOutcome::Refused) => label(error),
        (_, Some(_)) => "vectors",
        (_, None) => label(&route.reason),
    }
}

fn rate(point: Option<&RatePoint>) -> String {
    point.map_or_else(|| "-".to_owned(), |point| format!("{:.0}", point.tokens_per_second))
}

/// The time from `then_ms` to `now_ms`.
fn ago(now_ms: u64, then_ms: u64) -> String {
    seconds_ago(now_ms.saturating_sub(then_ms) / 1_000)
}

#[cfg(test)]
mod tests {
    use baton_proxy::observe::TokenSources;
    use baton_proxy::observe::snapshot::{FallbackState, LoadState, RequestsState};
    use baton_proxy::targets::nodes::Task;

    use super::*;

    #[test]
    fn nodes_links_routes_and_fallbacks_are_shown() {
        let node = |name: &str, task| NodeReport {
            name: name.into(),
            task,
            state: NodeState::Ready,
            unused_reason: (task == Task::Prefill).then(|| "other_model".into()),
            active_slots: 1,
            slots: 4,
            decode_rates: vec![RatePoint { size: 1, tokens_per_second: 78.4 }],
            ..NodeReport::default()
        };
        let spark = NodeReport {
            breaker: BreakerReport {
                is_open: true,
                last_reason: Some("prefill_down".into()),
                ..BreakerReport::default()
            },
            ..node("prefill-1", Task::Prefill)
        };
        let gone = NodeReport {
            name: "gone-1".into(),
            state: NodeState::Down,
            reason: Some("it refused".into()),
            ..NodeReport::default()
        };
        let model = ModelState {
            name: "m".into(),
            policy: "fastest".into(),
            nodes: vec![node("local", Task::Decode), spark, gone],
            links: [("prefill-1", Some("other_weights")), ("gone-1", None)]
                .map(|(prefill, unused_reason)| LinkState {
                    prefill: prefill.into(),
                    decode: "local".into(),
                    unused_reason: unused_reason.map(str::to_owned),
                    ..LinkState::default()
                })
                .into(),
            fallbacks: [("prefill_down".to_owned(), FallbackState { count: 3, last_ms: 60_000 })].into(),
            prediction_error: 0.1,
            load_state: Some(LoadStateReport {
                state: LoadState::Loaded,
                bytes: 300 << 20,
                measured_bytes: 200 << 20,
                expires_at_ms: Some(190_000),
                ..LoadStateReport::default()
            }),
            ..ModelState::default()
        };
        let route = RouteRecord {
            at_ms: 175_000,
            request_id: "r".into(),
            model: "m".into(),
            decode: "local".into(),
            prefill: Some("prefill-1".into()),
            policy: "fastest".into(),
            reason: "faster".into(),
            n_prompt: 8_192,
            n_cached: 0,
            sources: TokenSources::default(),
            restore_ms: 0.0,
            n_completion: 32,
            drafts: DraftCounts { n: 20, n_accepted: 12 },
            admitted_ms: Some(0.5),
            before_plan_ms: 4_000.0,
            slot_ms: Some(2.0),
            waiting_since_ms: None,
            running_since_ms: None,
            n_vectors: None,
            predicted: None,
            predicted_ttft_ms: Some(1_500.0),
            predicted_direct_ttft_ms: Some(5_600.0),
            predicted_direct: None,
            saved_ms: None,
            ttft_ms: Some(1_600.0),
            e2e_ms: 2_000.0,
            handoff: None,
            upstream_prefill: None,
            simulated: false,
            moved_to: Some("decode-2".into()),
            outcome: Some(RequestOutcome::Done),
            error: None,
        };
        let state = EndpointState {
            is_stopping: false,
            version: "0.1.0".into(),
            at_ms: 180_000,
            requests: RequestsState { running: 1, slots: 4, limit: 8, waiting: 2, ..RequestsState::default() },
            models: vec![model],
            upstreams: vec![
                UpstreamReport {
                    name: "ollama".into(),
                    kind: "ollama".into(),
                    state: NodeState::Down,
                    reason: Some("unreachable".into()),
                    models: ["a", "b", "c", "d"].map(str::to_owned).into(),
                    running: 2,
                    limit: 8,
                    ..UpstreamReport::default()
                },
                UpstreamReport {
                    name: "hosted".into(),
                    kind: "openai".into(),
                    state: NodeState::Ready,
                    busy_ms: 527_400,
                    ..UpstreamReport::default()
                },
            ],
            discovery: None,
            memory_budget_bytes: 0,
            open: Vec::new(),
            routes: vec![route],
            warnings: vec!["decode-2 runs other weights".into()],
        };
        let text = render(&state);
        for part in [
            "1 request running in 4 of 8 slots, 2 waiting",
            "half of the first tokens within 10 % of their prediction  loaded (300 MiB, holds 200), goes in 10 s\n",
            "local      decode   ready                            1/4    0       -          78        closed",
            "open: the prefill node cannot be reached",
            "not used: it runs another model",
            "no answer yet: it refused",
            "\nWARNING decode-2 runs other weights\n",
            "prefill-1 > local  -     -           -     not used: it runs other weights of the model",
            "gone-1 > local     -     -           -     no handoffs: gone-1 cannot be reached",
            "prefill_down  3      2 min ago  the prefill node cannot be reached",
            "ollama    ollama  lost: unreachable  2/8      0        a, b, c and 1 more  closed",
            "hosted    openai  ready, busy 528 s  0/0 ",
            "5 s ago  m      prefill-1 > local  faster  8192    0       32   12/20    5600     5500       done, moved to decode-2",
        ] {
            assert!(text.contains(part), "{part:?} in\n{text}");
        }
        let gone = text.lines().find(|line| line.contains("gone-1")).unwrap();
        assert!(gone.contains("  -      -       -"), "{gone:?}: nobody knows its slots");
    }
}

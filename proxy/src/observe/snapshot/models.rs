//! Models, the links between their nodes, and their place in memory.

use std::collections::BTreeMap;
use std::sync::Arc;

use baton_engines::engine_options::WrittenOptions;
use baton_planner::reason::BarReason;
use baton_schemas::handoff::HandoffFailure;
use baton_schemas::node::NodeInfo;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::counts::{BreakerReport, FallbackState, breaker, fallbacks, unix_ms};
use super::nodes::{self, NodeReport};
use crate::observe::RouteRecord;
use crate::targets::model_loading::{LoadReport, LoadState};
use crate::targets::models::{ReturnCounts, ServedModel, UnusedNode, expected_output};
use crate::targets::nodes::{FallbackReason, Node, Task};

/// A served model.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ModelState {
    /// Its public name; empty until a node reports what it runs.
    pub name: String,
    /// Other names that find it.
    pub aliases: Vec<String>,
    /// How its requests are planned.
    pub policy: String,
    /// Decode nodes first.
    pub nodes: Vec<NodeReport>,
    /// From every prefill node to every other decode node.
    pub links: Vec<LinkState>,
    /// Requests that took another route than planned, by reason.
    pub fallbacks: BTreeMap<String, FallbackState>,
    /// Replies' KV that was brought back to the nodes that had computed their prompts.
    #[serde(default)]
    pub kv_returns: KvReturnsState,
    /// Median of |actual ÷ predicted − 1| of the time from arrival to the first token, over the listed routes that have both; 0.1 is
    /// 10 %. 0 until there is one.
    pub prediction_error: f64,
    /// The average length of a reply, in tokens.
    pub mean_output_tokens: f64,
    /// Its place in memory, if it is loaded on demand.
    #[serde(default, rename = "residency", skip_serializing_if = "Option::is_none")]
    pub load_state: Option<LoadStateReport>,
}

/// What became of returns of KV.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct KvReturnsState {
    /// All that the prefill node lacked came.
    pub returned: u64,
    /// Ended for a request.
    pub gave_way: u64,
    /// Refused, broken off or too slow, or their key was removed.
    pub failed: u64,
    /// Tokens whose KV came.
    pub tokens: u64,
}

/// A model that is loaded on demand.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "ResidencyState")]
pub struct LoadStateReport {
    /// `unloaded`, `loading`, `loaded`, `unloading` or `failed`.
    #[serde(rename = "life")]
    pub state: LoadState,
    /// Bytes of the budget that it takes when it is loaded: an estimate, or the measured size if that is larger.
    pub bytes: u64,
    /// Bytes that its process holds.
    pub measured_bytes: u64,
    /// Requests that use it.
    pub active: u32,
    /// Requests that wait for it to be loaded.
    pub waiting: u32,
    /// The time at which it is unloaded if no request uses it, milliseconds since the Unix epoch; absent if it stays.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at_ms: Option<u64>,
    /// Number of loads.
    pub loads: u64,
    /// Time of all loads together, seconds.
    pub load_seconds: f64,
    /// Time of the last load, seconds.
    pub last_load_seconds: f64,
    /// Number of unloads, by reason.
    pub unloads: BTreeMap<String, u64>,
    /// The reason of the last load's failure, if it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_failure: Option<String>,
}

/// The link from a prefill node to a decode node. Figures are 0 until measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LinkState {
    /// The node that sends KV.
    pub prefill: String,
    /// The node that receives it.
    pub decode: String,
    /// Bytes per second.
    pub bytes_per_second: f64,
    /// Round trip, milliseconds.
    pub rtt_ms: f64,
    /// Time of a handoff's end in addition to its last chunk's wire time, milliseconds.
    pub tail_ms: f64,
    /// The part of a state's time on the wire that came after the prefill, 0 to 1.
    #[serde(default)]
    pub after_prefill_state_share: f64,
    /// True if both nodes run the same weights, so that their KV differs only by how their devices round. Missing until
    /// both have answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub same_weights: Option<bool>,
    /// The distance of their KV of a fixed text (relative L2), measured before the first handoff between other weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_distance: Option<f64>,
    /// The reason why no handoff is planned between the two even when both are ready, in one word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unused_reason: Option<String>,
    /// Prevents handoffs between the two while they fail. Each node may be fine.
    #[serde(default)]
    pub breaker: BreakerReport,
}

/// Returns the reason why a node cannot do a task for a model, if there is one.
type Bars = fn(&ServedModel, &NodeInfo) -> Option<BarReason>;

/// A model and its nodes. `all` are all models: a node that serves another one is left out here. `routes` are the last ones of all
/// models.
pub(super) fn report(
    model: &ServedModel,
    all: &[Arc<ServedModel>],
    unused: &[UnusedNode],
    routes: &[RouteRecord],
    with_addresses: bool,
) -> ModelState {
    let why_unused = |node: &Node, task: Task| {
        let this = unused.iter().find(|unused| unused.node == node.name && unused.task == task)?;
        Some(this.to_string())
    };
    let decodes = |n: &Arc<Node>| !serves_another(model, all, n, ServedModel::bars_decode);
    let helps = |n: &Arc<Node>| !serves_another(model, all, n, ServedModel::bars_helper);
    let hands_over = |n: &Arc<Node>| helps(n) && n.last_info().is_none_or(|info| !info.role.drafts());
    let own = model.own_engine.as_ref().map(|options| shown(options, with_addresses));
    let options = |node: &Node| own.clone().filter(|_| node.url.is_none()).unwrap_or_default();
    let decode = model.decode.iter().filter(|n| decodes(n)).map(|n| NodeReport {
        options: options(n),
        unused_reason: word(bar(model, n, ServedModel::bars_decode)),
        unused: why_unused(n, Task::Decode),
        ..nodes::report(n, Task::Decode, with_addresses)
    });
    let prefill = model.prefill.iter().filter(|n| helps(n)).map(|n| NodeReport {
        unused_reason: word(bar(model, n, ServedModel::bars_helper)),
        unused: why_unused(n, Task::Prefill),
        ..nodes::report(n, Task::Prefill, with_addresses)
    });
    let known = model.routes.view();
    let kv_distance = |p: usize, d: usize| *known.kv_distances.get(p)?.get(d)?;
    let (kv_distance, decodes) = (&kv_distance, &decodes);
    let from = (0..).zip(model.prefill.iter().zip(&known.links)).filter(|(_, (from, _))| hands_over(from));
    let links = from.flat_map(|(p, (from, row))| {
        let to = (0..).zip(model.decode.iter().zip(row));
        let to = to.filter(move |(_, (to, _))| to.name != from.name && decodes(to));
        to.map(move |(d, (to, link))| LinkState {
            prefill: from.name.clone(),
            decode: to.name.clone(),
            bytes_per_second: link.bytes_per_second,
            rtt_ms: link.rtt_ms,
            tail_ms: link.tail_ms,
            after_prefill_state_share: link.after_prefill_state_share,
            same_weights: same_weights(from, to),
            kv_distance: kv_distance(p, d),
            unused_reason: word(
                bar(model, from, ServedModel::bars_prefill)
                    .or_else(|| bar(model, to, ServedModel::bars_decode))
                    .or_else(|| model.bars_pair(p, d)),
            ),
            breaker: model.pairs.view(p, d).map(|view| breaker(view, HandoffFailure::as_str)).unwrap_or_default(),
        })
    });
    let name = model.name.get().cloned().unwrap_or_default();
    ModelState {
        prediction_error: prediction_error(routes.iter().filter(|route| route.model == name)),
        name,
        aliases: model.aliases.clone(),
        policy: model.policy.name().to_string(),
        nodes: decode.chain(prefill).collect(),
        links: links.collect(),
        fallbacks: fallbacks(&model.fallbacks, FallbackReason::as_str),
        kv_returns: kv_returns(model.returns.counts()),
        mean_output_tokens: expected_output(&known.n_output, None),
        load_state: model.loadable.as_ref().map(|loadable| load_state(loadable.report())),
    }
}

fn kv_returns(ReturnCounts { returned, gave_way, failed, tokens }: ReturnCounts) -> KvReturnsState {
    KvReturnsState { returned, gave_way, failed, tokens }
}

/// See [`ModelState::prediction_error`]. A route whose handoff failed is not the one that was predicted.
fn prediction_error<'a>(routes: impl Iterator<Item = &'a RouteRecord>) -> f64 {
    let as_planned = routes.filter(|route| route.handoff.is_none_or(|handoff| handoff.failure.is_none()));
    let times = as_planned.filter_map(|route| Some((route.first_token_ms()?, route.predicted_first_token_ms()?)));
    let positive = times.filter(|(_, predicted)| *predicted > 0.0);
    let mut errors: Vec<f64> = positive.map(|(actual, predicted)| (actual / predicted - 1.0).abs()).collect();
    errors.sort_by(f64::total_cmp);
    errors.get(errors.len() / 2).copied().unwrap_or(0.0)
}

/// An engine's options as in a configuration file.
fn shown(options: &WrittenOptions, with_locations: bool) -> Map<String, Value> {
    // An object, unless a path is not UTF-8; with such a path no process can be started.
    match serde_json::to_value(options.shown(with_locations)) {
        Ok(Value::Object(options)) => options,
        _ => Map::new(),
    }
}

fn same_weights(from: &Node, to: &Node) -> Option<bool> {
    let weights = |node: &Node| Some(node.last_info()?.fingerprint?.weights);
    Some(weights(from)? == weights(to)?)
}

/// Why a node does not do a task for a model: by its refusal, or by what it ran last.
fn bar(model: &ServedModel, node: &Node, bars: Bars) -> Option<BarReason> {
    node.health.status().refusal().map(BarReason::from).or_else(|| bars(model, &*node.last_info()?))
}

fn word(reason: Option<BarReason>) -> Option<String> {
    reason.map(|reason| reason.as_str().to_owned())
}

/// Returns true if a node is known to serve another model and not this one. Nodes are in the lists of all models that they
/// may turn out to serve.
fn serves_another(model: &ServedModel, all: &[Arc<ServedModel>], node: &Node, bars: Bars) -> bool {
    let Some(info) = node.last_info() else { return false };
    bars(model, &info).is_some() && all.iter().any(|model| bars(model, &info).is_none())
}

fn load_state(report: LoadReport) -> LoadStateReport {
    let history = report.history;
    LoadStateReport {
        state: report.state,
        bytes: report.bytes,
        measured_bytes: report.measured_bytes,
        active: report.n_active,
        waiting: u32::try_from(report.n_waiting).unwrap_or(u32::MAX),
        expires_at_ms: report.expires_at.map(unix_ms),
        loads: history.n_loads,
        load_seconds: history.load_time.as_secs_f64(),
        last_load_seconds: history.last_load.as_secs_f64(),
        unloads: history.unloads.iter().map(|(why, n)| (why.as_str().to_owned(), *n)).collect(),
        last_failure: report.last_failure,
    }
}

#[cfg(test)]
mod tests {
    use baton_schemas::handoff::HandoffReport;

    use super::*;

    #[test]
    fn the_error_of_predictions_is_the_median_of_the_listed_routes() {
        let route = |ttft_ms: Option<f64>, predicted: f64, failure: Option<HandoffFailure>| {
            let handoff = HandoffReport { failure, ..HandoffReport::default() };
            RouteRecord {
                ttft_ms,
                predicted_ttft_ms: Some(predicted),
                handoff: Some(handoff),
                ..RouteRecord::default()
            }
        };
        let error = |routes: &[RouteRecord]| prediction_error(routes.iter());
        assert_eq!(error(&[]), 0.0);
        let mut routes: Vec<_> = [100.0, 110.0, 80.0, 90.0].map(|ms| route(Some(ms), 100.0, None)).into();
        // One bad prediction, ones without a first token or a time, and a handoff that broke.
        routes.extend([route(Some(1_000.0), 100.0, None), route(None, 100.0, None), route(Some(9.0), 0.0, None)]);
        routes.push(route(Some(5_000.0), 100.0, Some(HandoffFailure::PrefillLost)));
        assert!((error(&routes) - 0.1).abs() < 1e-9, "{}", error(&routes));
        // As the rows show it: from arrival. Much earlier than predicted is at most 100 %.
        let waited = RouteRecord { before_plan_ms: 900.0, ..route(Some(10.0), 100.0, None) };
        assert!((error(&[waited]) - 0.09).abs() < 1e-9);
        assert!((error(&[route(Some(24.0), 73.0, None)]) - 49.0 / 73.0).abs() < 1e-9);
    }
}

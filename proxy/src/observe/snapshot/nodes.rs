//! Nodes.

use baton_engines::engine_options::{EngineKind, WrittenOptions};
use baton_planner::rates::Curve;
use baton_planner::reason::FailureReason;
use baton_schemas::kv::CodecLoss;
use baton_schemas::node::KvIdentity;
use baton_schemas::store_report::StoreReport;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::counts::{BreakerReport, breaker, unix_ms};
use crate::targets::nodes::{Node, NodeState, StateTransition, Task, WorkerReport};

/// A node and one of its tasks. Its own figures are zero until it has answered. Those of its process are zero while it does not run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "NodeState")]
pub struct NodeReport {
    /// As in `x-baton-route`.
    pub name: String,
    /// Its task for this model.
    pub task: Task,
    /// Its state.
    #[serde(rename = "life")]
    pub state: NodeState,
    /// The reason why it is not ready, in words that are safe to show.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Start of this state, milliseconds since the Unix epoch.
    #[serde(default, rename = "life_since_ms")]
    pub state_since_ms: u64,
    /// Its changes of state since the endpoint's start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub transitions: Vec<TransitionState>,
    /// False until it has answered for the first time.
    #[serde(default)]
    pub has_answered: bool,
    /// The reason why it does not serve this model even when it is ready, in one word.
    #[serde(default, alias = "barred", skip_serializing_if = "Option::is_none")]
    pub unused_reason: Option<String>,
    /// Why it is not used for this task by any model, and what to do, in a sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unused: Option<String>,
    /// Its URL; only for operators.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// `llama`, `candle`, `mlx` or `sim`.
    pub engine: String,
    /// True if the engine is a simulator: its figures are those of a simulation.
    #[serde(default)]
    pub simulated: bool,
    /// True for an engine that the endpoint itself started.
    #[serde(default)]
    pub own: bool,
    /// Its options, if the endpoint itself starts it: those that are set, as `[model.engine]` has them. Files and addresses
    /// are for operators.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    #[schemars(with = "WrittenOptions")]
    pub options: Map<String, Value>,
    /// The version of its program; empty if it does not say.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// The devices that compute, as the engine names them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<String>,
    /// Workers that compute a part of its model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub workers: Vec<WorkerReport>,
    /// The model by the node's own name for it.
    pub model: String,
    /// Tokens that one sequence may hold.
    pub n_ctx: u32,
    /// Sequences decoded together.
    pub slots: u32,
    /// Slots with a running sequence.
    pub active_slots: u32,
    /// Sequences that wait for a slot.
    pub queued: u32,
    /// Prompt tokens accepted and not computed yet.
    pub prefill_backlog_tokens: u32,
    /// KV cells that no running sequence holds.
    pub free_kv_cells: u32,
    /// All KV cells, of all slots together; 0 if the node does not say.
    #[serde(default)]
    pub kv_cells: u32,
    /// Weights and KV cache, bytes.
    pub memory_bytes: u64,
    /// Bytes of its model's files; 0 if it does not say. Each token of one stream reads about as many.
    #[serde(default)]
    pub weights_bytes: u64,
    /// The KV that it keeps outside its slots. Missing if it keeps none, or does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_store: Option<StoreReport>,
    /// Keeps requests for this task away from it while it fails.
    pub breaker: BreakerReport,
    /// Prompt tokens per second, measured at about these prompt lengths.
    pub prefill_rates: Vec<RatePoint>,
    /// Tokens per second of one stream, measured with about these numbers of streams.
    pub decode_rates: Vec<RatePoint>,
    /// Why its model's KV is not handed over, in one word. Missing if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_handoff: Option<String>,
    /// Bytes of a token's KV that a handoff moves; 0 if its model is not handed over.
    #[serde(default)]
    pub kv_bytes_per_token: u64,
    /// Bytes of the states of recurrent layers that a handoff moves, whatever the prompt's length.
    #[serde(default)]
    pub kv_state_bytes: u64,
    /// What the lossy codecs of its KV do to predictions, by `baton-bench calibrate-codec`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kv_losses: Vec<CodecLoss>,
}

/// A change from one state to another.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TransitionState {
    /// The state before.
    pub from: NodeState,
    /// The state after.
    pub to: NodeState,
    /// The reason, in one word.
    pub reason: String,
    /// Number of such changes.
    pub count: u64,
}

/// A point of a measured curve.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RatePoint {
    /// Tokens of the prompt, or streams that share a step: a power of two.
    pub size: u32,
    /// Tokens per second.
    pub tokens_per_second: f64,
}

pub(super) fn report(node: &Node, task: Task, with_address: bool) -> NodeReport {
    let status = node.health.status();
    let breaker = breaker(node.breakers.of(task).view(), FailureReason::as_str);
    let state = match status.state() {
        // Only its other task fails.
        NodeState::Suspect if !status.is_silent() && !breaker.is_open => NodeState::Ready,
        state => state,
    };
    let of_process = status.running().map(|info| NodeReport {
        version: info.version.clone(),
        workers: WorkerReport::of(info, with_address),
        slots: info.n_slots,
        memory_bytes: info.memory.bytes(),
        ..NodeReport::default()
    });
    // What a lost node ran, it will probably run again.
    let of_model = node.last_info().map(|info| NodeReport {
        engine: info.engine.clone(),
        simulated: EngineKind::is_simulated(&info.engine),
        devices: info.devices.clone(),
        model: info.model.clone(),
        n_ctx: info.n_ctx,
        weights_bytes: info.facts.file_bytes,
        no_handoff: info.no_handoff.map(|reason| reason.as_str().to_owned()),
        kv_bytes_per_token: info.kv.as_ref().map_or(0, |kv| kv.bytes_per_token() as u64),
        kv_state_bytes: info.kv.as_ref().map_or(0, KvIdentity::state_bytes),
        kv_losses: info.kv.as_ref().map(|kv| CodecLoss::usable(&kv.losses)).unwrap_or_default(),
        ..of_process.unwrap_or_default()
    });
    let load = node.load();
    let rates = node.rates();
    NodeReport {
        name: node.name.clone(),
        task,
        own: node.url.is_none(),
        state,
        reason: (state != NodeState::Ready).then_some(status.words),
        state_since_ms: unix_ms(status.since),
        has_answered: node.last_info().is_some(),
        transitions: node.health.transitions().into_iter().map(|(change, count)| transition(change, count)).collect(),
        address: address(node).filter(|_| with_address),
        active_slots: load.active_slots,
        queued: load.queued,
        prefill_backlog_tokens: load.prefill_backlog,
        free_kv_cells: load.free_cells,
        kv_cells: load.n_cells,
        kv_store: load.store,
        breaker,
        prefill_rates: points(&rates.prefill),
        decode_rates: points(&rates.decode),
        ..of_model.unwrap_or_default()
    }
}

/// A found node's URL has a made-up host, so its addresses say more.
fn address(node: &Node) -> Option<String> {
    match &node.found {
        Some(found) => Some(found.paths.addresses().iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")),
        None => node.url.clone(),
    }
}

fn transition(StateTransition { from, to, reason }: StateTransition, count: u64) -> TransitionState {
    TransitionState { from, to, reason: reason.as_str().to_owned(), count }
}

pub(super) fn points(curve: &Curve) -> Vec<RatePoint> {
    let point = |(size, tokens_per_second)| RatePoint { size, tokens_per_second };
    curve.points().into_iter().map(point).collect()
}

//! The endpoint at one moment: one typed snapshot that everything which shows it is made from, the JSON and the event
//! stream of `/baton/state`, the gauges of `/metrics` and the tables of `baton status`.
//!
//! It holds no text of any prompt or reply, and addresses of nodes only where they are asked for.

mod build;

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use self::build::{Observed, snapshot};
use crate::observe::RouteRecord;
pub use crate::targets::nodes::{Life, Task};

/// See the module.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EndpointState {
    /// Of the program.
    pub version: String,
    /// When this was, milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// Whether it was told to stop: what runs may end, and nothing more is let in.
    #[serde(default)]
    pub is_stopping: bool,
    /// The door.
    pub requests: RequestsState,
    /// In the order of the configuration.
    pub models: Vec<ModelState>,
    /// Servers that speak text, in the order of the configuration.
    #[serde(default)]
    pub upstreams: Vec<UpstreamState>,
    /// Bytes that own models may take; 0: without end.
    #[serde(default)]
    pub memory_budget_bytes: u64,
    /// The last routes, the newest first.
    pub routes: Vec<RouteRecord>,
    /// What is not as configured, in a sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// Requests in the house.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RequestsState {
    /// Being served.
    pub admitted: u64,
    /// Served at once at most.
    pub limit: u64,
    /// Waiting to be served.
    pub waiting: u64,
}

/// A served model.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ModelState {
    /// Its public name; empty until a node has said what it runs.
    pub name: String,
    /// Other names that find it.
    pub aliases: Vec<String>,
    /// How its requests are planned.
    pub policy: String,
    /// Decode nodes first.
    pub nodes: Vec<NodeState>,
    /// From every prefill node to every decode node.
    pub links: Vec<LinkState>,
    /// How often requests had to go another way than planned, by reason.
    pub fallbacks: BTreeMap<String, FallbackState>,
    /// Mean of |ln(actual ÷ predicted)| of the time to first token; 0.1 is about 10 %. 0 until there was one.
    pub prediction_error: f64,
    /// Tokens that a reply has on average.
    pub mean_output_tokens: f64,
    /// Whether it is in memory; only of models that come and go.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub residency: Option<ResidencyState>,
}

/// How a model comes and goes.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ResidencyState {
    /// `unloaded`, `loading`, `loaded`, `unloading` or `failed`.
    pub life: String,
    /// What it takes of the budget when it is loaded: an estimate, or what was measured if that is more.
    pub bytes: u64,
    /// What its process holds.
    pub measured_bytes: u64,
    /// Requests that use it.
    pub active: u32,
    /// Requests that wait for it to be loaded.
    pub waiting: u32,
    /// When it goes if nobody uses it, milliseconds since the Unix epoch; not there if it does not go by itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at_ms: Option<u64>,
    /// How often it was loaded.
    pub loads: u64,
    /// How long that took together, seconds.
    pub load_seconds: f64,
    /// And the last time, seconds.
    pub last_load_seconds: f64,
    /// How often it was unloaded, by reason.
    pub unloads: BTreeMap<String, u64>,
    /// Why it could not be loaded the last time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_failure: Option<String>,
}

/// A node. Its own figures are zero until it has answered.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeState {
    /// As in `x-baton-route`.
    pub name: String,
    /// What it does here.
    pub task: Task,
    /// Where it is in its life.
    pub life: Life,
    /// Why it is not ready, in words that are safe to show.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// When it came into this state, milliseconds since the Unix epoch.
    #[serde(default)]
    pub life_since_ms: u64,
    /// How it came from one state to the next since the endpoint's start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub transitions: Vec<TransitionState>,
    /// Why this model is not served by it, ready as it may be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub barred: Option<String>,
    /// Where other nodes reach it; only for operators.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// `llama` or `sim`.
    pub engine: String,
    /// The model by the node's own name for it.
    pub model: String,
    /// Tokens one sequence may hold.
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
    /// Weights and KV cache, bytes.
    pub memory_bytes: u64,
    /// What keeps requests for this task away from it.
    pub breaker: BreakerState,
    /// Prompt tokens per second, measured at about these prompt lengths.
    pub prefill_rates: Vec<RatePoint>,
    /// Tokens per second of one stream, measured with about so many streams.
    pub decode_rates: Vec<RatePoint>,
}

/// A way from one state to another, and how often it was taken.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TransitionState {
    /// What the node was.
    pub from: Life,
    /// What it became.
    pub to: Life,
    /// Why, in one word.
    pub reason: String,
    /// How often.
    pub count: u64,
}

/// A server that speaks text.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct UpstreamState {
    /// As in `x-baton-route`.
    pub name: String,
    /// Which server it is.
    pub kind: String,
    /// Where it is in its life, as its list of models shows.
    pub life: Life,
    /// Why it does not answer, in one word.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Where it is; only for operators.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The models that it serves here, by our names.
    pub models: Vec<String>,
    /// Replies that it generates.
    pub running: u32,
    /// Replies that wait for a place.
    pub waiting: u32,
    /// Replies at once at most.
    pub limit: u32,
    /// The longest time for which it has asked to be left alone with one of its models, milliseconds; 0 if it has not.
    pub busy_ms: u64,
    /// What keeps requests away from it.
    pub breaker: BreakerState,
    /// How often its prefill servers could not be used, by reason.
    pub fallbacks: BTreeMap<String, FallbackState>,
}

/// A point of a measured curve.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RatePoint {
    /// Tokens of the prompt, or streams that share a step: a power of two.
    pub size: u32,
    /// Tokens per second.
    pub tokens_per_second: f64,
}

/// A breaker: of a node's task, of a link, or of an upstream.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BreakerState {
    /// Requests are kept away, but for one now and then.
    pub is_open: bool,
    /// Failures since the last success.
    pub failures_in_a_row: u32,
    /// Why it failed last.
    pub last_reason: Option<String>,
    /// Failures by reason since the start.
    pub failures: BTreeMap<String, u64>,
}

/// The way from a prefill node to a decode node. Figures are 0 until measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LinkState {
    /// Where KV comes from.
    pub prefill: String,
    /// Where it goes.
    pub decode: String,
    /// Bytes per second.
    pub bytes_per_second: f64,
    /// Round trip, milliseconds.
    pub rtt_ms: f64,
    /// What a handoff's end takes beyond its last chunk's wire time, milliseconds.
    pub tail_ms: f64,
    /// What keeps handoffs between the two away, well as each of them may be.
    #[serde(default)]
    pub breaker: BreakerState,
}

/// How often a reason made requests go another way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FallbackState {
    /// Since the start.
    pub count: u64,
    /// The last time, milliseconds since the Unix epoch.
    pub last_ms: u64,
}

//! The endpoint at one moment. One typed snapshot is the source of the JSON and the event stream of `/baton/state`, the
//! gauges of `/metrics` and the tables of `baton status`.
//!
//! It holds no text of any prompt or reply, and addresses only for operators.

mod counts;
mod found;
mod models;
mod nodes;
mod upstreams;
mod versions;

use std::sync::Arc;
use std::time::SystemTime;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use self::counts::{BreakerReport, FallbackState};
pub use self::models::{KvReturnsState, LinkState, LoadStateReport, ModelState};
pub use self::nodes::{NodeReport, RatePoint, TransitionState};
pub use self::upstreams::{MeasuredModelReport, PrefillServerReport, UpstreamReport};
use crate::observe::readiness::failed_loads;
use crate::observe::{Observer, RouteRecord};
pub use crate::targets::found::{DiscoveryState, FoundAddress, FoundNode, FoundState};
pub use crate::targets::model_loading::LoadState;
use crate::targets::models::{ModelPool, ServedModel};
use crate::targets::upstreams::UpstreamPool;

/// The state of the endpoint at one moment.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EndpointState {
    /// The program's version.
    pub version: String,
    /// When the snapshot was taken, milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// True after a stop signal: running requests may finish, and no more are admitted.
    #[serde(default)]
    pub is_stopping: bool,
    /// Admission.
    pub requests: RequestsState,
    /// In the order of the configuration.
    pub models: Vec<ModelState>,
    /// Other servers, in the order of the configuration.
    #[serde(default)]
    pub upstreams: Vec<UpstreamReport>,
    /// What was found in the network; missing if nothing is searched for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub discovery: Option<DiscoveryState>,
    /// Bytes that the models loaded on demand may take; 0: no limit.
    #[serde(default)]
    pub memory_budget_bytes: u64,
    /// Requests that have not ended, running or waiting, the newest first, at most 128.
    #[serde(default, alias = "running")]
    pub open: Vec<RouteRecord>,
    /// The last requests that ended, the newest first: at most 64 that were served, and 16 that were refused or had no
    /// route when their clients left.
    pub routes: Vec<RouteRecord>,
    /// Differences from the configuration, a sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// Requests in the endpoint.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RequestsState {
    /// An engine works for them. Not those that wait in the endpoint's queue, in a node's, or for another engine.
    #[serde(alias = "admitted")]
    pub running: u64,
    /// Slots that requests have: one for each reply that is being generated, or whose prompt waits in another node's queue.
    #[serde(default)]
    pub slots: u64,
    /// All slots.
    pub limit: u64,
    /// No engine works for them: they wait for their model, their prompt or a slot.
    pub waiting: u64,
    /// Bytes of memory that these and arriving requests hold: bodies, what they became, collected replies.
    #[serde(default)]
    pub memory_bytes: u64,
    /// The most bytes that they may hold.
    #[serde(default)]
    pub memory_limit_bytes: u64,
    /// How often there was no memory for a request.
    #[serde(default)]
    pub memory_refusals: u64,
}

/// The parts of the endpoint that a snapshot shows.
pub struct Observed<'a> {
    /// The models and their nodes.
    pub pool: &'a ModelPool,
    /// Other servers.
    pub upstreams: &'a UpstreamPool,
    /// Admitted and waiting requests.
    pub requests: RequestsState,
    /// Those of them that a list shows, the newest first.
    pub open: Vec<RouteRecord>,
    /// The last requests that ended.
    pub observer: &'a Observer,
    /// What was found in the network; `None` if nothing is searched for.
    pub discovery: Option<DiscoveryState>,
    /// Bytes that the models loaded on demand may take; `None`: no limit.
    pub memory_budget: Option<u64>,
}

/// Takes a snapshot. The nodes' addresses are for operators only.
pub fn snapshot(observed: &Observed<'_>, with_addresses: bool) -> EndpointState {
    let &Observed { pool, upstreams, .. } = observed;
    let models = pool.models();
    let unused = pool.unused_nodes();
    let version = env!("CARGO_PKG_VERSION");
    let routes = observed.observer.journal.latest();
    let report = |model: &Arc<ServedModel>| models::report(model, &models, &unused, &routes, with_addresses);
    let reports: Vec<_> = models.iter().map(report).collect();
    let of_versions = versions::difference(version, &reports);
    EndpointState {
        version: version.to_owned(),
        at_ms: counts::unix_ms(SystemTime::now()),
        // Only the server knows.
        is_stopping: false,
        requests: observed.requests.clone(),
        models: reports,
        upstreams: upstreams.servers.iter().map(|server| upstreams::report(server, with_addresses)).collect(),
        discovery: observed.discovery.as_ref().map(|state| found::report(state, &models, with_addresses)),
        memory_budget_bytes: observed.memory_budget.unwrap_or(0),
        open: observed.open.clone(),
        routes,
        warnings: unused.iter().map(ToString::to_string).chain(failed_loads(pool)).chain(of_versions).collect(),
    }
}

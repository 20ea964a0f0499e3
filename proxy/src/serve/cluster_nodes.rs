//! The nodes that serve: those that the configuration names, and those that were found in the network.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use arc_swap::ArcSwap;
use baton_schemas::sampling_fields::SamplingFields;

use super::planning::plan_by;
use super::usage_ledger;
use crate::config::{NodeWake, RoutingConfig, ServeConfig};
use crate::targets::models::{ModelPool, ServedModel};
use crate::targets::nodes::{Node, WakeTimes};

/// Nodes by their tasks: those that generate, and those that help them with prompts or drafts. A node with both is in both.
#[derive(Default, Clone)]
pub(super) struct NodeLists {
    pub decode: Vec<Arc<Node>>,
    pub prefill: Vec<Arc<Node>>,
}

impl NodeLists {
    fn all(&self) -> impl Iterator<Item = &Arc<Node>> {
        self.decode.iter().chain(&self.prefill)
    }
}

/// Names and defaults of `[model]`, for a model that a node brings.
struct ModelSettings {
    name: Option<String>,
    aliases: Vec<String>,
    sampling: SamplingFields,
}

impl ModelSettings {
    fn of(config: &ServeConfig) -> ModelSettings {
        ModelSettings { name: config.name.clone(), aliases: config.aliases.clone(), sampling: config.sampling }
    }
}

struct ClusterParts {
    configured: NodeLists,
    found: NodeLists,
    model: ModelSettings,
}

/// The nodes of the endpoint's models. Changes take effect for the next request; streams stay on their nodes.
pub(super) struct ClusterNodes {
    pool: Arc<ModelPool>,
    routing: Arc<ArcSwap<RoutingConfig>>,
    wake_times: Arc<WakeTimes>,
    parts: Mutex<ClusterParts>,
}

impl ClusterNodes {
    /// The cluster of a pool that has the configured nodes.
    pub(super) fn new(
        pool: Arc<ModelPool>,
        routing: Arc<ArcSwap<RoutingConfig>>,
        configured: NodeLists,
        config: &ServeConfig,
    ) -> ClusterNodes {
        let parts = ClusterParts { configured, found: NodeLists::default(), model: ModelSettings::of(config) };
        let wake_times = Arc::new(WakeTimes::open(usage_ledger::folder(&config.startup).as_deref()));
        set_wakers(&parts, &routing.load(), &wake_times);
        ClusterNodes { pool, routing, wake_times, parts: Mutex::new(parts) }
    }

    /// Replaces the configured nodes.
    pub(super) fn set_configured(&self, nodes: NodeLists, config: &ServeConfig) {
        let mut parts = self.lock();
        parts.configured = nodes;
        parts.model = ModelSettings::of(config);
        self.apply(&parts);
    }

    /// Replaces the found nodes.
    pub(super) fn set_found(&self, nodes: NodeLists) {
        let mut parts = self.lock();
        parts.found = nodes;
        self.apply(&parts);
    }

    /// The processes of the configured nodes, as far as they have answered.
    pub(super) fn configured_processes(&self) -> Vec<u64> {
        self.lock().configured.all().map(|node| node.process()).filter(|process| *process != 0).collect()
    }

    /// Returns true if a configured node has this name.
    pub(super) fn has_name(&self, name: &str) -> bool {
        self.lock().configured.all().any(|node| node.name == name)
    }

    fn apply(&self, parts: &ClusterParts) {
        let ClusterParts { configured, found, model } = parts;
        let decode = [&configured.decode[..], &found.decode].concat();
        let prefill = [&configured.prefill[..], &found.prefill].concat();
        let first = || {
            let name = model.name.clone().map_or_else(OnceLock::new, OnceLock::from);
            let mut served = ServedModel::new(name, model.aliases.clone(), decode.clone(), prefill.clone());
            served.sampling = model.sampling;
            served.removed_keys = Arc::clone(&self.pool.removed_keys);
            served
        };
        let routing = self.routing.load();
        set_wakers(parts, &routing, &self.wake_times);
        self.pool.replace_nodes(&decode, &prefill, first, |model| plan_by(&routing, model));
    }

    fn lock(&self) -> MutexGuard<'_, ClusterParts> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells each node whether and how its machine is woken.
fn set_wakers(parts: &ClusterParts, routing: &RoutingConfig, times: &Arc<WakeTimes>) {
    for node in parts.configured.all().chain(parts.found.all()) {
        let is_named = |wake: &&NodeWake| wake.node == node.name || node.url.as_ref() == Some(&wake.node);
        node.set_waker(routing.wake.iter().find(is_named).map(|wake| wake.settings), times);
    }
}

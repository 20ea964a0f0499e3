//! The tokens of a prompt that a node need not compute, and the time until they are in a slot.

use baton_schemas::held::RestoreRates;

use crate::snapshot::{HeldTokens, NodeView, RequestSize};

/// What a node starts a prompt from.
#[derive(Debug, Clone, Copy)]
pub(super) struct PromptStart {
    /// Tokens that need not be computed there.
    pub(super) n_cached: u32,
    /// Tokens that are prefilled there.
    pub(super) missing: f64,
    /// Seconds until the cached ones are in a slot.
    pub(super) restore: f64,
}

impl PromptStart {
    /// What is in a slot, and as much of what the store has as comes sooner than it is computed. The node itself decides so. A rate
    /// that is not measured yet counts as no time, so that it is measured.
    pub(super) fn of(request: &RequestSize, node: &NodeView) -> PromptStart {
        PromptStart::with(node.held.part(node.belief), request, node)
    }

    /// The same if it holds these.
    fn with(held: HeldTokens, request: &RequestSize, node: &NodeView) -> PromptStart {
        let HeldTokens { slot, memory, disk } = held;
        let RestoreRates { memory: memory_tps, disk: disk_tps } = node.rates.restore;
        let seconds = |n: u32, tps: f64| if tps > 0.0 { f64::from(n) / tps } else { 0.0 };
        let start = |n_cached: u32, restore: f64| {
            let missing = f64::from(request.n_prefill().saturating_sub(n_cached));
            PromptStart { n_cached, missing, restore }
        };
        // The prompt's last token is always computed.
        let most = request.n_prompt.saturating_sub(1);
        let slot = slot.min(most);
        let wanted = most - slot;
        let (memory, disk) = (memory.min(wanted), disk.min(wanted.saturating_sub(memory)));
        let from_memory = seconds(memory, memory_tps);
        let in_memory = start(slot.saturating_add(memory), from_memory);
        let on_disk = start(in_memory.n_cached.saturating_add(disk), from_memory + seconds(disk, disk_tps));
        let until_computed = |start: &PromptStart| {
            start.restore + node.rates.prefill.at(start.missing).map_or(start.missing, |tps| start.missing / tps)
        };
        let starts = [start(slot, 0.0), in_memory, on_disk];
        let first = starts.into_iter().min_by(|a, b| until_computed(a).total_cmp(&until_computed(b)));
        first.unwrap_or(in_memory)
    }

    /// Tokens that must be decoded again before new ones are generated.
    pub(super) fn replay(&self, request: &RequestSize) -> f64 {
        f64::from((request.n_prompt.saturating_sub(1).saturating_sub(self.n_cached)).min(request.n_replayed))
    }
}

/// Tokens of a prompt that a node probably need not compute.
pub fn n_cached(request: &RequestSize, node: &NodeView) -> u32 {
    PromptStart::of(request, node).n_cached
}

/// The same if all is believed that the node says: what it must have to keep its promise.
pub fn n_promised(request: &RequestSize, node: &NodeView) -> u32 {
    PromptStart::with(node.held, request, node).n_cached
}

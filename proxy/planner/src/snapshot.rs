//! What a plan is made from: the request's size and what is known of every node, at one moment.

use crate::rates::{LinkRates, NodeRates};
use crate::reason::BarReason;

/// A request, as far as its cost goes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RequestSize {
    /// Tokens of the prompt, at least 1. All but the last are prefilled, or replayed.
    pub n_prompt: u32,
    /// Tokens at its end that are decoded again, one a step: those that a greedy reply had when its engine was lost.
    pub n_replayed: u32,
    /// Tokens that the reply will probably have, at least 1.
    pub n_output: f64,
}

impl RequestSize {
    /// Tokens that are computed as a prompt is.
    pub fn n_prefill(&self) -> u32 {
        self.n_prompt.saturating_sub(1).saturating_sub(self.n_replayed)
    }
}

/// One node at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeView {
    /// For explanations.
    pub name: String,
    /// Why it cannot be sent requests, if it cannot.
    pub barred: Option<BarReason>,
    /// Sequences it decodes together.
    pub n_slots: u32,
    /// Sequences in slots.
    pub n_active: u32,
    /// Sequences that wait for a slot.
    pub n_queued: u32,
    /// Prompt tokens it was asked to compute and has not computed yet.
    pub n_backlog: u32,
    /// Tokens at the front of this prompt whose KV it probably holds.
    pub n_cached: u32,
    /// What was measured of it.
    pub rates: NodeRates,
    /// Bytes of KV of one token; `None` for a model that cannot be handed over.
    pub kv_bytes_per_token: Option<u32>,
}

/// The whole picture for one request.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// What is asked.
    pub request: RequestSize,
    /// Nodes that can generate.
    pub decode: Vec<NodeView>,
    /// Nodes that can compute the prompt for another.
    pub prefill: Vec<NodeView>,
    /// Of the ways from prefill nodes to decode nodes: `links[prefill][decode]`.
    pub links: Vec<Vec<LinkRates>>,
    /// Why no handoff is tried between two nodes that are well, if there is a reason: `barred_pairs[prefill][decode]`.
    pub barred_pairs: Vec<Vec<Option<BarReason>>>,
    /// By how much predictions of a route have been wrong: actual ÷ predicted time to first token.
    /// `corrections[0][decode]` for direct generation, `corrections[1 + prefill][decode]` for a handoff.
    pub corrections: Vec<Vec<f64>>,
    /// Counts requests, for policies that take turns.
    pub turn: u64,
}

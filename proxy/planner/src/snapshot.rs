//! The input of a plan: the request's size and the state of every node at one moment.

use baton_schemas::no_handoff::NoHandoffReason;

use crate::rates::{LengthFactors, NodeRates, TransferRates};
use crate::reason::BarReason;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RequestSize {
    /// Tokens of the prompt, at least 1. All but the last are prefilled or replayed.
    pub n_prompt: u32,
    /// Tokens at its end that are decoded again, one per step: the reply so far, if its engine was lost.
    pub n_replayed: u32,
    /// The expected number of tokens in the reply, at least 1.
    pub n_output: f64,
}

impl RequestSize {
    /// Tokens that are prefilled.
    pub fn n_prefill(&self) -> u32 {
        self.n_prompt.saturating_sub(1).saturating_sub(self.n_replayed)
    }
}

/// One node at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeView {
    /// The node's name, for explanations.
    pub name: String,
    /// The reason why it cannot be sent requests, if there is one.
    pub barred: Option<BarReason>,
    /// It only guesses for others, so no route has it.
    pub only_drafts: bool,
    /// Milliseconds until it is awake, if its machine sleeps and would be woken for this request.
    pub wake_ms: Option<f64>,
    /// Sequences that it decodes together.
    pub n_slots: u32,
    /// Sequences in slots.
    pub n_active: u32,
    /// Sequences that wait for a slot.
    pub n_queued: u32,
    /// Requested prompt tokens that it has not computed yet.
    pub n_backlog: u32,
    /// Tokens at the start of this prompt whose KV it probably holds.
    pub held: HeldTokens,
    /// The part of `held` that is counted on, from 0 to 1.
    pub belief: f64,
    pub rates: NodeRates,
    /// What a handoff of its model moves. Errors: why its KV is not handed over.
    pub kv: Result<KvSize, NoHandoffReason>,
}

/// Tokens at the start of a prompt whose KV a node holds, by where it is: those in a slot, then further ones in the store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HeldTokens {
    pub slot: u32,
    /// In the store, in the host's memory.
    pub memory: u32,
    /// In the store, on disk.
    pub disk: u32,
}

impl HeldTokens {
    /// Tokens in a slot alone.
    pub fn in_slot(slot: u32) -> HeldTokens {
        HeldTokens { slot, ..HeldTokens::default() }
    }

    /// This part of each.
    pub fn part(&self, part: f64) -> HeldTokens {
        let of = |n: u32| (f64::from(n) * part) as u32;
        HeldTokens { slot: of(self.slot), memory: of(self.memory), disk: of(self.disk) }
    }

    /// The sum.
    pub fn all(&self) -> u32 {
        self.slot.saturating_add(self.memory).saturating_add(self.disk)
    }
}

/// The bytes of a sequence's KV.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KvSize {
    /// Bytes of each token's rows.
    pub bytes_per_token: u32,
    /// Bytes of the states of recurrent layers, whatever the number of tokens.
    pub state_bytes: u64,
}

impl Default for NodeView {
    fn default() -> NodeView {
        NodeView {
            name: String::new(),
            barred: None,
            only_drafts: false,
            wake_ms: None,
            n_slots: 0,
            n_active: 0,
            n_queued: 0,
            n_backlog: 0,
            held: HeldTokens::default(),
            belief: 1.0,
            rates: NodeRates::default(),
            kv: Err(NoHandoffReason::default()),
        }
    }
}

/// The request and all nodes at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    pub request: RequestSize,
    /// Nodes that can generate.
    pub decode: Vec<NodeView>,
    /// Nodes that can compute the prompt for another node.
    pub prefill: Vec<NodeView>,
    /// The links from prefill nodes to decode nodes: `links[prefill][decode]`.
    pub links: Vec<Vec<TransferRates>>,
    /// The reason why no handoff is tried between two usable nodes, if there is one: `barred_pairs[prefill][decode]`.
    pub barred_pairs: Vec<Vec<Option<BarReason>>>,
    /// The error of a route's earlier predictions: actual ÷ predicted time to first token, as far as rates do not explain it.
    /// `corrections[0][decode]` for direct generation, `corrections[1 + prefill][decode]` for a handoff.
    pub corrections: Vec<Vec<LengthFactors>>,
    /// The request's number, for policies that take turns.
    pub turn: u64,
}

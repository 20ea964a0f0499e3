//! The configuration of a simulated machine.

use super::SimTier;
use crate::engine_options::SimAbort;

/// Speeds and sizes of a simulated machine.
#[derive(Debug, Clone, PartialEq)]
pub struct SimConfig {
    pub model: String,
    /// Sequences decoded together.
    pub n_slots: u32,
    /// Tokens one sequence may hold.
    pub n_ctx: u32,
    /// Prompt tokens per second, shared by all prefilling sequences.
    pub prefill_tps: f64,
    /// Milliseconds of a prefill step beside its tokens, such as reading the weights. Prompts that wait for the same step share
    /// it. 0: each prompt's chunks have steps of their own.
    pub prefill_step_ms: f64,
    /// Tokens per second of one stream alone.
    pub decode_tps: f64,
    /// The share by which each further stream makes a decode step longer: the step reads the weights once, but the KV
    /// of every stream.
    pub decode_sharing_cost: f64,
    /// Sequences that may wait for a slot.
    pub max_queued: u32,
    /// Prompt tokens of a chunk: a cancelled request computes at most one more, and a handoff sends them together. As
    /// in real engines, the last chunks of a handoff are smaller.
    pub chunk_tokens: u32,
    /// Bytes of KV for each token, for handoffs; rounded to K and V of whole 2-byte values.
    pub kv_bytes_per_token: u32,
    /// Bytes of KV for each token that chunks really carry, to save memory. A simulated link, [within one
    /// process](super::link) or [between two](super::PacedPuller), still takes the time of `kv_bytes_per_token`.
    pub kv_bytes_carried: Option<u32>,
    /// Bytes of the states of a simulated hybrid model, for handoffs; rounded to values of 4 bytes. 0: the model has none.
    pub state_bytes: u32,
    /// The store in memory, and on disk.
    pub store: [SimTier; 2],
    /// The name of the device, for people.
    pub device: String,
    /// A fault for tests.
    pub abort: Option<SimAbort>,
}

impl Default for SimConfig {
    /// A small, fast machine.
    fn default() -> Self {
        SimConfig {
            model: "sim".into(),
            n_slots: 4,
            n_ctx: 16_384,
            prefill_tps: 5_000.0,
            prefill_step_ms: 0.0,
            decode_tps: 100.0,
            decode_sharing_cost: 0.0,
            max_queued: 256,
            chunk_tokens: 256,
            kv_bytes_per_token: 256,
            kv_bytes_carried: None,
            state_bytes: 0,
            store: Default::default(),
            device: "simulated".into(),
            abort: None,
        }
    }
}

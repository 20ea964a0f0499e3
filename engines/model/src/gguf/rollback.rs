//! How many tokens the states of a model can be taken back, so that guessed tokens can be verified.
//!
//! The state of a recurrent layer is the result of all tokens before it. llama.cpp can keep the states of some tokens before
//! the last one beside it (`n_rs_seq`), for each sequence. More of them allow longer drafts, and take more memory.

use super::{Gguf, has_compressed_rows};

/// The most tokens. Longer drafts are seldom right to their end.
const MOST: u32 = 8;

/// The kept states take at most this part of the memory of the weights, a quarter,
const PART_OF_WEIGHTS: u64 = 4;

/// or so many bytes where that is more: the states of small models weigh much beside their weights.
const LEAST_BUDGET: u64 = 512 << 20;

impl Gguf {
    /// Returns true if llama.cpp can take back the last tokens of what the model keeps of a sequence.
    pub fn takes_back(&self) -> bool {
        match self.architecture() {
            Some(name) if has_compressed_rows(name) => false,
            _ if !self.has_states() => true,
            // `llm_arch_supports_rs_rollback`, but for models with an indexer: nothing shows that its rows come back, too.
            Some("bailingmoe3" | "kimi-k3" | "lfm2" | "lfm2moe" | "nemotron_h" | "nemotron_h_moe") => true,
            Some("qwen35" | "qwen35moe") => true,
            _ => false,
        }
    }

    /// The tokens that can be taken back of the states of each of `n_sequences`, at most 8. 0: the model has no states, or they
    /// cannot be taken back, or they weigh too much. `n_ubatch`: tokens of a physical batch.
    pub fn n_rollback(&self, n_sequences: u32, n_ubatch: u32) -> u32 {
        let state_bytes = self.kv_shape().map_or(0, |shape| shape.state_bytes);
        if state_bytes == 0 || !self.takes_back() {
            return 0;
        }
        let budget = (self.files.n_bytes() / PART_OF_WEIGHTS).max(LEAST_BUDGET);
        let affordable = budget / state_bytes.saturating_mul(n_sequences.max(1).into());
        // llama.cpp ends the process unless a physical batch has room for such a draft and two more tokens.
        u32::try_from(affordable).unwrap_or(u32::MAX).min(MOST).min(n_ubatch.saturating_sub(2))
    }
}

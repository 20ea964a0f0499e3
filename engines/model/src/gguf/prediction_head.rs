//! The heads of models that predict further tokens themselves ("MTP", "nextn").

use super::kept_layers::rows_of_layers;
use super::{COMPUTE_RESERVE, CompanionMemory, Gguf, Sequences};
use crate::options::CacheTypes;

/// A model's head, which llama.cpp computes beside it. If it has several blocks, only the first one is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FoundHead {
    pub rows: HeadRows,
    /// Bytes of KV for each cell, in the given types.
    bytes_per_cell: u64,
}

/// The tokens of a batch whose hidden rows llama.cpp's graph of a head gives. Asking for others gives rows of other tokens, or ends
/// the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadRows {
    All,
    /// Rows with logits.
    WithLogits,
}

/// Why a model's own head guesses nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UnusedHead {
    #[error("the model has none")]
    Absent,
    #[error("llama.cpp does not compute it for this architecture")]
    NotComputed,
    #[error("it has several blocks, of which llama.cpp computes none for this architecture")]
    Several,
    #[error("its file lacks weights such as {0}")]
    Incomplete(&'static str),
    #[error("what the model keeps of a sequence is not taken back by a token")]
    NotTakenBack,
    #[error("it needs memory, which speculation = \"auto\" gives it")]
    NotAskedFor,
}

/// The assertions of llama.cpp about the heads of an architecture (`graph_mtp` in `src/models/*.cpp`): the process ends otherwise.
struct KnownHead {
    architecture: &'static str,
    rows: HeadRows,
    may_be_several: bool,
    /// Weights of the block that llama.cpp loads a model without.
    weights: &'static [&'static str],
}

const fn single(architecture: &'static str, weights: &'static [&'static str]) -> KnownHead {
    KnownHead { architecture, rows: HeadRows::All, may_be_several: false, weights }
}

const fn several(architecture: &'static str, rows: HeadRows, weights: &'static [&'static str]) -> KnownHead {
    KnownHead { architecture, rows, may_be_several: true, weights }
}

const KNOWN: [KnownHead; 12] = [
    single("bailingmoe3", &[]),
    single("cohere2moe", &["ffn_gate_inp"]),
    single("deepseek2", &["attn_q_a", "attn_k_b", "ffn_gate_inp"]),
    single("deepseek32", &["ffn_gate_inp"]),
    single("glm-dsa", &["ffn_gate_inp"]),
    single("glm4moe", &["ffn_gate_inp"]),
    several("hy_v3", HeadRows::All, &[]),
    several("mimo2", HeadRows::WithLogits, &["attn_qkv", "ffn_gate", "ffn_up", "ffn_down"]),
    single("nemotron_h_moe", &["nextn.shared_head_norm"]),
    single("qwen35", &[]),
    single("qwen35moe", &["ffn_gate_inp"]),
    several("step35", HeadRows::WithLogits, &[]),
];

/// Weights of every head.
const OF_ALL: [&str; 2] = ["nextn.enorm", "nextn.hnorm"];

impl FoundHead {
    /// The memory of its context, which has as many cells as the model's.
    pub fn memory(self) -> CompanionMemory {
        CompanionMemory { fixed: COMPUTE_RESERVE, per_cell: self.bytes_per_cell }
    }
}

impl Gguf {
    /// The head that llama.cpp can compute, with KV of these types. Errors: why there is none.
    pub fn prediction_head(&self, types: CacheTypes) -> Result<FoundHead, UnusedHead> {
        let n = self.number("nextn_predict_layers").filter(|n| *n > 0).ok_or(UnusedHead::Absent)?;
        let n_all = self.n_layer().ok_or(UnusedHead::Absent)?;
        let first = n_all.checked_sub(n).ok_or(UnusedHead::Absent)?;
        let has = |weight: &str| {
            let name = format!("blk.{first}.{weight}.weight");
            self.tensors.iter().any(|tensor| tensor.name == name)
        };
        if !has("nextn.eh_proj") {
            return Err(UnusedHead::Absent);
        }
        if !self.takes_back() {
            return Err(UnusedHead::NotTakenBack);
        }
        let known = KNOWN.iter().find(|known| self.architecture() == Some(known.architecture));
        let known = known.filter(|_| !self.scales_attention()).ok_or(UnusedHead::NotComputed)?;
        if n > 1 && !known.may_be_several {
            return Err(UnusedHead::Several);
        }
        if let Some(missing) = OF_ALL.iter().chain(known.weights).find(|weight| !has(weight)) {
            return Err(UnusedHead::Incomplete(missing));
        }
        let rows = rows_of_layers(self, first..n_all).ok_or(UnusedHead::NotComputed)?;
        let bytes_per_cell = rows.iter().map(|row| row.n_bytes(types)).fold(0, u64::saturating_add);
        Ok(FoundHead { rows: known.rows, bytes_per_cell })
    }

    /// The same, if guesses of an engine with these sequences can be verified.
    pub fn usable_head(&self, types: CacheTypes, sequences: Sequences) -> Result<FoundHead, UnusedHead> {
        let head = self.prediction_head(types)?;
        if self.has_states() && sequences.n_rollback == 0 { Err(UnusedHead::NotTakenBack) } else { Ok(head) }
    }

    /// Returns true if the sharpness of attention grows with the position, which no head of `deepseek2` computes.
    fn scales_attention(&self) -> bool {
        let scale = self.arch_key("attention.temperature_scale").and_then(|key| self.get(&key));
        scale.is_some_and(|scale| *scale != super::Value::Float(0.0))
    }
}

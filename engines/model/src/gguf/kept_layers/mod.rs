//! Which layers keep rows of tokens, and which keep states.
//!
//! The rules are those of llama.cpp: `llama_model::create_memory` and `load_arch_hparams` of each architecture for the layers,
//! `llama_kv_cache` for the rows, `llama_hparams::n_embd_r` and `n_embd_s` for the states. Where a file says in numbers what
//! a layer is, no name of an architecture is asked. Of an architecture that is not known here too much is counted, not too
//! little: rows of all its layers, and no window.
//!
//! Not counted: the history of n-grams of `qwen4exp` (one row a sequence).

mod numbers;
#[cfg(test)]
mod tests;

use std::ops::Range;

use super::kv_shape::{CacheRow, KvShape};
use super::window::GEMMA_PERIOD;
use super::{Gguf, Value};

/// llama.cpp's own limit is 512.
const MAX_LAYERS: u64 = 4096;

/// Bytes of a value of a state, which llama.cpp keeps in f32.
const STATE_VALUE_BYTES: u64 = 4;

impl Gguf {
    /// What the model keeps of sequences. `None` if the header does not describe it, as for embedding models.
    pub fn kv_shape(&self) -> Option<KvShape> {
        KeptLayers::of(self)?.shape()
    }
}

/// The rows of these layers for each token, as an MTP context of llama.cpp keeps them: of all positions, and without an indexer's.
pub(super) fn rows_of_layers(gguf: &Gguf, layers: Range<u64>) -> Option<Vec<CacheRow>> {
    let kept = KeptLayers::of(gguf)?;
    layers.map(|layer| kept.row(layer)).collect()
}

/// Returns true if models of this architecture keep rows that stand for several tokens, and a cache for each sequence.
pub fn has_compressed_rows(architecture: &str) -> bool {
    architecture == "deepseek4"
}

/// The layers of a model, as its header describes them.
struct KeptLayers<'g> {
    gguf: &'g Gguf,
    /// All blocks, those that predict further tokens included.
    n_all: u64,
    /// Blocks without these.
    n_layer: u64,
    /// Values of a recurrent layer's state; 0: no layer is recurrent.
    state_values: u64,
    /// Some layers are feed forward alone.
    has_feed_forward_layers: bool,
}

/// What a layer keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Keeps {
    Rows,
    State,
    Both,
    Nothing,
}

impl<'g> KeptLayers<'g> {
    /// `None`: the header has no number of blocks, or an absurd one.
    fn of(gguf: &'g Gguf) -> Option<Self> {
        // The header is not trusted: a block count of 2^60 would allocate 2^63 bytes of rows.
        let n_all = gguf.n_layer().filter(|n| *n <= MAX_LAYERS)?;
        let n_layer = n_all.saturating_sub(gguf.number("nextn_predict_layers").unwrap_or(0));
        let is_array = gguf.arch_key("feed_forward_length").and_then(|key| gguf.get(&key));
        let has_feed_forward_layers = matches!(is_array, Some(Value::Array(_)))
            && (0..n_layer).any(|layer| gguf.per_layer("feed_forward_length", layer) == Some(0));
        Some(KeptLayers { gguf, n_all, n_layer, state_values: state_values(gguf), has_feed_forward_layers })
    }

    fn shape(&self) -> Option<KvShape> {
        if self.gguf.architecture().is_some_and(has_compressed_rows) {
            return self.compressed();
        }
        let mut rows = Vec::new();
        let mut n_states = 0u64;
        for layer in 0..self.n_layer {
            let keeps = self.keeps(layer)?;
            if matches!(keeps, Keeps::Rows | Keeps::Both) {
                rows.push(self.row(layer)?);
                rows.extend(self.indexer_row(layer));
            }
            n_states += u64::from(matches!(keeps, Keeps::State | Keeps::Both));
        }
        let state_bytes = product(&[n_states, self.state_values, STATE_VALUE_BYTES]);
        Some(KvShape { rows, state_bytes, separate: false })
    }

    /// `None`: the header does not say how many heads the layer has.
    fn keeps(&self, layer: u64) -> Option<Keeps> {
        let gguf = self.gguf;
        let n_heads = gguf.n_head_kv(layer);
        if self.state_values == 0 {
            // The last layers of some models use the KV of layers before them.
            let n_shared = gguf.number("attention.shared_kv_layers").unwrap_or(0);
            let has_rows = n_heads? > 0 && layer < self.n_all.saturating_sub(n_shared);
            return Some(if has_rows { Keeps::Rows } else { Keeps::Nothing });
        }
        if gguf.architecture() == Some("falcon-h1") {
            return Some(Keeps::Both);
        }
        let is_feed_forward =
            self.has_feed_forward_layers && gguf.per_layer("feed_forward_length", layer).is_some_and(|n| n > 0);
        let is_recurrent = gguf.number("wkv.head_size").is_some()
            || match gguf.per_layer("attention.recurrent_layers", layer) {
                Some(flag) => flag > 0,
                None => match attention_interval(gguf) {
                    Some(interval) => !(layer + 1).is_multiple_of(interval),
                    None => n_heads.unwrap_or(0) == 0 && !is_feed_forward,
                },
            };
        Some(match is_recurrent {
            true => Keeps::State,
            false if is_feed_forward || n_heads? == 0 => Keeps::Nothing,
            false => Keeps::Rows,
        })
    }

    fn row(&self, layer: u64) -> Option<CacheRow> {
        let gguf = self.gguf;
        let window = gguf.sliding_window().filter(|_| self.is_windowed(layer));
        let dim = |of_windowed: &str, of_full: Option<u64>| match window {
            Some(_) => gguf.number(of_windowed).or(of_full),
            None => of_full,
        };
        let n_heads = gguf.n_head_kv(layer)?;
        let k = dim("attention.key_length_swa", gguf.head_dim_k())?;
        let v = match gguf.has_latent_rows() {
            true => 0,
            false => dim("attention.value_length_swa", gguf.head_dim_v())?,
        };
        Some(CacheRow { k: product(&[n_heads, k]), v: product(&[n_heads, v]), n_tokens: 1, window })
    }

    /// The row of a layer's indexer, which chooses the positions that the layer attends to. It has one head.
    fn indexer_row(&self, layer: u64) -> Option<CacheRow> {
        let gguf = self.gguf;
        let dim = gguf.number("attention.indexer.key_length").filter(|dim| *dim > 0)?;
        gguf.number("attention.indexer.top_k").filter(|n| *n > 0)?;
        if gguf.per_layer("attention.indexer.types", layer) == Some(0) {
            return None;
        }
        let is_pooled = gguf.number("attention.indexer.kpool").is_some_and(|n| n > 0);
        let is_compressed =
            || (0..self.n_all).any(|layer| gguf.per_layer("attention.compress_ratios", layer).is_some_and(|n| n > 0));
        let (k, v) = if is_pooled {
            // The key, its gate, and the pooled key.
            (dim.saturating_mul(3), 0)
        } else if self.state_values > 0 {
            // The key, and the pooled key.
            (dim.saturating_mul(if is_compressed() { 2 } else { 1 }), 0)
        } else if gguf.has_latent_rows() {
            (dim, 0)
        } else {
            // MiniMax M3. Its first layers are dense.
            (dim, gguf.head_dim_v().filter(|_| layer >= gguf.number("leading_dense_block_count").unwrap_or(0))?)
        };
        Some(CacheRow { k, v, n_tokens: 1, window: None })
    }

    /// For an architecture that is not in this list, only a file's own list of layers is trusted.
    fn is_windowed(&self, layer: u64) -> bool {
        const PATTERN: &str = "attention.sliding_window_pattern";
        let gguf = self.gguf;
        let pattern = gguf.arch_key(PATTERN).and_then(|key| gguf.get(&key));
        if let Some(Value::Array(_)) = pattern {
            return gguf.per_layer(PATTERN, layer).is_some_and(|flag| flag > 0);
        }
        // Each last layer of a period looks back at all positions.
        let period = match gguf.architecture() {
            Some("lfm2") => return true,
            Some("gpt-oss" | "gemma2") => 2,
            Some("afmoe" | "cohere2" | "exaone4" | "exaone-moe" | "mellum" | "muse-glimmer" | "olmo2") => 4,
            Some("gemma3n") => 5,
            Some("gemma3") => GEMMA_PERIOD,
            Some("plamo3") => 8,
            _ => return false,
        };
        let period = pattern.and_then(Value::as_u64).unwrap_or(period);
        period == 0 || layer % period < period - 1
    }

    /// DeepSeek V4: each layer has a window, and some have rows that stand for 4 tokens, with an indexer, or for 128. What is
    /// not yet a whole row is in the compressors' states: K and its score, for the tokens of two rows of 4, or of one of 128.
    fn compressed(&self) -> Option<KvShape> {
        let gguf = self.gguf;
        let (dim, indexer) = (gguf.head_dim_k()?, gguf.number("attention.indexer.key_length").unwrap_or(0));
        let row = |k, n_tokens, window| CacheRow { k, v: 0, n_tokens, window };
        let mut rows = Vec::new();
        let mut values = 0u64;
        for layer in 0..self.n_all {
            rows.push(row(product(&[gguf.n_head_kv(layer)?, dim]), 1, gguf.sliding_window()));
            let k = product(&[gguf.n_head_kv(layer)?, dim]);
            match gguf.per_layer("attention.compress_ratios", layer) {
                Some(4) => {
                    rows.extend([row(k, 4, None), row(indexer, 4, None)]);
                    values = values.saturating_add(product(&[2, 2 * 4, 2, dim.saturating_add(indexer)]));
                }
                Some(128) => {
                    rows.push(row(k, 128, None));
                    values = values.saturating_add(product(&[2, 128, dim]));
                }
                _ => {}
            }
        }
        Some(KvShape { rows, state_bytes: product(&[values, STATE_VALUE_BYTES]), separate: true })
    }
}

/// Every so many layers, one has attention; the others are recurrent.
fn attention_interval(gguf: &Gguf) -> Option<u64> {
    let default = match gguf.architecture() {
        Some("qwen3next" | "qwen35" | "qwen35moe" | "qwen4exp") => Some(4),
        Some("minimax-01") => Some(8),
        _ => None,
    };
    gguf.number("full_attention_interval").or(default).filter(|n| *n > 0)
}

/// Values of the state that a recurrent layer keeps of a sequence: of its last inputs, and of what it has seen before.
fn state_values(gguf: &Gguf) -> u64 {
    let number = |key: &str| gguf.number(key).unwrap_or(0);
    let n_embd = number("embedding_length");
    let n_head = gguf.per_layer("attention.head_count", 0).unwrap_or(0);
    let n_kept_inputs = number("ssm.conv_kernel").saturating_sub(1);
    let (shortconv, kda, wkv) = (number("shortconv.l_cache"), number("kda.head_dim"), number("wkv.head_size"));
    let (inner, state) = (number("ssm.inner_size"), number("ssm.state_size"));
    if wkv > 0 {
        product(&[n_embd, gguf.number("token_shift_count").unwrap_or(2).saturating_add(wkv)])
    } else if shortconv > 0 {
        product(&[n_embd, shortconv - 1])
    } else if kda > 0 {
        // Inputs of Q, K and V.
        let n_kept_inputs = if number("ssm.conv_kernel") > 0 { n_kept_inputs } else { 3 };
        product(&[n_head, kda, n_kept_inputs.saturating_mul(3).saturating_add(kda)])
    } else if gguf.architecture() == Some("minimax-01") {
        let dim = gguf.head_dim_k().unwrap_or(0);
        product(&[n_head, dim, dim])
    } else {
        let n_inputs = inner.saturating_add(product(&[2, number("ssm.group_count"), state]));
        product(&[n_kept_inputs, n_inputs]).saturating_add(product(&[state, inner]))
    }
}

fn product(factors: &[u64]) -> u64 {
    factors.iter().fold(1, |product, factor| product.saturating_mul(*factor))
}

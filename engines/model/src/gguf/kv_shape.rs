//! What a model keeps of the sequences that it computes, as far as the header describes it: rows of attention for their
//! tokens, and states of a fixed size. `kept_layers` reads which layers keep what.

use super::tensor_types::block;
use super::{Gguf, Value};
use crate::options::{CacheType, CacheTypes};

/// llama.cpp pads its cache to this many cells.
pub const CELL_ALIGNMENT: u32 = 256;

/// What a model keeps of sequences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvShape {
    /// Rows of the layers with attention, and of their indexers.
    pub rows: Vec<CacheRow>,
    /// Bytes of the states that recurrent layers keep of each sequence, whatever its length; 0 without such layers.
    pub state_bytes: u64,
    /// True if each sequence has a cache of its own, as with DeepSeek V4. Otherwise all share one.
    pub separate: bool,
}

/// A row of one layer, or of its indexer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheRow {
    /// Values of K.
    pub k: u64,
    /// Values of V; 0 where it is derived from K, as with multi-head latent attention.
    pub v: u64,
    /// Tokens that one row stands for, 1 to 128: 1 without compression.
    pub n_tokens: u64,
    /// Positions that the layer looks back. `None`: all.
    pub window: Option<u64>,
}

/// The sequences that share an engine's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sequences {
    /// The slots' sequences and the scratch sequences. Each has states, and cells in windowed layers.
    pub n: u32,
    /// Tokens of a physical batch, for which a windowed layer has cells beside its windows. `None`: the engine keeps the rows of
    /// all tokens in all layers.
    pub n_ubatch: Option<u32>,
    /// Tokens that can be taken back of each sequence's states. The states before each of these tokens are kept, too.
    pub n_rollback: u32,
}

impl CacheRow {
    /// Bytes of the row, rounded up.
    pub fn n_bytes(self, types: CacheTypes) -> u64 {
        let bytes = |n_values: u64, cache_type: CacheType| {
            block(cache_type.ggml_type())
                .map_or(u64::MAX, |block| n_values.saturating_mul(block.n_bytes).div_ceil(block.n_elements))
        };
        bytes(self.k, types.k).saturating_add(bytes(self.v, types.v))
    }

    /// Cells of the layer, if the cache has `n_cells`: see `llama_kv_cache_iswa` and `llama_kv_cache_dsv4`.
    fn n_cells(self, n_cells: u32, separate: bool, sequences: Sequences) -> u64 {
        let (n_cells, n, alignment) = (u64::from(n_cells), u64::from(sequences.n), u64::from(CELL_ALIGNMENT));
        let n_caches = if separate { n } else { 1 };
        let of_cache = match (self.window, sequences.n_ubatch) {
            (Some(window), Some(n_ubatch)) => {
                let of_windows = window.saturating_mul(if separate { 1 } else { n });
                n_cells.min(of_windows.saturating_add(n_ubatch.into())).next_multiple_of(alignment)
            }
            _ if self.n_tokens > 1 => n_cells.div_ceil(self.n_tokens).next_multiple_of(alignment),
            _ => n_cells,
        };
        of_cache.saturating_mul(n_caches)
    }
}

impl KvShape {
    /// Bytes that one token adds to the cache of a sequence, in these types, rounded up.
    ///
    /// For a model with a sliding window this is an upper bound: its windowed layers stop growing at
    /// [`Gguf::sliding_window`] tokens.
    pub fn bytes_per_token(&self, types: CacheTypes) -> u64 {
        const MOST_TOKENS: u64 = 128;
        let of_most =
            |row: &CacheRow| row.n_bytes(types).saturating_mul(MOST_TOKENS / row.n_tokens.clamp(1, MOST_TOKENS));
        self.rows.iter().map(of_most).fold(0, u64::saturating_add).div_ceil(MOST_TOKENS)
    }

    /// Bytes of a cache with `n_cells`, and of the states of all sequences, which alone are left with 0 cells.
    pub fn n_bytes(&self, types: CacheTypes, n_cells: u32, sequences: Sequences) -> u64 {
        let of_layer =
            |row: &CacheRow| row.n_cells(n_cells, self.separate, sequences).saturating_mul(row.n_bytes(types));
        let n_states = u64::from(sequences.n).saturating_mul(u64::from(sequences.n_rollback) + 1);
        let of_states = self.state_bytes.saturating_mul(n_states);
        self.rows.iter().map(of_layer).fold(of_states, u64::saturating_add)
    }
}

impl Gguf {
    /// Transformer blocks.
    pub fn n_layer(&self) -> Option<u64> {
        self.u64(&self.arch_key("block_count")?)
    }

    /// KV heads of one layer: from an array with an entry for each layer, or from one number for all layers. A file
    /// with neither has no grouped-query attention: each attention head has its own KV head.
    pub fn n_head_kv(&self, layer: u64) -> Option<u64> {
        self.per_layer("attention.head_count_kv", layer).or_else(|| self.per_layer("attention.head_count", layer))
    }

    /// Elements of one head's K row.
    pub fn head_dim_k(&self) -> Option<u64> {
        self.head_dim("attention.key_length")
    }

    /// Elements of one head's V row.
    pub fn head_dim_v(&self) -> Option<u64> {
        self.head_dim("attention.value_length")
    }

    /// The length of the sliding window in tokens, if some layers have one.
    pub fn sliding_window(&self) -> Option<u64> {
        self.number("attention.sliding_window").filter(|window| *window > 0)
    }

    /// Bytes of KV for each token: see [`KvShape::bytes_per_token`].
    pub fn kv_bytes_per_token(&self, types: CacheTypes) -> Option<u64> {
        Some(self.kv_shape()?.bytes_per_token(types))
    }

    /// Bytes of the KV of some tokens, with the states of their end: an upper bound where layers have windows.
    pub fn kv_bytes(&self, types: CacheTypes, n_tokens: usize) -> Option<u64> {
        let shape = self.kv_shape()?;
        Some(shape.bytes_per_token(types).saturating_mul(n_tokens as u64).saturating_add(shape.state_bytes))
    }

    /// Returns true if some layers keep a state of each sequence instead of rows.
    pub fn has_states(&self) -> bool {
        self.kv_shape().is_some_and(|shape| shape.state_bytes > 0)
    }

    /// Returns true if K and V are derived from one latent row, which is stored as K.
    pub(super) fn has_latent_rows(&self) -> bool {
        self.number("attention.key_length_mla").is_some_and(|n| n > 0)
    }

    /// Checks that the model's KV can be stored in these types. Errors: why not, with the option.
    pub(super) fn check_cache_types(&self, types: CacheTypes) -> Result<(), String> {
        let Some(shape) = self.kv_shape().filter(|_| self.generates()) else { return Ok(()) };
        if shape.rows.is_empty() {
            return Ok(());
        }
        let CacheTypes { k, v } = types;
        if shape.rows.iter().all(|row| row.v == 0) && k != v {
            return Err("--cache-type-k and --cache-type-v must be equal for a model with latent attention".to_owned());
        }
        for (option, cache_type, head_dim) in
            [("--cache-type-k", k, self.head_dim_k()), ("--cache-type-v", v, self.head_dim_v())]
        {
            let n_elements = block(cache_type.ggml_type()).map_or(1, |block| block.n_elements);
            if let Some(head_dim) = head_dim.filter(|dim| !dim.is_multiple_of(n_elements)) {
                let name = cache_type.as_str();
                return Err(format!(
                    "{option} {name} needs heads of a multiple of {n_elements} values, and this model's have {head_dim}"
                ));
            }
        }
        Ok(())
    }

    fn head_dim(&self, key: &str) -> Option<u64> {
        self.number(key).or_else(|| {
            let n_embedding = self.number("embedding_length")?;
            n_embedding.checked_div(self.per_layer("attention.head_count", 0)?)
        })
    }

    /// A number of the architecture's own.
    pub(super) fn number(&self, key: &str) -> Option<u64> {
        self.u64(&self.arch_key(key)?)
    }

    pub(super) fn per_layer(&self, key: &str, layer: u64) -> Option<u64> {
        match self.get(&self.arch_key(key)?)? {
            Value::Array(array) => match array.elements.as_ref()?.get(usize::try_from(layer).ok()?)? {
                Value::Bool(flag) => Some(u64::from(*flag)),
                value => value.as_u64(),
            },
            value => value.as_u64(),
        }
    }
}

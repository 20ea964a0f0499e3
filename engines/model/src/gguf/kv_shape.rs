//! The shape of a model's KV cache, as far as the header describes it.

use super::tensor_types::block;
use super::{Gguf, Value};
use crate::options::{CacheType, CacheTypes};

/// Layers, heads and head sizes of a model's KV cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvShape {
    /// KV heads of each layer; 0 for a layer without attention.
    pub n_head_kv: Vec<u64>,
    /// Elements of one head's K row.
    pub head_dim_k: u64,
    /// Elements of one head's V row; 0 with multi-head latent attention, which derives V from K.
    pub head_dim_v: u64,
}

impl KvShape {
    /// Bytes that one token adds to a cache of these types, over all layers, rounded up.
    pub fn bytes_per_token(&self, types: CacheTypes) -> u64 {
        let n_heads = self.n_head_kv.iter().fold(0u64, |sum, n| sum.saturating_add(*n));
        let bytes = |head_dim: u64, cache_type: CacheType| {
            let n_values = n_heads.saturating_mul(head_dim);
            block(cache_type.ggml_type())
                .map_or(u64::MAX, |block| n_values.saturating_mul(block.n_bytes).div_ceil(block.n_elements))
        };
        bytes(self.head_dim_k, types.k).saturating_add(bytes(self.head_dim_v, types.v))
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
        self.u64(&self.arch_key("attention.sliding_window")?).filter(|window| *window > 0)
    }

    /// The KV cache's shape. `None` if the header does not describe it, as for embedding and recurrent models.
    pub fn kv_shape(&self) -> Option<KvShape> {
        // The header is not trusted: a block count of 2^60 would allocate 2^63 bytes of head counts.
        let n_layer = self.n_layer().filter(|n| *n <= MAX_LAYERS)?;
        let is_mla = self.get(&self.arch_key("attention.key_length_mla")?).is_some();
        Some(KvShape {
            n_head_kv: (0..n_layer).map(|layer| self.n_head_kv(layer)).collect::<Option<_>>()?,
            head_dim_k: self.head_dim_k()?,
            head_dim_v: if is_mla { 0 } else { self.head_dim_v()? },
        })
    }

    /// Bytes of KV for each token in a cache of these types.
    ///
    /// For a model with a sliding window this is an upper bound: its windowed layers stop growing at
    /// [`Gguf::sliding_window`] tokens.
    pub fn kv_bytes_per_token(&self, types: CacheTypes) -> Option<u64> {
        Some(self.kv_shape()?.bytes_per_token(types))
    }

    /// Checks that the model's KV can be stored in these types. Errors: why not, with the option.
    pub(super) fn check_cache_types(&self, types: CacheTypes) -> Result<(), String> {
        let Some(shape) = self.kv_shape().filter(|_| self.generates()) else { return Ok(()) };
        let CacheTypes { k, v } = types;
        if shape.head_dim_v == 0 && k != v {
            return Err("--cache-type-k and --cache-type-v must be equal for a model with latent attention".to_owned());
        }
        for (option, cache_type, head_dim) in
            [("--cache-type-k", k, shape.head_dim_k), ("--cache-type-v", v, shape.head_dim_v)]
        {
            let n_elements = block(cache_type.ggml_type()).map_or(1, |block| block.n_elements);
            if !head_dim.is_multiple_of(n_elements) {
                let name = cache_type.as_str();
                return Err(format!(
                    "{option} {name} needs heads of a multiple of {n_elements} values, and this model's have {head_dim}"
                ));
            }
        }
        Ok(())
    }

    fn head_dim(&self, key: &str) -> Option<u64> {
        self.u64(&self.arch_key(key)?).or_else(|| {
            let n_embedding = self.u64(&self.arch_key("embedding_length")?)?;
            n_embedding.checked_div(self.per_layer("attention.head_count", 0)?)
        })
    }

    fn per_layer(&self, key: &str, layer: u64) -> Option<u64> {
        match self.get(&self.arch_key(key)?)? {
            Value::Array(array) => array.elements.as_ref()?.get(usize::try_from(layer).ok()?)?.as_u64(),
            value => value.as_u64(),
        }
    }
}

/// llama.cpp's own limit is 512.
const MAX_LAYERS: u64 = 4096;

//! The heads of models that predict further tokens themselves ("MTP", "nextn").

use super::Gguf;
use crate::options::CacheTypes;

impl Gguf {
    /// Returns true if the model has one such head, of a kind that llama.cpp computes beside it, and the file has its weights.
    pub fn has_prediction_head(&self) -> bool {
        self.head_layer().is_some()
    }

    /// Bytes of the head's KV for each cell of its cache. `None`: there is no head.
    pub(super) fn head_bytes_per_cell(&self, types: CacheTypes) -> Option<u64> {
        let layer = self.head_layer()?;
        let heads = self.n_head_kv(layer)?;
        let [k, v] = [self.head_dim_k()?, self.head_dim_v()?].map(|dim| heads.saturating_mul(dim));
        Some(super::CacheRow { k, v, n_tokens: 1, window: None }.n_bytes(types))
    }

    /// The block of the only head.
    fn head_layer(&self) -> Option<u64> {
        let is_known = matches!(self.architecture(), Some("qwen35" | "qwen35moe"));
        let layer = self.n_layer()?.checked_sub(1)?;
        let weights = format!("blk.{layer}.nextn.eh_proj.weight");
        let has_weights = || self.tensors.iter().any(|tensor| tensor.name == weights);
        (is_known && self.number("nextn_predict_layers") == Some(1) && has_weights()).then_some(layer)
    }
}

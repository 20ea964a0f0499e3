//! The description of a model that is not loaded, from its file's header.

use std::path::Path;

use baton_schemas::node::{Memory, ModelFacts, NodeInfo, Role};

use super::{Gguf, ModelSizes, Value};

impl Gguf {
    /// Bytes of the weights of each of the first `n_layers` blocks.
    pub fn layer_bytes(&self, n_layers: u32) -> Vec<u64> {
        let mut bytes = vec![0u64; n_layers as usize];
        for tensor in &self.tensors {
            let block = tensor.name.strip_prefix("blk.").and_then(|name| name.split('.').next()?.parse::<usize>().ok());
            if let Some(sum) = block.and_then(|block| bytes.get_mut(block)) {
                *sum = sum.saturating_add(tensor.size_bytes.unwrap_or(0));
            }
        }
        bytes
    }

    /// What a node would report about this model. Fields that only a running engine knows stay empty: control tokens,
    /// devices, embeddings and the KV's identity. `chat_template` is the operator's own template, if there is one.
    pub fn outline(&self, path: &Path, sizes: ModelSizes, n_slots: u32, chat_template: Option<&str>) -> NodeInfo {
        let template = chat_template.or_else(|| self.chat_template()).unwrap_or_default();
        let n_params = self.tensors.iter().map(|tensor| tensor.dims.iter().fold(1u64, |n, dim| n.saturating_mul(*dim)));
        let n_vocab = match self.get("tokenizer.ggml.tokens") {
            Some(Value::Array(tokens)) => u32::try_from(tokens.len).unwrap_or(u32::MAX),
            _ => 0,
        };
        let stem = || path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        NodeInfo {
            model: self.name().map_or_else(stem, str::to_owned),
            engine: "llama".into(),
            architecture: self.architecture().unwrap_or("unknown").to_owned(),
            n_ctx: sizes.n_ctx,
            n_ctx_train: self.context_length().and_then(|n| u32::try_from(n).ok()).unwrap_or(0),
            n_vocab,
            n_slots,
            memory: Memory { model: self.files.n_bytes(), kv: sizes.cache_bytes },
            has_chat_template: !template.is_empty(),
            generates: self.generates(),
            embedding: None,
            reranking: None,
            projector: None,
            devices: Vec::new(),
            workers: Vec::new(),
            role: Role::Both,
            fingerprint: None,
            kv: None,
            cache_types: None,
            no_handoff: None,
            takes_other_weights: false,
            reports_begin: false,
            hands_over_images: false,
            facts: ModelFacts {
                n_params: n_params.fold(0u64, u64::saturating_add),
                file_bytes: self.files.n_bytes(),
                quantization: self.quantization().unwrap_or_default().to_owned(),
                chat_template: template.to_owned(),
                ..ModelFacts::default()
            },
            process: 0,
            version: String::new(),
        }
    }
}

//! A LoRA adapter: loaded with the model, applied to each of its contexts.

use std::sync::Mutex;

use baton_model::gguf::Gguf;
use baton_model::options::LoraFile;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::model::{LlamaLoraAdapter, LlamaModel};

use crate::engine_options::EngineOptions;
use crate::serving::LoadError;

/// A loaded adapter. The model owns its memory, and frees it.
#[derive(Debug)]
pub(crate) struct Adapter {
    /// llama-cpp-2 wants it mutable; applying it changes only the context.
    loaded: Mutex<LlamaLoraAdapter>,
    file: LoraFile,
    content: blake3::Hash,
}

impl Adapter {
    /// Loads the configured adapter, if there is one. Errors: it does not fit the model.
    pub(super) fn load(
        options: &EngineOptions,
        gguf: &Gguf,
        model: &mut LlamaModel,
    ) -> Result<Option<Adapter>, LoadError> {
        let Some(file) = options.lora.clone() else { return Ok(None) };
        let unfit = |why: String| LoadError::Adapter { path: file.path.clone(), why };
        let header = Gguf::open_adapter(&file.path)?;
        gguf.check_adapter(&header).map_err(unfit)?;
        let content = Gguf::adapter_hash(&file.path)?;
        let loaded = model.lora_adapter_init(&file.path);
        let loaded = loaded.map_err(|_| unfit("llama.cpp refuses it; RUST_LOG=info shows why".to_owned()))?;
        Ok(Some(Adapter { loaded: Mutex::new(loaded), file, content }))
    }

    /// Applies the adapter to a new context of its model.
    pub(super) fn apply(&self, context: &mut LlamaContext<'_>) -> Result<(), LoadError> {
        let mut loaded = self.loaded.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let applied = context.lora_adapter_set(&mut loaded, self.file.scale);
        applied.map_err(|error| LoadError::Adapter { path: self.file.path.clone(), why: error.to_string() })
    }

    /// A text for the fingerprint. It distinguishes the KV from that of the same weights without the adapter.
    pub(super) fn changes(&self) -> String {
        format!("lora={}, scale={}", self.content, self.file.scale)
    }
}

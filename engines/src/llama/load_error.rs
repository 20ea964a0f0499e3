//! The errors of loading a model, each with a clear one-line message.

use std::path::PathBuf;

use baton_model::gguf::GgufError;

/// Why a model cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file is missing, not a GGUF, cut short or malformed.
    #[error(transparent)]
    File(#[from] GgufError),
    /// The weights and the KV cache do not fit into memory.
    #[error(
        "too little memory: {path} with {n_cells} tokens of KV cache needs about {needed_mib} MiB, and {available_mib} MiB \
         are available. Use a smaller model, or a smaller --ctx-size or --kv-cells."
    )]
    TooLittleMemory {
        /// The model file.
        path: PathBuf,
        /// Cells of the KV cache.
        n_cells: u32,
        /// Memory for weights, KV and buffers, MiB.
        needed_mib: u64,
        /// Memory that is available, MiB.
        available_mib: u64,
    },
    /// llama.cpp refused a file whose header is valid, e.g. because it does not know the architecture.
    #[error(
        "llama.cpp cannot load {path} (architecture {architecture:?}). Run with RUST_LOG=info to see llama.cpp's own messages."
    )]
    Refused {
        /// The model file.
        path: PathBuf,
        /// From the file's metadata.
        architecture: String,
    },
    /// llama.cpp could not create a context, usually for lack of memory.
    #[error(
        "llama.cpp cannot set up a context of {n_cells} tokens for {path}, usually for lack of memory. Try a smaller --ctx-size."
    )]
    Context {
        /// The model file.
        path: PathBuf,
        /// Cells of the KV cache.
        n_cells: u32,
    },
    /// The chat template does not parse. Without it, prompts would have a format that the model does not know.
    #[error("the chat template of {path} cannot be used: {message}. Override it with --chat-template-file.")]
    Template {
        /// The model file.
        path: PathBuf,
        /// The template engine's message.
        message: String,
    },
    /// The projector cannot be used with this model.
    #[error("{} cannot be used as the model's projector: {why}. --mmproj names it.", path.display())]
    Projector {
        /// The projector's file.
        path: PathBuf,
        why: String,
    },
    /// The adapter does not fit the model.
    #[error("{} cannot be used as a LoRA adapter for this model: {why}. --lora or --lora-scaled names it.", path.display())]
    Adapter {
        /// The adapter's file.
        path: PathBuf,
        why: String,
    },
    /// llama.cpp's backend cannot be initialised.
    #[error("llama.cpp did not start: {0}")]
    Backend(String),
    /// An option is out of range.
    #[error("{0}")]
    Config(String),
}

impl LoadError {
    /// The message for clients, without paths.
    pub fn summary(&self) -> &'static str {
        match self {
            LoadError::File(GgufError::NotFound { .. }) => "the model file is missing",
            LoadError::File(GgufError::Truncated { .. }) => "the model file is cut short",
            LoadError::File(GgufError::Parts(_)) => "the model's files are not complete",
            LoadError::File(GgufError::NotAdapter { .. }) | LoadError::Adapter { .. } => {
                "the model's LoRA adapter cannot be used"
            }
            LoadError::File(GgufError::NotProjector { .. }) => "the model's projector cannot be used",
            LoadError::File(_) => "the model file cannot be read",
            LoadError::TooLittleMemory { .. } | LoadError::Context { .. } => "there is too little memory for the model",
            LoadError::Refused { .. } => "the model is of a kind that cannot be loaded",
            LoadError::Template { .. } => "the model's chat template cannot be used",
            LoadError::Projector { .. } => "the model's projector cannot be used",
            LoadError::Backend(_) | LoadError::Config(_) => "the engine is not set up correctly",
        }
    }
}

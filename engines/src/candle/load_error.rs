//! The errors of loading a model, each with a clear one-line message.

use std::path::PathBuf;

use baton_model::gguf::{GgufError, SizeError};
use baton_model::vocabulary::VocabularyError;

/// Why a model cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file is missing, not a GGUF, cut short or malformed.
    #[error(transparent)]
    File(#[from] GgufError),
    /// The weights and the KV cache do not fit into memory.
    #[error(
        "too little memory for {}: {source}. Use a smaller model, or a smaller --ctx-size or --kv-cells.", path.display()
    )]
    TooLittleMemory {
        /// The model file.
        path: PathBuf,
        source: SizeError,
    },
    /// The model is of a kind that this engine does not compute.
    #[error("the candle engine cannot run {}: {why}. --engine llama may.", path.display())]
    Unsupported {
        /// The model file.
        path: PathBuf,
        why: String,
    },
    /// The chat template does not parse. Without it, prompts would have a format that the model does not know.
    #[error("the chat template of {} cannot be used: {message}. Override it with --chat-template-file.", path.display())]
    Template {
        /// The model file.
        path: PathBuf,
        /// The template engine's message.
        message: String,
    },
    /// Loading or the first computation failed.
    #[error("candle cannot load {}: {source}", path.display())]
    Compute {
        /// The model file.
        path: PathBuf,
        source: candle_core::Error,
    },
    /// An option is out of range, or this engine does not have it.
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
            LoadError::File(_) => "the model file cannot be read",
            LoadError::TooLittleMemory { .. } => "there is too little memory for the model",
            LoadError::Unsupported { .. } | LoadError::Compute { .. } => "the model is of a kind that cannot be loaded",
            LoadError::Template { .. } => "the model's chat template cannot be used",
            LoadError::Config(_) => "the engine is not set up correctly",
        }
    }
}

/// Why a file's model is not computed. The caller adds the path.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refusal {
    #[error("{0}")]
    Unsupported(String),
    #[error(transparent)]
    Vocabulary(#[from] VocabularyError),
    #[error(transparent)]
    Compute(#[from] candle_core::Error),
}

impl Refusal {
    pub(super) fn at(self, path: impl Into<PathBuf>) -> LoadError {
        let path = path.into();
        match self {
            Refusal::Unsupported(why) => LoadError::Unsupported { path, why },
            Refusal::Vocabulary(VocabularyError::File(error)) => LoadError::File(error),
            Refusal::Vocabulary(error) => LoadError::Unsupported { path, why: error.to_string() },
            Refusal::Compute(source) => LoadError::Compute { path, source },
        }
    }
}

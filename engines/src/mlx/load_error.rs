//! The errors of loading a model, each with a clear one-line message.

use std::path::PathBuf;

use baton_model::gguf::SizeError;
use baton_model::hf::FolderError;

/// Why a model cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The folder is missing, incomplete, damaged, or holds a model of a kind that is not supported.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The weights and the KV cache do not fit into memory.
    #[error(
        "too little memory for {}: {source}. Use a smaller model, or a smaller --ctx-size or --kv-cells.", path.display()
    )]
    TooLittleMemory {
        /// The model's folder.
        path: PathBuf,
        source: SizeError,
    },
    /// The model is of a kind that this engine does not compute.
    #[error("the mlx engine cannot run {}: {why}. --engine llama may run a GGUF file of it.", path.display())]
    Unsupported {
        /// The model's folder.
        path: PathBuf,
        why: String,
    },
    /// The chat template does not parse. Without it, prompts would have a format that the model does not know.
    #[error("the chat template of {} cannot be used: {message}. Override it with --chat-template-file.", path.display())]
    Template {
        /// The model's folder.
        path: PathBuf,
        /// The template engine's message.
        message: String,
    },
    /// There is no Python with mlx-lm.
    #[error("there is no Python at {}: run `baton mlx install`, or name one that has mlx-lm with --mlx-python", python.display())]
    NotInstalled {
        /// Where it should be.
        python: PathBuf,
    },
    /// mlx-lm cannot load or compute the model.
    #[error("mlx-lm cannot load {}: {why}", path.display())]
    Worker {
        /// The model's folder.
        path: PathBuf,
        why: String,
    },
    /// An option is out of range, or this engine does not have it.
    #[error("{0}")]
    Config(String),
}

impl LoadError {
    /// The message for clients, without paths.
    pub fn summary(&self) -> &'static str {
        match self {
            LoadError::Folder(FolderError::NoFolder { .. } | FolderError::Missing { .. }) => {
                "the model file is missing"
            }
            LoadError::Folder(FolderError::Unsupported { .. })
            | LoadError::Unsupported { .. }
            | LoadError::Worker { .. } => "the model is of a kind that cannot be loaded",
            LoadError::Folder(_) => "the model file cannot be read",
            LoadError::TooLittleMemory { .. } => "there is too little memory for the model",
            LoadError::Template { .. } => "the model's chat template cannot be used",
            LoadError::NotInstalled { .. } | LoadError::Config(_) => "the engine is not set up correctly",
        }
    }
}

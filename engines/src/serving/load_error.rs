//! Why a model cannot be served, each with a clear one-line message.

use std::path::{Path, PathBuf};

use baton_model::gguf::{GgufError, SizeError, UnfitDraft};
use baton_model::hf::FolderError;
use baton_model::vocabulary::VocabularyError;

/// Why a model cannot be served. For the operator: the message may name files.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// No model was named.
    #[error("--model PATH or --model NAME is needed")]
    NoModel,
    /// The file is missing, not a GGUF, cut short or malformed.
    #[error(transparent)]
    File(#[from] GgufError),
    /// The folder is missing, incomplete, damaged, or holds a model of a kind that is not supported.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// The weights and the KV cache do not fit into memory.
    #[error("too little memory: {0}. Use a smaller model, or a smaller --ctx-size or --kv-cells.")]
    TooLittleMemory(SizeError),
    /// The model is of a kind that this engine does not compute.
    #[error("this engine cannot run the model: {0}. --engine llama may run a GGUF file of it.")]
    Unsupported(String),
    /// The engine failed to load the model, or to compute its first tokens.
    #[error("{library} cannot load the model: {why}")]
    Refused {
        /// What computes the model, for people.
        library: &'static str,
        why: String,
    },
    /// There is no context for the model, usually for lack of memory.
    #[error("no context of {n_cells} tokens can be set up, usually for lack of memory. Try a smaller --ctx-size.")]
    Context {
        /// Cells of the KV cache.
        n_cells: u32,
    },
    /// The chat template does not parse. Without it, prompts would have a format that the model does not know.
    #[error("the chat template cannot be used: {0}. Override it with --chat-template-file.")]
    Template(String),
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
    /// The draft model does not fit the model.
    #[error("{} cannot be used as a draft model for this model: {why}. --draft names it.", path.display())]
    Draft {
        /// The draft model's file.
        path: PathBuf,
        why: UnfitDraft,
    },
    /// llama.cpp's backend cannot be initialised.
    #[error("llama.cpp did not start: {0}")]
    Backend(String),
    /// An option cannot be met on this machine.
    #[error("{0}")]
    Config(String),
    /// One of these about the model at a path.
    #[error("{}: {why}", path.display())]
    Of {
        /// The model's file or folder.
        path: PathBuf,
        why: Box<LoadError>,
    },
}

impl LoadError {
    /// The same with the model's path, unless the message names a file already or is not about the model.
    pub(super) fn of(self, path: &Path) -> LoadError {
        match self {
            LoadError::TooLittleMemory(_)
            | LoadError::Unsupported(_)
            | LoadError::Refused { .. }
            | LoadError::Context { .. }
            | LoadError::Template(_) => LoadError::Of { path: path.to_owned(), why: Box::new(self) },
            other => other,
        }
    }

    /// The message for clients, without paths.
    pub fn summary(&self) -> &'static str {
        match self {
            LoadError::Of { why, .. } => why.summary(),
            LoadError::File(GgufError::NotFound { .. })
            | LoadError::Folder(FolderError::NoFolder { .. } | FolderError::Missing { .. }) => {
                "the model file is missing"
            }
            LoadError::File(GgufError::Truncated { .. }) => "the model file is cut short",
            LoadError::File(GgufError::Parts(_)) => "the model's files are not complete",
            LoadError::File(GgufError::NotAdapter { .. }) | LoadError::Adapter { .. } => {
                "the model's LoRA adapter cannot be used"
            }
            LoadError::File(GgufError::NotProjector { .. }) | LoadError::Projector { .. } => {
                "the model's projector cannot be used"
            }
            LoadError::Draft { .. } => "the model's draft model cannot be used",
            LoadError::Folder(FolderError::Unsupported { .. })
            | LoadError::Unsupported(_)
            | LoadError::Refused { .. } => "the model is of a kind that cannot be loaded",
            LoadError::File(_) | LoadError::Folder(_) => "the model file cannot be read",
            LoadError::TooLittleMemory(_) | LoadError::Context { .. } => "there is too little memory for the model",
            LoadError::Template(_) => "the model's chat template cannot be used",
            LoadError::NoModel | LoadError::Backend(_) | LoadError::Config(_) => "the engine is not set up correctly",
        }
    }
}

impl From<SizeError> for LoadError {
    fn from(error: SizeError) -> Self {
        match error {
            SizeError::OutOfRange(message) => LoadError::Config(message),
            SizeError::TooLarge { .. } => LoadError::TooLittleMemory(error),
        }
    }
}

impl From<VocabularyError> for LoadError {
    fn from(error: VocabularyError) -> Self {
        match error {
            VocabularyError::File(error) => LoadError::File(error),
            error => LoadError::Unsupported(error.to_string()),
        }
    }
}

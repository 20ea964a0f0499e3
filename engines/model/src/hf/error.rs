//! Why a folder is not a model that can be described.

use std::io;
use std::path::{Path, PathBuf};

use baton_schemas::printable::one_line;

/// Why a model's folder cannot be used. Each message is one line for the operator.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// There is no folder of this name.
    #[error("{} is no folder: a model for mlx is one with config.json, safetensors and tokenizer.json", path.display())]
    NoFolder {
        /// The path as the user gave it.
        path: PathBuf,
    },
    /// A file of the folder is missing.
    #[error("the model folder lacks {}", path.display())]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// A file of the folder cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A file is longer than any real one.
    #[error("{} is longer than {max_bytes} bytes", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// The limit.
        max_bytes: u64,
    },
    /// A file is not the JSON that it should be.
    #[error("{} cannot be understood: {}", path.display(), one_line(source))]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's reason.
        source: serde_json::Error,
    },
    /// A file contradicts itself or its format.
    #[error("{} is damaged: {}", path.display(), one_line(what))]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The model is of a kind that is not supported.
    #[error("{} describes a model that is not supported: {}", path.display(), one_line(why))]
    Unsupported {
        /// The file that says so.
        path: PathBuf,
        /// What is not supported.
        why: String,
    },
}

impl FolderError {
    pub(super) fn unreadable(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        match source.kind() {
            io::ErrorKind::NotFound => FolderError::Missing { path },
            _ => FolderError::Unreadable { path, source },
        }
    }

    pub(super) fn malformed(path: &Path, what: impl Into<String>) -> Self {
        FolderError::Malformed { path: path.to_owned(), what: what.into() }
    }

    pub(super) fn unsupported(path: &Path, why: impl Into<String>) -> Self {
        FolderError::Unsupported { path: path.to_owned(), why: why.into() }
    }
}

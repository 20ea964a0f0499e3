//! Why bytes are not a sequence state, or why KV cannot become one.

use baton_schemas::kv::{ChunkError, LayoutError};

/// Why bytes are not a sequence state, or why KV cannot become one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BlobError {
    /// The blob ends within a field.
    #[error("the state ends at byte {len}, within {n_bytes} bytes that begin at {at}")]
    Truncated {
        /// Offset of the field.
        at: usize,
        /// Length of the field, bytes.
        n_bytes: usize,
        /// Length of the blob, bytes.
        len: usize,
    },
    /// A header field has a value that is impossible or not supported.
    #[error("the state says {found} for {field}")]
    Field {
        /// Its name in the table above.
        field: &'static str,
        /// The value in the blob.
        found: u64,
    },
    /// The cells are not exactly the requested positions, each once.
    #[error("the cells are wrong: {0}")]
    Positions(String),
    /// The tensors or rows do not fit the layout.
    #[error("the state does not fit the layout: {0}")]
    Shape(String),
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// A chunk does not fit its layout.
    #[error(transparent)]
    Chunk(#[from] ChunkError),
    /// A row holds NaN or infinity.
    #[error("tensor {tensor} holds a value that is not finite")]
    NotFinite {
        /// Index of the tensor in the canonical order (`Chunk::tensors`).
        tensor: usize,
    },
}

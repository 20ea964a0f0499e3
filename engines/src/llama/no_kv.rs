//! Why a model's KV is not handed over, and what a node says of it.

use baton_schemas::kv::LayoutError;
use baton_schemas::no_handoff::NoHandoffReason;

use super::blob::BlobError;
use super::state::StateError;
use crate::serving::described::NoKv;

/// Why a model's KV cannot be handed over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoHandoff {
    /// llama.cpp hashes the tokens before a position, and reads them from the cache's cells.
    #[error("cells hold tokens (n-gram embeddings), which a chunk does not carry")]
    Tokens,
    /// The probe's token was not computed.
    #[error("the probe's token cannot be computed: {0}")]
    Decode(String),
    /// The state cannot be read.
    #[error(transparent)]
    State(#[from] StateError),
    /// The state has an unknown format, that no known class of cache has.
    #[error("the KV state is of an unknown kind: {0}")]
    UnknownState(BlobError),
    /// The cache is of a type that cannot be handed over.
    #[error("the KV cache is of ggml type {0}, which cannot be handed over")]
    ValueType(i32),
    /// There are two caches of rows, and the file does not say what the second one is for.
    #[error("a second cache of rows; the model's file names neither a sliding window nor an indexer, or both")]
    SecondCache,
    /// Something that needs a cache of all sequences was asked of one for each.
    #[error("each sequence has a cache of its own, with compressed rows")]
    Separate,
    /// The cache's shape exceeds the limits of a layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
}

impl From<NoHandoff> for NoKv {
    fn from(error: NoHandoff) -> NoKv {
        let reason = match error {
            NoHandoff::Tokens => NoHandoffReason::TokensInCache,
            NoHandoff::ValueType(_) => NoHandoffReason::KvValueType,
            NoHandoff::Decode(_) | NoHandoff::State(_) => NoHandoffReason::KvNotCopied,
            NoHandoff::UnknownState(_) | NoHandoff::SecondCache | NoHandoff::Separate | NoHandoff::Layout(_) => {
                NoHandoffReason::UnknownCache
            }
        };
        NoKv { reason, detail: error.to_string() }
    }
}

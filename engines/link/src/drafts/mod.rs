//! Candidates for a sequence's next tokens from a draft node (`baton node --role draft`).
//!
//! A decode node tells the draft node each token that the sequence has got, and takes what candidates are there when it makes a step.
//! [`DraftBoard`] has them: the connection's task writes, the thread of the engine reads, and neither waits for the other. A
//! candidate may be wrong in every way. What no draft node sends ends the drafts, and nothing else.

mod board;

use std::sync::Arc;

use baton_schemas::EngineError;
use baton_schemas::draft::{DraftRequest, DrafterLoss};
use baton_schemas::handoff::KvSource;
use tokio_util::task::AbortOnDropHandle;

pub use self::board::{DraftBoard, DraftPace, InvalidDraft};

/// An order for drafts of a sequence.
pub struct DraftOrder {
    /// The draft node.
    pub source: KvSource,
    /// The sequence until now.
    pub request: DraftRequest,
    /// Candidates are below this number.
    pub n_vocab: u32,
}

/// The drafts of a sequence. Dropping it ends them.
pub struct RemoteDrafts {
    /// The tokens that are told, and the candidates that have come.
    pub board: Arc<DraftBoard>,
    _task: Option<AbortOnDropHandle<()>>,
}

impl RemoteDrafts {
    /// Drafts whose other end is `board` alone, for tests.
    pub fn unconnected(board: Arc<DraftBoard>) -> RemoteDrafts {
        RemoteDrafts { board, _task: None }
    }

    /// Drafts that this task keeps going.
    pub(crate) fn kept_by(board: Arc<DraftBoard>, task: AbortOnDropHandle<()>) -> RemoteDrafts {
        RemoteDrafts { board, _task: Some(task) }
    }
}

/// The verdict on a draft node whose stream ended with an error.
pub(crate) fn loss_of(error: &EngineError) -> DrafterLoss {
    match error {
        EngineError::Lost { .. } | EngineError::NoResources { .. } => DrafterLoss::Lost,
        _ => DrafterLoss::Refused,
    }
}

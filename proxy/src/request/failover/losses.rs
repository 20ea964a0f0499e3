//! The engines that a sequence has lost, and how.

use baton_schemas::EngineError;

use super::retryable::is_engine_failure;

/// The engines that a sequence has lost.
#[derive(Default)]
pub(super) struct Losses {
    /// Since the last token.
    pub(super) n_in_a_row: u32,
    /// The first failure that an engine reported. After a second failure the request counts as the cause, and its client
    /// gets this first one.
    pub(super) engine_failure: Option<EngineError>,
}

/// The way in which an engine stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LossKind {
    /// The node is gone or silent.
    Lost,
    /// The node is alive and gives no token. It may serve other requests well.
    Stuck,
    /// The engine reports a failure.
    Failed,
}

impl LossKind {
    pub(super) fn of(error: &EngineError) -> LossKind {
        if is_engine_failure(error) { LossKind::Failed } else { LossKind::Lost }
    }
}

//! Decides which engine errors are worth another attempt.

use std::sync::Arc;

use baton_schemas::EngineError;

use crate::targets::models::{ImageNeed, ServedModel};
use crate::targets::nodes::Node;

/// Returns true if another engine, or the same one later, may accept the request.
pub(super) fn is_transient(error: &EngineError) -> bool {
    use EngineError::{NoResources, Unauthorized, Unavailable, VersionMismatch};
    let is_refusal = matches!(error, Unavailable { .. } | NoResources { .. } | Unauthorized | VersionMismatch(_));
    error.is_lost_engine() || error.is_busy() || is_refusal
}

/// Returns true if an engine reports a failure. The error does not show whether the engine or the request is the cause;
/// one attempt on another engine does.
pub(super) fn is_engine_failure(error: &EngineError) -> bool {
    matches!(error, EngineError::Internal { .. })
}

/// Returns true if a decode node that is not in `failed` is ready and meets the request's need for images.
pub(super) fn has_other_engine(model: &ServedModel, failed: &[usize], image_need: ImageNeed<'_>) -> bool {
    let is_other =
        |(i, node): (usize, &Arc<Node>)| !failed.contains(&i) && model.ready_supporting(node, image_need).is_some();
    model.decode.iter().enumerate().any(is_other)
}

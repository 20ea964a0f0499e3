//! Engines that fail at a sequence and say so, where a lost one says nothing.
//!
//! Whether the engine or the request is to blame, the failure does not tell. One more engine shows it: it goes on, or
//! fails too, and then the client is told what the first one said.

use std::sync::Arc;

use baton_schemas::EngineError;

use super::Resilient;
use crate::targets::nodes::{Node, Task};

/// Whether it is the engine's own failure, whoever is to blame for it.
pub(super) fn is_engine_failure(error: &EngineError) -> bool {
    matches!(error, EngineError::Internal { .. })
}

impl Resilient {
    /// Whether another engine is to go on where this one failed. Once: what two of them fail at is the request's doing.
    pub(super) fn may_fail_over(&self, error: &EngineError) -> bool {
        let model = &self.plan.model;
        let is_other = |(i, node): (usize, &Arc<Node>)| {
            i != self.plan.route.decode && model.ready_seeing(node, self.sight()).is_some()
        };
        let has_another = || model.decode.iter().enumerate().any(is_other);
        is_engine_failure(error) && self.engine_failure.is_none() && has_another()
    }

    /// What a client is told of an engine's failure: that of the first one.
    pub(super) fn first_of(&self, error: EngineError) -> EngineError {
        self.engine_failure.clone().filter(|_| is_engine_failure(&error)).unwrap_or(error)
    }

    /// The decode node does not go on, because it is lost or its engine has failed.
    pub(super) fn left_by(&mut self, error: &EngineError) {
        if !is_engine_failure(error) {
            self.lost(error);
            return;
        }
        let node = self.plan.decode();
        node.failed(Task::Decode, "engine_failed");
        self.plan.model.fallbacks.count("engine_failed");
        let n_generated = self.request.generated.len();
        tracing::warn!(node = node.name, %error, n_generated, "an engine failed: the stream is taken up elsewhere");
        self.engine_failure = Some(error.clone());
    }
}

//! Watches a node that somebody else runs: asks what it is until it answers, and notices when it no longer does.

use std::sync::Arc;
use std::time::Duration;

use baton_engines::Engine;
use baton_schemas::EngineError;
use tokio::sync::watch;

use crate::pool::EngineState;

/// How often a node is asked. It is one small request.
const INTERVAL: Duration = Duration::from_secs(2);

/// The state of a node, kept up to date until the receiver is dropped.
pub fn watch(engine: Arc<dyn Engine>) -> watch::Receiver<EngineState> {
    let (state, receiver) = watch::channel(EngineState::Starting);
    tokio::spawn(async move {
        while !state.is_closed() {
            let next = match engine.info().await {
                Ok(info) => EngineState::Ready(Arc::new(info)),
                Err(error) => EngineState::Failed { reason: safe_reason(&error).into(), retry_in: INTERVAL },
            };
            if let EngineState::Failed { reason, .. } = &next {
                tracing::warn!(reason, "the node does not answer");
            }
            state.send_replace(next);
            tokio::time::sleep(INTERVAL).await;
        }
    });
    receiver
}

/// What a client may know of why a node does not answer.
fn safe_reason(error: &EngineError) -> &'static str {
    match error {
        EngineError::Unauthorized => "the node refused the cluster key",
        EngineError::Unavailable { .. } | EngineError::Lost { .. } => "the node cannot be reached",
        _ => "the node does not answer as it should",
    }
}

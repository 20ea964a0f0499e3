//! Watches a node that somebody else runs: asks what it is until it answers, and notices when it no longer does.

use std::sync::Arc;
use std::time::Duration;

use baton_engines::Engine;
use baton_schemas::EngineError;
use tokio::sync::watch;

use crate::pool::EngineState;

/// How often a node is asked. It is one small request.
const INTERVAL: Duration = Duration::from_secs(2);

/// Unanswered questions in a row until a node counts as gone: one may be lost to a busy moment.
const FORGIVEN_MISSES: u32 = 2;

/// The state of a node, kept up to date until the receiver is dropped.
pub fn watch(engine: Arc<dyn Engine>) -> watch::Receiver<EngineState> {
    let (state, receiver) = watch::channel(EngineState::Starting);
    tokio::spawn(async move {
        let mut n_missed = 0;
        while !state.is_closed() {
            match engine.info().await {
                Ok(info) => {
                    n_missed = 0;
                    state.send_if_modified(|state| {
                        let is_news = !matches!(state, EngineState::Ready(known) if **known == info);
                        if is_news {
                            *state = EngineState::Ready(Arc::new(info));
                        }
                        is_news
                    });
                }
                Err(error) => {
                    n_missed += 1;
                    if n_missed == FORGIVEN_MISSES {
                        let reason = safe_reason(&error).to_owned();
                        tracing::warn!(%error, reason, "the node does not answer");
                        state.send_replace(EngineState::Failed { reason, retry_in: INTERVAL });
                    }
                }
            }
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

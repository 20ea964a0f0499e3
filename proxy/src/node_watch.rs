//! Watches a node that somebody else runs: asks what it is until it answers, and notices when it no longer does.

use std::sync::Arc;

use baton_engines::Engine;
use baton_schemas::EngineError;
use baton_schemas::node::NodeInfo;
use tokio::sync::{oneshot, watch};

use crate::pool::EngineState;
use crate::probe;

/// Unanswered questions in a row until a node that had answered counts as gone: one may be lost to a busy moment.
const FORGIVEN_MISSES: u32 = 2;

/// A watched node.
pub struct Watched {
    /// Its state, kept up to date until the receiver is dropped.
    pub state: watch::Receiver<EngineState>,
    /// Resolves once the node has said what it is, or has refused our key, which it will do for ever. A node that
    /// cannot be reached is waited for.
    pub first_answer: oneshot::Receiver<Result<Arc<NodeInfo>, RefusedKey>>,
}

/// The node knows another cluster key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedKey;

/// Watches the node at `url`. The log is told when it is lost and when it is back, and not what lies between.
pub fn watch(engine: Arc<dyn Engine>, url: String) -> Watched {
    let (state, state_rx) = watch::channel(EngineState::Starting);
    let (first, first_answer) = oneshot::channel();
    let mut watcher = Watcher { url, state, first: Some(first), n_missed: 0, is_announced: false };
    tokio::spawn(async move {
        while !watcher.state.is_closed() {
            match probe::info(&*engine).await {
                Ok(info) => watcher.answered(info),
                Err(error) => watcher.missed(&error),
            }
            tokio::time::sleep(probe::jittered(probe::INTERVAL)).await;
        }
    });
    Watched { state: state_rx, first_answer }
}

struct Watcher {
    url: String,
    state: watch::Sender<EngineState>,
    first: Option<oneshot::Sender<Result<Arc<NodeInfo>, RefusedKey>>>,
    n_missed: u32,
    /// The log knows that the node is gone.
    is_announced: bool,
}

impl Watcher {
    fn answered(&mut self, info: NodeInfo) {
        let info = Arc::new(info);
        self.n_missed = 0;
        if std::mem::take(&mut self.is_announced) {
            tracing::warn!("the node at {} answers", self.url);
        }
        self.state.send_if_modified(|state| {
            let is_news = !matches!(state, EngineState::Ready(known) if *known == info);
            if is_news {
                *state = EngineState::Ready(Arc::clone(&info));
            }
            is_news
        });
        self.resolve_first(Ok(info));
    }

    fn missed(&mut self, error: &EngineError) {
        self.n_missed += 1;
        let was_ready = matches!(*self.state.borrow(), EngineState::Ready(_));
        if was_ready && self.n_missed < FORGIVEN_MISSES {
            return;
        }
        let reason = safe_reason(error).to_owned();
        self.state.send_replace(EngineState::Failed { reason, retry_in: probe::INTERVAL });
        if *error == EngineError::Unauthorized && self.first.is_some() {
            return self.resolve_first(Err(RefusedKey));
        }
        if !std::mem::replace(&mut self.is_announced, true) {
            tracing::warn!("the node at {} cannot be used: {}. Asking it again every 2 s", self.url, cause(error));
        }
    }

    fn resolve_first(&mut self, answer: Result<Arc<NodeInfo>, RefusedKey>) {
        // Nobody waits any more once the server was told to stop.
        let _ = self.first.take().map(|first| first.send(answer));
    }
}

/// For the operator: the cause without the words that would stand around it in a request's log line.
fn cause(error: &EngineError) -> String {
    match error {
        EngineError::Lost { detail } | EngineError::Internal { detail } => detail.clone(),
        other => other.to_string(),
    }
}

/// What a client may know of why a node does not answer.
fn safe_reason(error: &EngineError) -> &'static str {
    match error {
        EngineError::Unauthorized => "the node refused the cluster key",
        EngineError::Unavailable { .. } | EngineError::Lost { .. } => "the node cannot be reached",
        _ => "the node does not answer as it should",
    }
}

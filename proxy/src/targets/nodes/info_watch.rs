//! Keeps the description of a remote node up to date: asks for it until the node answers, and again whenever it may have
//! changed.

use std::sync::{Arc, Weak};
use std::time::Duration;

use baton_link::Engine;
use baton_schemas::EngineError;
use baton_schemas::node::{NodeInfo, Phase};
use tokio::sync::oneshot;

use super::health::Health;
use super::node_state::NodeState;
use super::probe;
use super::state_change::{StateChange, StateReason};

/// The interval for a node that is starting or down, so that it is used within 5 s once it is back.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// A watched node.
pub struct WatchedNode {
    /// Kept up to date until this is dropped.
    pub health: Arc<Health>,
    /// Resolves once the node has answered with its description or has refused the cluster key. Stays pending while the
    /// node cannot be reached.
    pub first_answer: oneshot::Receiver<Result<Arc<NodeInfo>, RefusedKey>>,
}

/// The node knows another cluster key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedKey;

/// Watches the node at `url`.
pub fn watch(engine: Arc<dyn Engine>, url: &str) -> WatchedNode {
    let health = Health::new(format!("the node at {url}"));
    let (first, first_answer) = oneshot::channel();
    tokio::spawn(keep_asking(engine, Arc::downgrade(&health), Some(first)));
    WatchedNode { health, first_answer }
}

type First = oneshot::Sender<Result<Arc<NodeInfo>, RefusedKey>>;

async fn keep_asking(engine: Arc<dyn Engine>, health: Weak<Health>, mut first: Option<First>) {
    while let Some(health) = health.upgrade() {
        // A draining node takes no new connections; the end of its load stream shows when it is gone.
        if health.state() != NodeState::Draining {
            let answer = ask(&*engine, &health, first.is_some()).await;
            // The receiver is gone once the endpoint stops.
            let _ = answer.and_then(|answer| Some(first.take()?.send(answer)));
        }
        let state = health.state();
        let pause = if state == NodeState::Starting || state.is_gone() { RETRY_INTERVAL } else { probe::INTERVAL };
        let mut changes = health.subscribe();
        drop(health);
        tokio::select! {
            () = tokio::time::sleep(probe::jittered(pause)) => {}
            // A silent node is asked at once. An error means that it is no longer watched.
            _ = changes.wait_for(|status| status.is_silent()) => {}
        }
    }
}

/// Asks for the node's description. `None` if the node may still answer. A key that is refused in the first answer is only
/// reported to the receiver of the first answer.
async fn ask(engine: &dyn Engine, health: &Health, is_first: bool) -> Option<Result<Arc<NodeInfo>, RefusedKey>> {
    let error = match probe::info(engine).await {
        Ok(info) => {
            let info = Arc::new(info);
            health.note_answer(Arc::clone(&info));
            return Some(Ok(info));
        }
        Err(error) => error,
    };
    match &error {
        EngineError::Unauthorized if is_first => return Some(Err(RefusedKey)),
        EngineError::Unauthorized => {
            health.note_failure(&StateChange::from(&error), RETRY_INTERVAL);
            return Some(Err(RefusedKey));
        }
        // It answers, but cannot be used until one of the two is updated.
        EngineError::VersionMismatch(_) => health.note_failure(&StateChange::from(&error), RETRY_INTERVAL),
        EngineError::Unavailable { .. } if is_loading(engine).await => health.note_loading(StateReason::Loading),
        // A node that was not asked stays what it is, if it is anything yet.
        EngineError::NoResources { .. } if !health.is_new() => {
            tracing::warn!(%error, "a node could not be asked");
        }
        _ => health.note_missed_answer(&StateChange::from(&error), RETRY_INTERVAL),
    }
    None
}

async fn is_loading(engine: &dyn Engine) -> bool {
    probe::load(engine).await.is_ok_and(|load| load.phase == Phase::Starting)
}

//! Watches a node that somebody else runs: asks what it is until it answers, and again whenever that may have changed.

use std::sync::{Arc, Weak};
use std::time::Duration;

use baton_engines::Engine;
use baton_schemas::EngineError;
use baton_schemas::node::{NodeInfo, Phase};
use tokio::sync::oneshot;

use crate::targets::nodes::probe;
use crate::targets::nodes::{Health, Life, StateReason, Why};

/// How soon a node is asked again that is starting or down. One that is back is used again within 5 s.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// A watched node.
pub struct Watched {
    /// Where it is in its life, kept up to date until this is dropped.
    pub health: Arc<Health>,
    /// Resolves once the node has said what it is, or has refused our key, which it will do for ever. A node that
    /// cannot be reached is waited for.
    pub first_answer: oneshot::Receiver<Result<Arc<NodeInfo>, RefusedKey>>,
}

/// The node knows another cluster key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedKey;

/// Watches the node at `url`.
pub fn watch(engine: Arc<dyn Engine>, url: &str) -> Watched {
    let health = Health::new(format!("the node at {url}"));
    let (first, first_answer) = oneshot::channel();
    tokio::spawn(keep_asking(engine, Arc::downgrade(&health), Some(first)));
    Watched { health, first_answer }
}

type First = oneshot::Sender<Result<Arc<NodeInfo>, RefusedKey>>;

async fn keep_asking(engine: Arc<dyn Engine>, health: Weak<Health>, mut first: Option<First>) {
    while let Some(health) = health.upgrade() {
        // One that stops takes no new connections, and tells by its stream of loads when it is gone.
        if health.life() != Life::Draining {
            let answer = ask(&*engine, &health, first.is_some()).await;
            // Nobody waits any more once the server was told to stop.
            let _ = answer.and_then(|answer| Some(first.take()?.send(answer)));
        }
        let pause = if matches!(health.life(), Life::Starting | Life::Down) { RETRY_INTERVAL } else { probe::INTERVAL };
        let mut changes = health.subscribe();
        drop(health);
        tokio::select! {
            () = tokio::time::sleep(probe::jittered(pause)) => {}
            // It is asked at once what has become of it; or it is not watched any more.
            _ = changes.wait_for(|status| status.is_silent()) => {}
        }
    }
}

/// Asks what the node is. `None`: it may still say so. Who waits for the first answer is told of a refused key before
/// anybody else is.
async fn ask(engine: &dyn Engine, health: &Health, is_first: bool) -> Option<Result<Arc<NodeInfo>, RefusedKey>> {
    let error = match probe::info(engine).await {
        Ok(info) => {
            let info = Arc::new(info);
            health.answers(Arc::clone(&info));
            return Some(Ok(info));
        }
        Err(error) => error,
    };
    match &error {
        EngineError::Unauthorized if is_first => return Some(Err(RefusedKey)),
        EngineError::Unauthorized => {
            health.fails(&Why::from(&error), RETRY_INTERVAL);
            return Some(Err(RefusedKey));
        }
        EngineError::Unavailable { .. } if is_loading(engine).await => health.loads(StateReason::Loading),
        _ => health.misses(&Why::from(&error), RETRY_INTERVAL),
    }
    None
}

async fn is_loading(engine: &dyn Engine) -> bool {
    probe::load(engine).await.is_ok_and(|load| load.phase == Phase::Starting)
}

//! Asks a node what it holds, whenever its load says that this has changed.

use std::sync::{Arc, Weak};
use std::time::Duration;

use baton_link::{Engine, awake};
use baton_schemas::held::HeldDigest;
use tokio::time::Instant;

use super::prefixes::key;
use super::probe::jittered;

/// The interval between two questions. What is routed to the node in between is known without one.
const INTERVAL: Duration = Duration::from_secs(1);

/// The longest wait for an answer.
const DEADLINE: Duration = Duration::from_secs(5);

/// A node that holds KV of earlier prompts.
pub(super) trait Holder: Send + Sync {
    /// Its client and its process, if it holds other KV than is known here.
    fn asked(&self) -> Option<(Arc<dyn Engine>, u64)>;

    /// This process of it has told what it holds, in answer to a question that was sent at `asked`.
    fn told(&self, digest: HeldDigest, asked: Instant, process: u64);
}

/// Asks until the node is dropped.
pub(super) async fn follow<N: Holder>(node: Weak<N>) {
    loop {
        tokio::time::sleep(jittered(INTERVAL)).await;
        let Some(question) = node.upgrade().map(|node| node.asked()) else { return };
        let Some((engine, process)) = question else { continue };
        let asked = Instant::now();
        let answer = awake::timeout(DEADLINE, engine.held(key())).await;
        let Some(node) = node.upgrade() else { return };
        match answer {
            Ok(Ok(digest)) => node.told(digest, asked, process),
            Ok(Err(error)) => tracing::debug!(%error, "a node does not say what it holds"),
            Err(_) => tracing::debug!("a node does not say in time what it holds"),
        }
    }
}

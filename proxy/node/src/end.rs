//! How a node ends.

use baton_link::Engine;
use baton_link::node::LateEngine;
use baton_process::parent;
use tokio_util::sync::CancellationToken;

/// What ends with a node.
#[derive(Clone, Default)]
pub(crate) struct NodeEnd {
    /// Ends its server.
    pub(crate) stop: CancellationToken,
    /// Stores its KV at the end.
    pub(crate) engine: LateEngine,
}

impl NodeEnd {
    pub(crate) async fn store_kv(&self) {
        if tokio::time::timeout(parent::GRACE, self.engine.store_kv()).await.is_err() {
            tracing::warn!("the engine is busy; KV that the disk of its store lacks is lost");
        }
    }
}

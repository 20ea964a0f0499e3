//! How a node ends.

use baton_engines::engine_options::WrittenOptions;
use baton_link::Engine;
use baton_link::node::LateEngine;
use baton_process::parent;
use tokio_util::sync::CancellationToken;

/// The parts of a node that a stop ends.
#[derive(Clone, Default)]
pub(crate) struct NodeEnd {
    /// Ends its server.
    pub(crate) stop: CancellationToken,
    /// Stores its KV at the end.
    pub(crate) engine: LateEngine,
    /// The engine keeps KV on disk.
    has_disk: bool,
}

impl NodeEnd {
    pub(crate) fn of(engine: &WrittenOptions) -> Self {
        let has_disk = engine.kv_store.as_ref().is_some_and(|store| store.disk.is_some());
        NodeEnd { has_disk, ..NodeEnd::default() }
    }

    /// Writes KV that the disk lacks. Takes no time if there is no disk.
    pub(crate) async fn store_kv(&self) {
        if self.has_disk && tokio::time::timeout(parent::GRACE, self.engine.store_kv()).await.is_err() {
            tracing::warn!("the engine is busy; KV that the disk of its store lacks is lost");
        }
    }
}

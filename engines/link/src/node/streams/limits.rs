//! Limits that the streams of all connections of a node share.

use std::sync::Arc;
use std::thread::available_parallelism;

use baton_schemas::EngineError;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Streams of a node, without those of loads. An engine's queue is shorter.
pub(super) const MAX_STREAMS: usize = 4_096;

/// Streams of drafts. More sequences than an engine has slots would only take turns.
pub(super) const MAX_DRAFTS: usize = 64;

/// Bytes of bodies that came in pieces and are not parsed yet. One connection may send as many at once, if each is as
/// long as a client's request may be.
pub(super) const MAX_BODIES_BYTES: usize = 512 << 20;

/// The limits of a node.
pub(in super::super) struct StreamLimits {
    pub(super) streams: Arc<Semaphore>,
    pub(super) drafts: Arc<Semaphore>,
    pub(super) body_bytes: Arc<Semaphore>,
    /// Bodies that are parsed at once on threads of their own.
    pub(super) parsers: Arc<Semaphore>,
}

impl StreamLimits {
    pub(in super::super) fn new() -> StreamLimits {
        let n_cores = available_parallelism().map_or(1, usize::from);
        StreamLimits {
            streams: Arc::new(Semaphore::new(MAX_STREAMS)),
            drafts: Arc::new(Semaphore::new(MAX_DRAFTS)),
            body_bytes: Arc::new(Semaphore::new(MAX_BODIES_BYTES)),
            parsers: Arc::new(Semaphore::new(2 * n_cores)),
        }
    }

    /// A place for a stream. `None`: there are too many.
    pub(super) fn stream(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.streams).try_acquire_owned().ok()
    }

    /// A place for a stream of drafts. `None`: there are too many.
    pub(super) fn draft(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.drafts).try_acquire_owned().ok()
    }

    /// Charges the bytes of a body. `None`: the others take too many.
    pub(super) fn body(&self, n_bytes: usize) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.body_bytes).try_acquire_many_owned(u32::try_from(n_bytes).ok()?).ok()
    }

    /// Waits for a turn to parse a long body.
    pub(super) async fn parser(&self) -> Result<OwnedSemaphorePermit, EngineError> {
        Arc::clone(&self.parsers).acquire_owned().await.map_err(EngineError::internal)
    }
}

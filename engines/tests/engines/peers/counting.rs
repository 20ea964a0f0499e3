//! An engine that counts the positions that it prefills.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use baton_link::Engine;
use baton_link::engine::{KvEvent, KvStream};
use baton_link::wrapper::EngineWrapper;
use baton_schemas::EngineError;
use baton_schemas::handoff::PrefillRequest;
use futures::StreamExt;

/// Counts the positions of another engine's prefills.
pub(crate) struct Counting {
    inner: Arc<dyn Engine>,
    n_positions: Arc<AtomicU64>,
}

impl Counting {
    pub(crate) fn new(inner: Arc<dyn Engine>) -> Counting {
        Counting { inner, n_positions: Arc::default() }
    }

    /// Positions in all chunks since the start.
    pub(crate) fn n_positions(&self) -> u64 {
        self.n_positions.load(Ordering::Relaxed)
    }
}

#[async_trait]
impl EngineWrapper for Counting {
    fn inner(&self) -> &dyn Engine {
        &*self.inner
    }

    async fn prefill(&self, request: PrefillRequest) -> Result<KvStream, EngineError> {
        let n_positions = Arc::clone(&self.n_positions);
        let events = self.inner.prefill(request).await?;
        let counted = events.inspect(move |event| {
            if let Ok(KvEvent::Chunk(chunk)) = event {
                n_positions.fetch_add(u64::from(chunk.p1 - chunk.p0), Ordering::Relaxed);
            }
        });
        Ok(counted.boxed())
    }
}

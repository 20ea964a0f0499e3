//! The slots of a simulated engine, and its bounded queue for them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use baton_schemas::EngineError;
use tokio::sync::OwnedSemaphorePermit;

use super::SimState;

/// The places of a simulated engine's queue.
#[derive(Debug, Default)]
pub(super) struct SimQueue {
    n_taken: AtomicUsize,
    /// Of the places taken, those whose requests are computed.
    n_begun: AtomicUsize,
}

impl SimQueue {
    /// Requests that wait.
    pub(super) fn n_waiting(&self) -> usize {
        let n_begun = self.n_begun.load(Ordering::Acquire);
        self.n_taken.load(Ordering::Acquire).saturating_sub(n_begun)
    }
}

/// A place in the bounded queue, which is returned on drop.
pub(super) struct SimQueuePlace {
    state: Arc<SimState>,
    has_begun: bool,
}

impl SimQueuePlace {
    pub(super) fn take(state: Arc<SimState>) -> Result<SimQueuePlace, EngineError> {
        let limit = state.config.max_queued;
        let below_limit = |n: usize| (n < limit as usize).then_some(n + 1);
        let taken = state.queue.n_taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, below_limit);
        taken.map(|_| SimQueuePlace { state, has_begun: false }).map_err(|_| EngineError::QueueFull { limit })
    }

    /// Its request is computed without a slot: it waits no longer, but keeps its place. Returns whether it begins just now.
    pub(super) fn begin(&mut self) -> bool {
        let begins = !std::mem::replace(&mut self.has_begun, true);
        self.state.queue.n_begun.fetch_add(usize::from(begins), Ordering::AcqRel);
        begins
    }
}

impl Drop for SimQueuePlace {
    fn drop(&mut self) {
        self.state.queue.n_begun.fetch_sub(usize::from(self.has_begun), Ordering::AcqRel);
        self.state.queue.n_taken.fetch_sub(1, Ordering::AcqRel);
    }
}

impl SimState {
    /// Waits for a slot. Dropping it frees the slot.
    pub(super) async fn slot(&self) -> Result<OwnedSemaphorePermit, EngineError> {
        let slot = Arc::clone(&self.slots).acquire_owned().await;
        slot.map_err(|_| EngineError::internal("the simulator has stopped"))
    }
}

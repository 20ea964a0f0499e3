//! The slots of a simulated engine, and its bounded queue for them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use baton_schemas::EngineError;
use tokio::sync::OwnedSemaphorePermit;

use super::SimState;

/// A place in the bounded queue, which is returned on drop.
pub(super) struct SimQueuePlace(Arc<SimState>);

impl SimQueuePlace {
    pub(super) fn take(state: Arc<SimState>) -> Result<SimQueuePlace, EngineError> {
        let limit = state.config.max_queued;
        let below_limit = |n: usize| (n < limit as usize).then_some(n + 1);
        let taken = state.n_queued.fetch_update(Ordering::AcqRel, Ordering::Acquire, below_limit);
        taken.map(|_| SimQueuePlace(state)).map_err(|_| EngineError::QueueFull { limit })
    }
}

impl Drop for SimQueuePlace {
    fn drop(&mut self) {
        self.0.n_queued.fetch_sub(1, Ordering::AcqRel);
    }
}

impl SimState {
    /// Waits for a slot. Dropping it frees the slot.
    pub(super) async fn slot(&self) -> Result<OwnedSemaphorePermit, EngineError> {
        let slot = Arc::clone(&self.slots).acquire_owned().await;
        slot.map_err(|_| EngineError::internal("the simulator has stopped"))
    }
}

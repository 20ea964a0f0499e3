//! Waiting for a slot in an engine with a place in hand: in the engine's own queue, or for another engine after a loss.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Since when a request has had places, but none of its sequences a slot.
#[derive(Debug, Default)]
pub struct SlotWait(Mutex<Option<Instant>>);

impl SlotWait {
    /// `None` while a sequence has a slot, or the request has no place.
    pub fn since(&self) -> Option<Instant> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn set(&self, is_waiting: bool) {
        let mut since = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *since = is_waiting.then(|| since.unwrap_or_else(Instant::now));
    }
}

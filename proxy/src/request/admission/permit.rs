//! What an admitted request holds: its permit, and a place for each running sequence.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use baton_engines::no_sleep::StayAwake;

use super::gate::AdmittedRequest;

/// The permit of an admitted request. Dropping it charges its key for the generated tokens.
#[derive(Debug)]
pub struct Permit {
    admitted: Arc<AdmittedRequest>,
    n_generated: Arc<AtomicU32>,
    _awake: StayAwake,
}

impl Permit {
    pub(super) fn new(admitted: Arc<AdmittedRequest>) -> Permit {
        Permit { admitted, n_generated: Arc::default(), _awake: StayAwake::begin() }
    }

    /// The places of the request's sequences.
    pub fn places(&self) -> Places {
        Places(Arc::clone(&self.admitted))
    }

    /// Charges the key for a prompt.
    pub fn charge_prompt(&self, n_tokens: u32) {
        self.admitted.account.charge_tokens(n_tokens.into());
    }

    /// The counter of the tokens that are generated under this permit.
    pub fn meter(&self) -> Arc<AtomicU32> {
        Arc::clone(&self.n_generated)
    }

    #[cfg(test)]
    pub(super) fn key(&self) -> &str {
        &self.admitted.account.name
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.admitted.account.charge_tokens(self.n_generated.load(Ordering::Relaxed).into());
    }
}

/// Gives each sequence of an admitted request its place.
#[derive(Debug, Clone)]
pub struct Places(Arc<AdmittedRequest>);

impl Places {
    /// Waits for a place. Dropping the future takes none. The request always has one place. When its sequence ends, the
    /// place becomes free for the next one. If that sequence fails, the whole reply ends.
    pub async fn next(&self) -> Place {
        // The semaphore is never closed.
        if let Ok(permit) = self.0.free_places.acquire().await {
            permit.forget();
        }
        Place(Arc::clone(&self.0))
    }

    /// Takes a place if one is free.
    pub fn try_next(&self) -> Option<Place> {
        self.0.free_places.try_acquire().ok()?.forget();
        Some(Place(Arc::clone(&self.0)))
    }
}

/// The place of one sequence. Dropping it says that the sequence has ended.
#[derive(Debug)]
pub struct Place(Arc<AdmittedRequest>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.gate.lock().end_sequence(&self.0.account, self.0.ticket);
        self.0.gate.admit_next();
    }
}

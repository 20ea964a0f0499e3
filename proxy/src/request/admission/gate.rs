//! The door that all requests pass: the queue behind a lock, and those who entered or wait.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Semaphore;

use super::queue::{AdmissionQueue, Entered};
use crate::account::Account;

/// The queue, and the requests that generate nothing.
pub(super) struct Gate {
    pub(super) queue: Mutex<AdmissionQueue<Arc<AdmittedRequest>>>,
    pub(super) brief: Arc<Semaphore>,
}

impl Gate {
    pub(super) fn lock(&self) -> MutexGuard<'_, AdmissionQueue<Arc<AdmittedRequest>>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives all free places to those who are next.
    pub(super) fn admit_next(self: &Arc<Self>) {
        loop {
            let Some((next, entered)) = self.lock().next() else { return };
            // Not under the lock: if the request is gone, it leaves here, which takes the lock again.
            let _ = next.answer.send(Ok(AdmittedRequest::new(self, &next.account, entered)));
        }
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Gate")
    }
}

/// A waiting request's entry. Dropping it leaves the queue.
pub(super) struct QueueEntry {
    pub(super) gate: Arc<Gate>,
    pub(super) account: Arc<Account>,
    pub(super) ticket: u64,
}

impl Drop for QueueEntry {
    fn drop(&mut self) {
        self.gate.lock().give_up(&self.account, self.ticket);
        // The first request of a lane may have a lower limit than those behind it, if its key's limits have changed.
        self.gate.admit_next();
    }
}

/// An admitted request, in the queue until its last part is dropped. Its places then go to the next requests.
#[derive(Debug)]
pub(super) struct AdmittedRequest {
    pub(super) gate: Arc<Gate>,
    pub(super) account: Arc<Account>,
    pub(super) ticket: u64,
    pub(super) free_places: Arc<Semaphore>,
}

impl AdmittedRequest {
    pub(super) fn new(gate: &Arc<Gate>, account: &Arc<Account>, entered: Entered) -> Arc<AdmittedRequest> {
        let Entered { ticket, free_places } = entered;
        Arc::new(AdmittedRequest { gate: Arc::clone(gate), account: Arc::clone(account), ticket, free_places })
    }
}

impl Drop for AdmittedRequest {
    fn drop(&mut self) {
        self.gate.lock().leave(&self.account, self.ticket);
        self.gate.admit_next();
    }
}

//! The door that all requests pass: the queue behind a lock, and those who entered.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{Semaphore, oneshot};

use super::engine_work::SlotUse;
use super::lane::{PlaceOf, Refusal, WantAnswer};
use super::queue::AdmissionQueue;
use super::target_places::TargetPlaces;
use crate::account::Account;

/// The queue, and the requests that generate nothing.
pub(super) struct Gate {
    pub(super) queue: Mutex<AdmissionQueue<GivenPlace>>,
    pub(super) brief: Arc<Semaphore>,
}

impl Gate {
    /// Reads the queue.
    pub(super) fn read<T>(&self, read: impl FnOnce(&AdmissionQueue<GivenPlace>) -> T) -> T {
        read(&self.queue.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Changes the queue, gives all free places to those who are next, and tells them.
    pub(super) fn change<T>(self: &Arc<Self>, change: impl FnOnce(&mut AdmissionQueue<GivenPlace>) -> T) -> T {
        let (outcome, answers) = {
            let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
            let outcome = change(&mut queue);
            queue.give_places();
            (outcome, queue.take_answers())
        };
        // Without the lock: the place of a sequence that is gone comes back here, which takes the lock again.
        for WantAnswer { to, outcome } in answers {
            let _ = to.send(outcome.map(|place| GivenPlace { gate: Arc::clone(self), place }));
        }
        outcome
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Gate")
    }
}

/// A taken place. Dropping it gives it to whoever is next.
#[derive(Debug)]
pub(super) struct GivenPlace {
    gate: Arc<Gate>,
    pub(super) place: PlaceOf,
}

impl GivenPlace {
    pub(super) fn move_to(&mut self, target: &Arc<TargetPlaces>) {
        self.gate.change(|queue| queue.move_place(&mut self.place, target));
    }

    /// Its slot has this use now. Returns the use before.
    pub(super) fn note(&mut self, slot_use: SlotUse) -> SlotUse {
        let before = std::mem::replace(&mut self.place.slot_use, slot_use);
        self.place.target.changed(before, slot_use);
        before
    }
}

impl Drop for GivenPlace {
    fn drop(&mut self) {
        self.gate.change(|queue| queue.return_place(&self.place));
    }
}

/// A request in its key's lane, until its last part is dropped.
#[derive(Debug)]
pub(super) struct EnteredRequest {
    pub(super) gate: Arc<Gate>,
    pub(super) account: Arc<Account>,
    pub(super) ticket: u64,
    /// It waits for a machine that is being woken.
    pub(super) is_waking: AtomicBool,
}

impl EnteredRequest {
    pub(super) fn new(gate: &Arc<Gate>, account: &Arc<Account>) -> Arc<EnteredRequest> {
        let ticket = gate.change(|queue| queue.enter(account));
        let (gate, account) = (Arc::clone(gate), Arc::clone(account));
        Arc::new(EnteredRequest { gate, account, ticket, is_waking: AtomicBool::new(false) })
    }

    /// A sequence of it wants a place at one of these targets.
    pub(super) fn want(&self, targets: &[Arc<TargetPlaces>]) -> OpenWant<'_> {
        let (answer, turn) = oneshot::channel();
        let number = self.gate.change(|queue| queue.want(&self.account, self.ticket, targets.to_vec(), answer));
        OpenWant { request: self, number, turn }
    }
}

impl Drop for EnteredRequest {
    fn drop(&mut self) {
        self.gate.change(|queue| queue.leave(&self.account, self.ticket));
    }
}

/// A sequence that wants a place. Dropping it leaves the queue.
pub(super) struct OpenWant<'a> {
    request: &'a EnteredRequest,
    number: u64,
    pub(super) turn: oneshot::Receiver<Result<GivenPlace, Refusal>>,
}

impl Drop for OpenWant<'_> {
    fn drop(&mut self) {
        let EnteredRequest { gate, account, ticket, .. } = self.request;
        // The first request of a lane may have a lower limit than those behind it, if its key's limits have changed.
        gate.change(|queue| queue.stop_wanting(account, *ticket, self.number));
    }
}

//! The requests that are in the endpoint now, from their arrival to their end.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::RouteRecord;
use crate::admission::SlotWait;

/// The most requests that a snapshot shows. More may wait, and nobody reads longer lists.
const MAX_SHOWN: usize = 128;

/// The requests that are in the endpoint now. Admission bounds their number.
#[derive(Debug, Default)]
pub struct RunningRequests(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    next: u64,
    /// In the order of their arrival.
    requests: BTreeMap<u64, RunningRequest>,
}

/// The facts about a request so far.
#[derive(Debug)]
pub(super) struct RunningRequest {
    /// Its course at the last change of its phase.
    pub(super) record: RouteRecord,
    pub(super) arrived: Instant,
    /// Counts its tokens.
    pub(super) n_generated: Arc<AtomicU32>,
    pub(super) slot_wait: Arc<SlotWait>,
}

impl RunningRequest {
    fn now(&self) -> RouteRecord {
        let lost_slot = self.record.slot_ms.and(self.slot_wait.since());
        let waits_since = lost_slot.map(|since| since.saturating_duration_since(self.arrived).as_secs_f64() * 1e3);
        RouteRecord {
            n_completion: self.n_generated.load(Ordering::Relaxed),
            no_slot_since_ms: self.record.slot_ms.map_or(Some(0.0), |_| waits_since),
            e2e_ms: self.arrived.elapsed().as_secs_f64() * 1e3,
            ..self.record.clone()
        }
    }
}

/// A request's entry. Dropping it removes the request.
#[derive(Debug)]
pub(super) struct RunningEntry {
    all: Arc<RunningRequests>,
    number: u64,
}

impl RunningRequests {
    /// Adds a request that has arrived.
    pub(super) fn enter(self: &Arc<Self>, request: RunningRequest) -> RunningEntry {
        let mut entries = self.lock();
        let number = entries.next;
        entries.next += 1;
        entries.requests.insert(number, request);
        RunningEntry { all: Arc::clone(self), number }
    }

    /// The course of each request until now, the newest first, at most [`MAX_SHOWN`].
    pub fn latest(&self) -> Vec<RouteRecord> {
        self.lock().requests.values().rev().take(MAX_SHOWN).map(RunningRequest::now).collect()
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RunningEntry {
    /// The request's phase has changed.
    pub(super) fn update(&self, request: RunningRequest) {
        self.all.lock().requests.insert(self.number, request);
    }
}

impl Drop for RunningEntry {
    fn drop(&mut self) {
        self.all.lock().requests.remove(&self.number);
    }
}

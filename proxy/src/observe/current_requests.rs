//! The requests that are in the endpoint now, from their arrival to their end.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::RouteRecord;
use crate::admission::{EngineWork, WorkPhase};

/// The most requests that a snapshot shows. More may wait, and nobody reads longer lists.
const MAX_SHOWN: usize = 128;

/// The requests that are in the endpoint now. Admission bounds their number.
#[derive(Debug, Default)]
pub struct CurrentRequests(Mutex<Entries>);

#[derive(Debug, Default)]
struct Entries {
    next: u64,
    /// In the order of their arrival.
    requests: BTreeMap<u64, CurrentRequest>,
}

/// How many requests are in the endpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CurrentCounts {
    /// Engines work for them.
    pub n_running: u64,
    /// No engine works for them yet, or none does now.
    pub n_waiting: u64,
}

impl CurrentCounts {
    fn add(&mut self, phase: WorkPhase) {
        match phase {
            WorkPhase::WaitsSince(_) => self.n_waiting += 1,
            WorkPhase::WorksSince(_) => self.n_running += 1,
        }
    }
}

/// The facts about a request so far.
#[derive(Debug)]
pub(super) struct CurrentRequest {
    /// Its course at the last change of its phase.
    pub(super) record: RouteRecord,
    pub(super) arrived: Instant,
    /// Counts its tokens.
    pub(super) n_generated: Arc<AtomicU32>,
    pub(super) work: Arc<EngineWork>,
}

impl CurrentRequest {
    fn row(&self, phase: WorkPhase) -> RouteRecord {
        let since_arrival = |at: Instant| Some(at.saturating_duration_since(self.arrived).as_secs_f64() * 1e3);
        let (waiting_since_ms, running_since_ms) = match phase {
            WorkPhase::WaitsSince(since) => (since_arrival(since), None),
            WorkPhase::WorksSince(since) => (None, since_arrival(since)),
        };
        RouteRecord {
            n_completion: self.n_generated.load(Ordering::Relaxed),
            waiting_since_ms,
            running_since_ms,
            e2e_ms: self.arrived.elapsed().as_secs_f64() * 1e3,
            ..self.record.clone()
        }
    }
}

/// A request's entry. Dropping it removes the request.
#[derive(Debug)]
pub(super) struct CurrentEntry {
    all: Arc<CurrentRequests>,
    number: u64,
}

impl CurrentRequests {
    /// Adds a request that has arrived.
    pub(super) fn enter(self: &Arc<Self>, request: CurrentRequest) -> CurrentEntry {
        let mut entries = self.lock();
        let number = entries.next;
        entries.next += 1;
        entries.requests.insert(number, request);
        CurrentEntry { all: Arc::clone(self), number }
    }

    /// How many there are.
    pub fn counts(&self) -> CurrentCounts {
        let mut counts = CurrentCounts::default();
        self.lock().requests.values().for_each(|request| counts.add(request.work.phase()));
        counts
    }

    /// How many there are, and the course of each until now, the newest first, at most [`MAX_SHOWN`]. The rows say of each
    /// request what it was counted as.
    pub fn now(&self) -> (CurrentCounts, Vec<RouteRecord>) {
        let mut counts = CurrentCounts::default();
        let mut rows = Vec::new();
        for request in self.lock().requests.values().rev() {
            let phase = request.work.phase();
            counts.add(phase);
            if rows.len() < MAX_SHOWN {
                rows.push(request.row(phase));
            }
        }
        (counts, rows)
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CurrentEntry {
    /// The request's phase has changed.
    pub(super) fn update(&self, request: CurrentRequest) {
        self.all.lock().requests.insert(self.number, request);
    }
}

impl Drop for CurrentEntry {
    fn drop(&mut self) {
        self.all.lock().requests.remove(&self.number);
    }
}

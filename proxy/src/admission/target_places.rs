//! The places of one target: a node, or an upstream.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::engine_work::SlotUse;

/// The places of one target. Each sequence that the target generates for this endpoint has one of them.
///
/// The target sets their number. Only the queue, under its lock, takes them and gives them back, so that its counts agree. What
/// their slots are used for changes without that lock, and only reports read it.
#[derive(Debug)]
pub struct TargetPlaces {
    /// Tells it from all others of this process.
    pub(super) id: u64,
    n_places: AtomicUsize,
    n_taken: AtomicUsize,
    /// The taken ones whose sequence has no slot. Only reports read it.
    n_without_slot: AtomicUsize,
    n_wanted: AtomicUsize,
}

impl TargetPlaces {
    /// So many places, all free.
    pub fn new(n_places: usize) -> Arc<TargetPlaces> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        Arc::new(TargetPlaces {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            n_places: AtomicUsize::new(n_places),
            n_taken: AtomicUsize::new(0),
            n_without_slot: AtomicUsize::new(0),
            n_wanted: AtomicUsize::new(0),
        })
    }

    /// Sets their number. Sequences that have more places than that go on.
    pub fn set(&self, n_places: usize) {
        self.n_places.store(n_places, Ordering::Relaxed);
    }

    /// Their number.
    pub fn n_places(&self) -> usize {
        self.n_places.load(Ordering::Relaxed)
    }

    /// Those that are taken.
    pub fn n_taken(&self) -> usize {
        self.n_taken.load(Ordering::Relaxed)
    }

    /// The taken ones of sequences that have a slot.
    pub(super) fn n_in_slots(&self) -> usize {
        self.n_taken().saturating_sub(self.n_without_slot.load(Ordering::Relaxed))
    }

    /// Sequences that wait for one of them, or for one here or elsewhere.
    pub fn n_wanted(&self) -> usize {
        self.n_wanted.load(Ordering::Relaxed)
    }

    pub(super) fn is_full(&self) -> bool {
        self.n_taken() >= self.n_places()
    }

    /// The taken share, in thousandths.
    pub(super) fn load(&self) -> usize {
        self.n_taken().saturating_mul(1_000) / self.n_places().max(1)
    }

    pub(super) fn take(&self, slot_use: SlotUse) {
        self.n_taken.fetch_add(1, Ordering::Relaxed);
        self.n_without_slot.fetch_add(n_without_slot(slot_use), Ordering::Relaxed);
    }

    pub(super) fn give_back(&self, slot_use: SlotUse) {
        self.n_taken.fetch_sub(1, Ordering::Relaxed);
        self.n_without_slot.fetch_sub(n_without_slot(slot_use), Ordering::Relaxed);
    }

    /// The slot of a sequence that has one of them has another use.
    pub(super) fn changed(&self, before: SlotUse, now: SlotUse) {
        self.n_without_slot.fetch_add(n_without_slot(now), Ordering::Relaxed);
        self.n_without_slot.fetch_sub(n_without_slot(before), Ordering::Relaxed);
    }

    pub(super) fn want(&self) {
        self.n_wanted.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn stop_wanting(&self) {
        self.n_wanted.fetch_sub(1, Ordering::Relaxed);
    }
}

fn n_without_slot(slot_use: SlotUse) -> usize {
    usize::from(slot_use == SlotUse::NoSlot)
}

//! Whether engines work for a request, which is what its row and the counts of requests say.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The use of a place's slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SlotUse {
    /// There is no slot yet: the prompt is being prepared, or the sequence waits in the engine's queue, or for another engine
    /// after a loss.
    NoSlot,
    /// The sequence has a slot, and its prompt waits in the queue of another node, which is to compute it.
    PromptWaits,
    /// An engine works for the sequence.
    Working,
}

/// Since when a request waits, or engines work for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkPhase {
    /// No engine works for it.
    WaitsSince(Instant),
    /// An engine works for one of its sequences at least.
    WorksSince(Instant),
}

/// The work for one request. It waits first.
#[derive(Debug)]
pub struct EngineWork(Mutex<WorkingSequences>);

#[derive(Debug)]
struct WorkingSequences {
    /// Those that engines work for.
    n_working: usize,
    /// When the first of them began, or the last one ended.
    since: Instant,
}

impl Default for EngineWork {
    fn default() -> Self {
        EngineWork(Mutex::new(WorkingSequences { n_working: 0, since: Instant::now() }))
    }
}

impl EngineWork {
    /// Its phase now.
    pub fn phase(&self) -> WorkPhase {
        match *self.lock() {
            WorkingSequences { n_working: 0, since } => WorkPhase::WaitsSince(since),
            WorkingSequences { since, .. } => WorkPhase::WorksSince(since),
        }
    }

    /// The slot of one of its sequences has another use.
    pub(super) fn changed(&self, before: SlotUse, now: SlotUse) {
        let mut sequences = self.lock();
        let n_before = sequences.n_working;
        sequences.n_working = n_before + usize::from(now == SlotUse::Working) - usize::from(before == SlotUse::Working);
        if (n_before == 0) != (sequences.n_working == 0) {
            sequences.since = Instant::now();
        }
    }

    fn lock(&self) -> MutexGuard<'_, WorkingSequences> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

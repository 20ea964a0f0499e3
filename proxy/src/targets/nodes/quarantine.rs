//! A node's quarantine: the choices on it that have lost an engine, until this node has given them some tokens.
//!
//! If the node's process ends while only one choice is there, the request of that choice is the cause. A choice whose
//! prompt another node computes is there as a free one, because both nodes may be lost at the same moment.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// The quarantine of one node.
#[derive(Debug, Default)]
pub struct Quarantine(Mutex<Occupancy>);

#[derive(Debug, Default)]
struct Occupancy {
    /// The stays of each level.
    n_stays: [usize; 3],
    /// The stays that ended with the node's process.
    n_lost: u64,
}

/// How a choice goes on, from the least to the most likely cause of its engine's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum QuarantineLevel {
    /// It has lost no engine since its last tokens.
    Free,
    /// Its lost engine had given it many tokens. It goes on at once, and not beside an isolated choice if it can.
    Watched,
    /// Its lost engine had given it few tokens or none. It waits for a node whose quarantine has free choices only.
    Isolated,
}

/// The stay of a choice in a node's quarantine, which dropping it ends.
#[derive(Debug)]
pub struct QuarantineStay {
    quarantine: Arc<Quarantine>,
    level: QuarantineLevel,
    /// The lost stays when it began.
    n_lost: u64,
    /// Set when it was lost.
    was_alone: OnceLock<bool>,
}

impl Quarantine {
    /// Returns true if no choice is here that one of this level keeps away from.
    pub fn is_open_for(&self, level: QuarantineLevel) -> bool {
        self.lock().is_open_for(level)
    }

    /// Enters if the quarantine is open for this level.
    pub fn enter(self: &Arc<Self>, level: QuarantineLevel) -> Option<QuarantineStay> {
        let mut here = self.lock();
        here.is_open_for(level).then(|| self.stay(&mut here, level))
    }

    /// Enters whoever is here.
    pub fn enter_anyway(self: &Arc<Self>, level: QuarantineLevel) -> QuarantineStay {
        self.stay(&mut self.lock(), level)
    }

    fn stay(self: &Arc<Self>, here: &mut Occupancy, level: QuarantineLevel) -> QuarantineStay {
        here.n_stays[level as usize] += 1;
        QuarantineStay { quarantine: Arc::clone(self), level, n_lost: here.n_lost, was_alone: OnceLock::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Occupancy> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Occupancy {
    fn is_open_for(&self, level: QuarantineLevel) -> bool {
        let [_, n_watched, n_isolated] = self.n_stays;
        match level {
            QuarantineLevel::Free => true,
            QuarantineLevel::Watched => n_isolated == 0,
            QuarantineLevel::Isolated => n_watched + n_isolated == 0,
        }
    }
}

impl QuarantineStay {
    /// Returns true for a stay in this quarantine.
    pub fn is_in(&self, quarantine: &Arc<Quarantine>) -> bool {
        Arc::ptr_eq(&self.quarantine, quarantine)
    }

    /// The node's process was lost. Returns true if no other choice was here that may be the cause. One that was here and
    /// left with its tokens is not.
    pub fn lose(&self) -> bool {
        *self.was_alone.get_or_init(|| {
            let mut here = self.quarantine.lock();
            let was_alone = here.n_stays.iter().sum::<usize>() == 1 && here.n_lost == self.n_lost;
            here.n_lost += 1;
            was_alone
        })
    }
}

impl Drop for QuarantineStay {
    fn drop(&mut self) {
        self.quarantine.lock().n_stays[self.level as usize] -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_alone_unless_another_one_is_here_or_was_lost_meanwhile() {
        use QuarantineLevel::{Free, Isolated, Watched};
        let quarantine = Arc::new(Quarantine::default());
        let first = quarantine.enter(Isolated).unwrap();
        assert!(quarantine.enter(Isolated).is_none() && quarantine.enter(Watched).is_none());
        let second = quarantine.enter_anyway(Isolated);
        drop(second);
        assert!(first.lose(), "the other one had left with its tokens");
        drop(first);
        let watched = quarantine.enter(Watched).unwrap();
        assert!(quarantine.enter(Isolated).is_none() && quarantine.is_open_for(Watched));
        let free = quarantine.enter(Free).unwrap();
        assert!(!watched.lose(), "the free choice may be the cause");
        drop(watched);
        assert!(!free.lose(), "the lost one may be the cause");
        assert!(quarantine.enter(Isolated).is_some_and(|isolated| !isolated.lose()), "the free choice keeps none away");
        drop(free);
        assert!(quarantine.enter(Isolated).is_some_and(|isolated| isolated.lose()));
    }
}

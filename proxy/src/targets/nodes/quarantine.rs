//! A node's quarantine: the work on the node, and which of it may be the cause if the node's process ends.
//!
//! Whatever is sent to a node stays here until it leaves the node. If the process ends while only one choice is here that
//! may be the cause, the request of that choice is the cause.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// The quarantine of one node.
#[derive(Debug, Default)]
pub struct Quarantine(Mutex<Occupancy>);

#[derive(Debug, Default)]
struct Occupancy {
    /// The stays of each level.
    n_stays: [usize; 4],
    /// The stays of each level that ended with the node's process.
    n_lost: [u64; 4],
}

/// How a choice goes on, from the least to the most likely cause of its engine's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum QuarantineLevel {
    /// The node has given it many tokens.
    Cleared,
    /// It has lost no engine since its last tokens. It goes where no isolated choice is, if it can.
    Free,
    /// Its lost engine had given it many tokens. It goes on at once, and not beside an isolated choice if it can.
    Watched,
    /// Its lost engine had given it few tokens or none. It waits for a node without watched and isolated choices.
    Isolated,
}

/// The stay of a choice in a node's quarantine, which dropping it ends.
#[derive(Debug)]
pub struct QuarantineStay {
    quarantine: Arc<Quarantine>,
    /// Changes only under the lock of the quarantine's occupancy.
    level: Mutex<QuarantineLevel>,
    /// The lost stays of each level when it began.
    n_lost: [u64; 4],
    /// Set when it was lost.
    was_alone: OnceLock<bool>,
}

impl Quarantine {
    /// Returns true if no choice is here that one of this level keeps away from.
    pub fn is_open_for(&self, level: QuarantineLevel) -> bool {
        lock(&self.0).is_open_for(level)
    }

    /// Enters if the quarantine is open for this level.
    pub fn enter(self: &Arc<Self>, level: QuarantineLevel) -> Option<QuarantineStay> {
        let mut here = lock(&self.0);
        here.is_open_for(level).then(|| self.stay(&mut here, level))
    }

    /// Enters whoever is here.
    pub fn enter_anyway(self: &Arc<Self>, level: QuarantineLevel) -> QuarantineStay {
        self.stay(&mut lock(&self.0), level)
    }

    fn stay(self: &Arc<Self>, here: &mut Occupancy, level: QuarantineLevel) -> QuarantineStay {
        here.n_stays[level as usize] += 1;
        let (quarantine, level) = (Arc::clone(self), Mutex::new(level));
        QuarantineStay { quarantine, level, n_lost: here.n_lost, was_alone: OnceLock::new() }
    }
}

fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Occupancy {
    fn is_open_for(&self, level: QuarantineLevel) -> bool {
        let [_, _, n_watched, n_isolated] = self.n_stays;
        match level {
            QuarantineLevel::Cleared => true,
            QuarantineLevel::Free | QuarantineLevel::Watched => n_isolated == 0,
            QuarantineLevel::Isolated => n_watched + n_isolated == 0,
        }
    }
}

impl QuarantineStay {
    /// Returns true for a stay in this quarantine.
    pub fn is_in(&self, quarantine: &Arc<Quarantine>) -> bool {
        Arc::ptr_eq(&self.quarantine, quarantine)
    }

    /// The choice goes on here on another level.
    pub fn set_level(&self, new: QuarantineLevel) {
        let mut here = lock(&self.quarantine.0);
        let was = std::mem::replace(&mut *lock(&self.level), new);
        here.n_stays[was as usize] -= 1;
        here.n_stays[new as usize] += 1;
    }

    /// Returns true if no other choice is here that may be the cause of the process's end. If that `is_late`, after many
    /// tokens of this choice, cleared ones may be, too.
    pub fn is_alone(&self, is_late: bool) -> bool {
        let here = lock(&self.quarantine.0);
        let lowest = if is_late { QuarantineLevel::Cleared } else { QuarantineLevel::Free } as usize;
        here.n_stays[lowest..].iter().sum::<usize>() == 1 && here.n_lost[lowest..] == self.n_lost[lowest..]
    }

    /// The node's process was lost. Returns true if the choice was alone here. One that was here and left with its tokens is
    /// not the cause.
    pub fn lose(&self, is_late: bool) -> bool {
        *self.was_alone.get_or_init(|| {
            let was_alone = self.is_alone(is_late);
            lock(&self.quarantine.0).n_lost[*lock(&self.level) as usize] += 1;
            was_alone
        })
    }
}

impl Drop for QuarantineStay {
    fn drop(&mut self) {
        let level = *lock(&self.level);
        lock(&self.quarantine.0).n_stays[level as usize] -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_alone_unless_another_one_is_here_or_was_lost_meanwhile() {
        use QuarantineLevel::{Cleared, Free, Isolated, Watched};
        let quarantine = Arc::new(Quarantine::default());
        let first = quarantine.enter(Isolated).unwrap();
        assert!([Isolated, Watched, Free].iter().all(|level| quarantine.enter(*level).is_none()));
        let second = quarantine.enter_anyway(Isolated);
        drop(second);
        assert!(first.lose(false), "the other one had left with its tokens");
        drop(first);
        let watched = quarantine.enter(Watched).unwrap();
        assert!(quarantine.enter(Isolated).is_none() && quarantine.is_open_for(Watched));
        let free = quarantine.enter(Free).unwrap();
        assert!(!watched.lose(false), "the free choice may be the cause");
        drop(watched);
        assert!(!free.lose(false), "the lost one may be the cause");
        drop(free);
        let free = quarantine.enter(Free).unwrap();
        let isolated = quarantine.enter(Isolated).expect("free choices keep none away");
        assert!(!isolated.is_alone(false));
        free.set_level(Cleared);
        assert!(isolated.is_alone(false) && !isolated.is_alone(true));
        assert!(!free.lose(true), "the isolated one may be the cause");
        assert!(isolated.lose(false), "the other one had many tokens");
    }

    #[test]
    fn every_choice_that_ends_with_a_process_sees_the_others() {
        for is_late in [false, true] {
            let quarantine = Arc::new(Quarantine::default());
            let stays = [QuarantineLevel::Isolated, QuarantineLevel::Free].map(|level| quarantine.enter_anyway(level));
            for stay in stays {
                assert!(!stay.lose(is_late));
            }
        }
    }
}

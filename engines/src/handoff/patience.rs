//! How long a pull may take for what it brings, and how long it may bring nothing.

use std::time::{Duration, Instant};

/// Positions per second below which a pull is given up: an engine that computes a prompt itself is faster, and a peer
/// that sends its signs of life for ever must not hold a request for ever.
const SLOWEST_PULL: f64 = 20.0;

/// The upper limit of a pull's deadline, whatever a plan predicts.
const LONGEST: Duration = Duration::from_secs(3_600);

/// The deadline of a pull, which every verified position moves.
pub(super) struct PullPatience {
    /// When the pull began, later by the time that the reader itself took.
    began: Instant,
    /// When something was verified last.
    last: Instant,
    /// For the queue and the first chunk, and between any two.
    allowance: Duration,
    n_positions: u32,
}

impl PullPatience {
    /// Begins now. No new position has to come for as long as `allowance`.
    pub(super) fn new(allowance: Duration) -> PullPatience {
        let now = Instant::now();
        PullPatience { began: now, last: now, allowance: allowance.min(LONGEST), n_positions: 0 }
    }

    /// `n` more positions were verified.
    pub(super) fn received(&mut self, n: u32) {
        self.n_positions = self.n_positions.saturating_add(n);
        self.last = Instant::now();
    }

    /// The reader was busy for so long: that is not the sender's fault.
    pub(super) fn excuse(&mut self, busy: Duration) {
        self.began += busy;
        self.last += busy;
    }

    /// Until when more has to come.
    pub(super) fn deadline(&self) -> Instant {
        let of_all = self.began + self.allowance + Duration::from_secs_f64(f64::from(self.n_positions) / SLOWEST_PULL);
        of_all.min(self.last + self.allowance)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_verified_buys_time() {
        let allowance = Duration::from_secs(60);
        let mut patience = PullPatience::new(allowance);
        let first = patience.deadline();
        assert_eq!(first, patience.began + allowance);
        patience.received(512);
        let second = patience.deadline();
        assert!(second >= first && second <= Instant::now() + allowance, "a wait has no more than the allowance");
        patience.excuse(Duration::from_secs(3));
        assert_eq!(patience.deadline() - second, Duration::from_secs(3));
        patience.received(u32::MAX);
        assert!(patience.deadline() >= second, "no overflow");
    }

    #[test]
    fn a_pull_that_trickles_is_given_up() {
        let mut patience = PullPatience::new(Duration::from_secs(60));
        // A position a second, for two minutes.
        patience.began -= Duration::from_secs(120);
        patience.received(120);
        assert!(patience.deadline() < Instant::now());
    }

    #[test]
    fn nobody_is_told_to_wait_for_ever() {
        let patience = PullPatience::new(Duration::from_millis(u32::MAX.into()));
        assert_eq!(patience.deadline() - patience.began, LONGEST);
    }
}

//! The deadline of a pull: positions must keep coming, and at a minimum rate.

use std::time::{Duration, Instant};

/// Positions per second below which a pull is given up. An engine computes a prompt faster than that itself, and a peer
/// that only sends signs of life must not hold up a request forever.
const SLOWEST_PULL: f64 = 20.0;

/// Bytes per second below which states do not come in time: a tenth of a gigabit link. They follow the last position.
const SLOWEST_STATES: f64 = 12.5e6;

/// The longest allowance, whatever a plan predicts.
const LONGEST: Duration = Duration::from_secs(3_600);

/// The deadline of a pull. Every verified position extends it.
pub(super) struct PullDeadline {
    /// When the pull began, plus the time that the reader itself took.
    began: Instant,
    /// When positions were last verified.
    last: Instant,
    /// Time for the queue and the first chunk, and between two chunks.
    allowance: Duration,
    n_positions: u32,
}

impl PullDeadline {
    /// Starts now. `allowance` is the longest time without a new position, beside the time that states of `state_bytes` take.
    pub(super) fn new(allowance: Duration, state_bytes: usize) -> PullDeadline {
        let now = Instant::now();
        let allowance = allowance.min(LONGEST) + Duration::from_secs_f64(state_bytes as f64 / SLOWEST_STATES);
        PullDeadline { began: now, last: now, allowance, n_positions: 0 }
    }

    /// `n` more positions were verified.
    pub(super) fn received(&mut self, n: u32) {
        self.n_positions = self.n_positions.saturating_add(n);
        self.last = Instant::now();
    }

    /// Adds the time that the reader was busy, which is not the sender's fault.
    pub(super) fn extend(&mut self, busy: Duration) {
        self.began += busy;
        self.last += busy;
    }

    /// When the next position is due.
    pub(super) fn at(&self) -> Instant {
        let of_all = self.began + self.allowance + Duration::from_secs_f64(f64::from(self.n_positions) / SLOWEST_PULL);
        of_all.min(self.last + self.allowance)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_verified_positions_extend_the_deadline() {
        let allowance = Duration::from_secs(60);
        let mut deadline = PullDeadline::new(allowance, 0);
        let first = deadline.at();
        assert_eq!(first, deadline.began + allowance);
        deadline.received(512);
        let second = deadline.at();
        assert!(
            second >= first && second <= Instant::now() + allowance,
            "a single wait is never longer than the allowance"
        );
        deadline.extend(Duration::from_secs(3));
        assert_eq!(deadline.at() - second, Duration::from_secs(3));
        deadline.received(u32::MAX);
        assert!(deadline.at() >= second, "no overflow");
    }

    #[test]
    fn a_pull_that_trickles_is_given_up() {
        let mut deadline = PullDeadline::new(Duration::from_secs(60), 0);
        // One position a second for two minutes.
        deadline.began -= Duration::from_secs(120);
        deadline.received(120);
        assert!(deadline.at() < Instant::now());
    }

    #[test]
    fn the_allowance_is_limited() {
        let deadline = PullDeadline::new(Duration::from_millis(u32::MAX.into()), 0);
        assert_eq!(deadline.at() - deadline.began, LONGEST);
    }

    #[test]
    fn states_have_time_to_follow_the_last_position() {
        let deadline = PullDeadline::new(Duration::from_millis(100), 125_000_000);
        assert_eq!(deadline.at() - deadline.began, Duration::from_millis(10_100));
    }
}

//! How long a pull may take for what it brings.

use std::time::{Duration, Instant};

/// Positions per second below which a pull is given up: an engine that computes a prompt itself is faster, and a peer
/// that sends its signs of life for ever must not hold a request for ever.
const SLOWEST_PULL: f64 = 20.0;

/// The deadline of a pull, which every verified position moves.
pub(super) struct Patience {
    /// When the pull began, later by the time that the reader itself took.
    began: Instant,
    /// For the queue and the first chunk.
    allowance: Duration,
    n_positions: u32,
}

impl Patience {
    /// Begins now. Nothing has to come for as long as `allowance`.
    pub(super) fn new(allowance: Duration) -> Patience {
        Patience { began: Instant::now(), allowance, n_positions: 0 }
    }

    /// `n` more positions were verified.
    pub(super) fn received(&mut self, n: u32) {
        self.n_positions = self.n_positions.saturating_add(n);
    }

    /// The reader was busy for so long: that is not the sender's fault.
    pub(super) fn excuse(&mut self, busy: Duration) {
        self.began += busy;
    }

    /// Until when more has to come.
    pub(super) fn deadline(&self) -> Instant {
        self.began + self.allowance + Duration::from_secs_f64(f64::from(self.n_positions) / SLOWEST_PULL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_verified_buys_time() {
        let allowance = Duration::from_secs(60);
        let mut patience = Patience::new(allowance);
        let first = patience.deadline();
        assert_eq!(first, patience.began + allowance);
        patience.received(512);
        assert_eq!(patience.deadline() - first, Duration::from_millis(25_600));
        patience.excuse(Duration::from_secs(3));
        assert_eq!(patience.deadline() - first, Duration::from_millis(28_600));
        patience.received(u32::MAX);
        assert!(patience.deadline() > first, "no overflow");
    }
}

//! When a child that has ended, or did not start, is started again.
//!
//! ```text
//!            ready             ends after a stable run, or for the first few times: at once
//! Starting ─────────► Running ────────────────────────────────────────────────────────────► Starting
//!    │  cannot start, or ends again and again
//!    └──────────────────────────────────────► a pause of 0.25 s, doubling to 30 s ──► Starting
//! ```

use std::time::Duration;

/// The end of a child that ran this long does not count as a quick exit.
const STABLE_AFTER: Duration = Duration::from_secs(10);

/// Quick exits in a row before the next start waits.
const FORGIVEN_EXITS: u32 = 3;

const FIRST_PAUSE: Duration = Duration::from_millis(250);
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// The failed starts and quick exits of a child, in a row.
#[derive(Debug, Default)]
pub struct Restarts {
    n_failures: u32,
}

impl Restarts {
    /// The pause after a failed start.
    pub fn after_failed_start(&mut self) -> Duration {
        self.n_failures = self.n_failures.saturating_add(1);
        self.pause()
    }

    /// The pause after the end of a child that was ready for this time; zero if there is none.
    pub fn after_end(&mut self, ran: Duration) -> Duration {
        self.n_failures = if ran >= STABLE_AFTER { 0 } else { self.n_failures.saturating_add(1) };
        if self.n_failures <= FORGIVEN_EXITS { Duration::ZERO } else { self.pause() }
    }

    fn pause(&self) -> Duration {
        let doublings = self.n_failures.saturating_sub(1).min(16);
        FIRST_PAUSE.saturating_mul(1 << doublings).min(MAX_PAUSE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_starts_wait_ever_longer() {
        let mut restarts = Restarts::default();
        let pauses: Vec<u128> = (0..9).map(|_| restarts.after_failed_start().as_millis()).collect();
        assert_eq!(pauses, [250, 500, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000]);
    }

    #[test]
    fn the_first_quick_exits_are_forgiven_and_a_stable_run_forgives_all() {
        let mut restarts = Restarts::default();
        let quick = |restarts: &mut Restarts| restarts.after_end(Duration::from_secs(1)).as_millis();
        let pauses: Vec<u128> = (0..5).map(|_| quick(&mut restarts)).collect();
        assert_eq!(pauses, [0, 0, 0, 2_000, 4_000]);
        assert_eq!(restarts.after_end(STABLE_AFTER), Duration::ZERO);
        assert_eq!(quick(&mut restarts), 0);
    }
}

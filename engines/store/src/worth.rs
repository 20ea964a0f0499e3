//! Chooses copies that are worth keeping: what their bytes save (the cost of making them again ÷ their bytes) × the chance that they
//! are needed.
//!
//! In memory a level stands for the chance, which falls as others are dropped. On disk, where several processes drop files, time does.

use std::time::{Duration, SystemTime};

/// The savings of each byte of a copy.
pub(crate) fn per_byte(cost: f64, n_bytes: u64) -> f64 {
    cost / n_bytes.max(1) as f64
}

/// The level from which worths count (GreedyDual-Size, Cao and Irani 1997). It rises to the worth of everything that is dropped,
/// so what was not used since is worth less than what was.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct GreedyDual(f64);

impl GreedyDual {
    /// The worth of a copy that was used at this level, and saves `cost` with `n_bytes`.
    pub fn worth(self, cost: f64, n_bytes: usize) -> f64 {
        self.0 + per_byte(cost, n_bytes as u64)
    }

    /// Notes that a copy of this worth was dropped.
    pub fn dropped(&mut self, worth: f64) {
        self.0 = self.0.max(worth);
    }
}

/// While a file is not used, the chance that it is needed halves in this time. A guess: agents and chats go on within minutes, or
/// after hours.
const HALF_LIFE: Duration = Duration::from_secs(20 * 60);

/// The most doublings of what a byte saves that count, either way.
const MAX_DOUBLINGS: i32 = 2;

/// How far clocks of file systems and processes may differ.
const CLOCK_ERROR: Duration = Duration::from_secs(3_600);

const LONGEST_SHIFT: Duration = HALF_LIFE.saturating_mul(MAX_DOUBLINGS.unsigned_abs());

/// The latest time that a file can have now. A later one is that of a wrong clock.
pub(crate) fn latest_time(now: SystemTime) -> SystemTime {
    now + CLOCK_ERROR + LONGEST_SHIFT
}

/// The time of a file whose worth is noted next: neither its worth nor its place in a prompt gives it an earlier one.
pub(crate) fn earliest_time(now: SystemTime) -> SystemTime {
    now - CLOCK_ERROR - LONGEST_SHIFT
}

/// The time of a file that was used then and whose bytes save `saved` each, so that the order of times is that of worths: with twice
/// the savings it counts as used [`HALF_LIFE`] later. Whole doublings, since a label is longer or shorter by chance.
pub(crate) fn time_of_worth(used: SystemTime, saved: f64) -> SystemTime {
    let doublings = (saved.log2().round() as i32).clamp(-MAX_DOUBLINGS, MAX_DOUBLINGS);
    let shift = HALF_LIFE * doublings.unsigned_abs();
    if doublings < 0 { used - shift } else { used + shift }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn twice_the_savings_outweigh_a_half_life_without_use() {
        let now = SystemTime::now();
        let check = |saved: f64, n_half_lives: i32| {
            let shift = HALF_LIFE * n_half_lives.unsigned_abs();
            let expected = if n_half_lives < 0 { now - shift } else { now + shift };
            assert_eq!(time_of_worth(now, saved), expected, "{saved}");
        };
        [(1.0, 0), (0.9, 0), (0.5, -1), (3.0, 2), (1e9, 2), (0.0, -2), (f64::NAN, 0)]
            .iter()
            .for_each(|(s, n)| check(*s, *n));
    }
}

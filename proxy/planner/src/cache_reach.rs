//! Estimates an upstream's cache: the tokens that it can compute before it forgets a prompt's beginning. Learned from the beginnings
//! that it had, and from those that it should have had.

/// A part of a prompt's beginning that was sent to an upstream before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixRun {
    /// Tokens of the prompt up to the end of this part.
    pub n_tokens: u32,
    /// Tokens that were sent there since its last use.
    pub distance: u64,
}

/// Tokens at a prompt's end that a server may compute again although it has them.
const TOLERATED: u32 = 80;

/// The reach of a cache, in tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CacheReach(f64);

impl Default for CacheReach {
    /// All of it, until something was missing.
    fn default() -> CacheReach {
        CacheReach(f64::INFINITY)
    }
}

impl CacheReach {
    /// Tokens at the start of a prompt that are probably cached, of the parts that were sent there before.
    pub fn held(&self, runs: &[PrefixRun]) -> u32 {
        runs.iter().take_while(|run| (run.distance as f64) < self.0).last().map_or(0, |run| run.n_tokens)
    }

    /// Learns from a prompt with these parts, of which `n_had` tokens were cached.
    pub fn learn(&mut self, runs: &[PrefixRun], n_had: u32) {
        for run in runs {
            let distance = run.distance as f64;
            if n_had.saturating_add(TOLERATED) >= run.n_tokens {
                self.0 = self.0.max(distance + 1.0);
                continue;
            }
            // Between the two, since one prompt may have met a restart.
            if distance < self.0 {
                self.0 = if self.0.is_finite() { (self.0 * distance.max(1.0)).sqrt() } else { distance };
            }
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNS: [PrefixRun; 2] =
        [PrefixRun { n_tokens: 1_000, distance: 500 }, PrefixRun { n_tokens: 5_000, distance: 90_000 }];

    #[test]
    fn what_was_forgotten_is_not_counted_on_and_what_is_had_again_is() {
        let mut reach = CacheReach::default();
        assert_eq!(reach.held(&RUNS), 5_000);
        (0..8).for_each(|_| reach.learn(&RUNS, 1_000));
        assert_eq!(reach.held(&RUNS), 1_000, "{reach:?}");
        reach.learn(&RUNS, 4_930);
        assert_eq!(reach.held(&RUNS), 5_000, "the last tokens are computed anyway");
        assert_eq!(reach.held(&[]), 0);
    }
}

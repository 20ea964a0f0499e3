//! How many prompt tokens one step may carry.
//!
//! A step is one `llama_decode`, and every running stream waits for it. So beside streams a step's prefill is bounded by
//! time, through the rate measured in such steps, and not by a batch size that is 10 ms on one machine and 8 s on another. With
//! nobody waiting it is a full physical batch: what is computed, and so how llama.cpp rounds, is then a function of the
//! prompt alone and not of how fast the machine happened to be.

use std::time::Duration;

/// What a step may take while streams are running: the gap a reader still perceives as a steady flow.
const STEP_WITH_STREAMS: Duration = Duration::from_millis(100);

/// Before a rate is known: small enough for a slow CPU, large enough to measure by.
const UNMEASURED: usize = 64;

/// A step smaller than this pays more for launching than for computing.
pub(super) const MIN_TOKENS: usize = 16;

/// Prompt tokens per step.
#[derive(Debug, Clone, Copy)]
pub(super) struct PrefillBudget {
    /// Set by the operator for steps with running streams; else from the measured rate.
    pub(super) fixed: Option<usize>,
    /// The engine's physical batch: no step is larger.
    pub(super) n_ubatch: usize,
}

impl PrefillBudget {
    /// Prompt tokens for a step beside `n_streams` decoding sequences, at a rate in prompt tokens per second of a step
    /// (0 if not measured yet).
    pub(super) fn tokens(&self, n_streams: usize, tps: f64) -> usize {
        match self.fixed {
            _ if n_streams == 0 => self.n_ubatch,
            Some(fixed) => fixed.min(self.n_ubatch),
            None if tps <= 0.0 => UNMEASURED.min(self.n_ubatch),
            None => {
                let affordable = (tps * STEP_WITH_STREAMS.as_secs_f64()) as usize;
                // Multiples of 16 keep the matrix kernels on full tiles.
                let tiles = affordable / MIN_TOKENS * MIN_TOKENS;
                tiles.clamp(MIN_TOKENS.min(self.n_ubatch), self.n_ubatch)
            }
        }
    }

    /// The next chunk of a prompt with `n_left` tokens still to be computed, on an engine that takes part in handoffs.
    /// Chunks get smaller toward the end, because what a decode node waits for after the last token is the last chunk's
    /// export, wire and import. Beside other prompts (`n_prompts` in all) each further chunk waits for theirs, too, which
    /// costs more: what fits into an equal share of the step is then one chunk.
    pub(super) fn taper(&self, n_left: usize, n_prompts: usize) -> usize {
        if n_prompts > 1 && n_left <= self.n_ubatch / n_prompts {
            return n_left;
        }
        let half = (n_left / 2).next_multiple_of(MIN_TOKENS);
        half.max(LAST_CHUNK).min(self.n_ubatch).min(n_left)
    }
}

/// Smaller chunks would save less on the wire than they cost in compute.
const LAST_CHUNK: usize = 64;

/// Splits a step's budget over the sequences that are prefilling, given what each still needs. Equal shares; what a
/// short prompt leaves over goes to the longer ones, so a short prompt never waits for a long one.
pub(super) fn share(budget: usize, needs: &[usize]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..needs.len()).collect();
    order.sort_by_key(|&i| needs[i]);
    let mut shares = vec![0; needs.len()];
    let mut left = budget;
    for (n_before, &i) in order.iter().enumerate() {
        let equal = left / (needs.len() - n_before);
        shares[i] = needs[i].min(equal.max(1)).min(left);
        left -= shares[i];
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_bounded_by_time_and_by_the_batch() {
        let auto = PrefillBudget { fixed: None, n_ubatch: 512 };
        assert_eq!(auto.tokens(0, 0.0), 512);
        assert_eq!(auto.tokens(0, 250.0), 512);
        assert_eq!(auto.tokens(1, 0.0), 64);
        assert_eq!(auto.tokens(3, 250.0), 16);
        assert_eq!(auto.tokens(3, 1_000.0), 96);
        assert_eq!(auto.tokens(0, 1e6), 512);
        let fixed = PrefillBudget { fixed: Some(64), n_ubatch: 512 };
        assert_eq!(fixed.tokens(1, 1e6), 64);
        assert_eq!(fixed.tokens(0, 1e6), 512);
        assert_eq!(PrefillBudget { fixed: None, n_ubatch: 8 }.tokens(1, 1.0), 8);
    }

    #[test]
    fn chunks_taper_toward_the_end_and_cover_the_prompt() {
        let budget = PrefillBudget { fixed: None, n_ubatch: 512 };
        let mut n_left = 1999;
        let mut chunks = Vec::new();
        while n_left > 0 {
            chunks.push(budget.taper(n_left, 1));
            n_left -= chunks[chunks.len() - 1];
        }
        assert_eq!(chunks, [512, 512, 496, 240, 128, 64, 47]);
        assert_eq!([budget.taper(199, 1), budget.taper(199, 2), budget.taper(257, 2)], [112, 199, 128]);
        assert_eq!(PrefillBudget { fixed: None, n_ubatch: 32 }.taper(1000, 1), 32);
    }

    #[test]
    fn short_prompts_get_what_they_need_and_long_ones_the_rest() {
        let check = |budget, needs: &[usize], expected: &[usize]| assert_eq!(share(budget, needs), expected);
        check(100, &[8000, 20], &[80, 20]);
        check(100, &[8000, 8000], &[50, 50]);
        check(100, &[10, 10], &[10, 10]);
        check(2, &[5, 5, 5], &[1, 1, 0]);
        check(100, &[], &[]);
    }
}

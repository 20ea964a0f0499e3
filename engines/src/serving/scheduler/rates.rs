//! The cost of steps: the rates of prefill and decoding, and each sequence's share of a step's time.

use std::time::Duration;

use super::super::context::ModelContext;
use super::super::step_budget::MIN_TOKENS;
use super::super::vectors::Vectors;
use super::{BatchPart, Scheduler};

/// Weight of the newest measurement in a moving average.
const RATE_WEIGHT: f64 = 0.2;

/// Adds a measurement to a rate; 0 if none was measured yet.
pub(super) fn learn(rate: &mut f64, new: f64) {
    *rate = if *rate > 0.0 { *rate + RATE_WEIGHT * (new - *rate) } else { new };
}

impl<C: ModelContext, V: Vectors> Scheduler<C, V> {
    /// The number of sequences that decode in the next step.
    pub(super) fn n_decoding(&self) -> usize {
        (0..self.slots.len()).filter(|&slot| self.can_step(slot) && self.missing_prefill(slot) == 0).count()
    }

    /// Returns true if a sequence decodes in the next step.
    pub(super) fn decodes(&self) -> bool {
        self.n_decoding() > 0
    }

    /// The most prompt tokens of the next step, in which `n_decoding` sequences decode and these slots are prefilled.
    pub(super) fn prompt_tokens(&mut self, n_decoding: usize, prefilling: &[usize]) -> usize {
        let Some(n_before) = prefilling.iter().map(|&slot| self.slots[slot].kv.len()).max() else { return 0 };
        let (budget, n_streams) = (self.limits.budget.behind(n_before), n_decoding + self.n_held());
        budget.tokens(n_streams, || self.shared_steps.next_tokens(n_decoding, self.prefill_tps))
    }

    /// The rate at which the next step computes prompts, in tokens per second; 0 if none was measured.
    pub(super) fn next_tps(&self) -> f64 {
        // Without streams, a step computes at the prefill's own rate.
        let n_decoding = Some(self.n_decoding()).filter(|n| *n > 0);
        n_decoding.and_then(|n| self.shared_steps.tps(n)).unwrap_or(self.prefill_tps)
    }

    /// Divides a step's time among its prompts in proportion to their tokens, and counts the sequences that share it.
    pub(super) fn account(&mut self, parts: &[BatchPart], took: Duration) {
        let n_tokens: usize = parts.iter().map(|part| part.n_tokens).sum();
        let n_decoding = parts.iter().filter(|part| part.logits_at.is_some()).count() as u64;
        for part in parts {
            let is_new = self.missing(part.slot) == 0;
            let Some(sequence) = &mut self.running[part.slot] else { continue };
            match part.logits_at {
                Some(_) if is_new => sequence.n_shared_steps += n_decoding,
                Some(_) => {}
                None => sequence.compute += took.mul_f64(part.n_tokens as f64 / n_tokens.max(1) as f64),
            }
        }
    }

    /// Updates the rates. The two rates in the node's load come from steps with only prefill or only decoding, because
    /// a mixed step shows neither of them.
    ///
    /// `n_accepted`: with drafts, the sequences got so many tokens more than one each.
    pub(super) fn learn_rates(&mut self, parts: &[BatchPart], n_accepted: usize, took: Duration) {
        let n_decoded = parts.iter().filter(|p| p.logits_at.is_some()).count();
        let n_prefilled: usize = parts.iter().filter(|p| p.logits_at.is_none()).map(|p| p.n_tokens).sum();
        let per_second = |n: usize| n as f64 / took.as_secs_f64().max(1e-6);
        // A step with few tokens measures the cost of launching and not the rate.
        if n_decoded == 0 && n_prefilled >= MIN_TOKENS {
            learn(&mut self.prefill_tps, per_second(n_prefilled));
        } else if n_prefilled == 0 && n_decoded > 0 {
            learn(&mut self.decode_tps, per_second(n_decoded + n_accepted) / n_decoded as f64);
        } else if n_decoded > 0 {
            self.shared_steps.learn(n_prefilled, parts.iter().map(|p| p.n_tokens).sum(), took);
        }
    }
}

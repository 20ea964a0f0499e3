//! Draws the next token of a sequence from its logits.

use std::time::Instant;

use baton_schemas::sequence::{FinishReason, GeneratedToken};

use super::super::context::ModelContext;
use super::super::sampler::{logprobs, peak};
use super::super::vectors::Vectors;
use super::Scheduler;

impl<C: ModelContext, V: Vectors> Scheduler<C, V> {
    /// Draws a slot's next token. Finishes the sequence if it was the last.
    pub(super) fn sample(&mut self, slot: usize, logits_at: usize) {
        let Some(sequence) = &mut self.running[slot] else { return };
        let logits = self.context.logits(logits_at);
        let Some(peak) = peak(logits) else { return self.fail_not_finite(slot) };
        let id = match sequence.sampler.sample(logits, peak, sequence.tokens.len()) {
            Ok(id) => id,
            Err(none) => {
                sequence.send(Err(none.error(sequence.request.constraint.as_deref())));
                self.release(slot);
                return;
            }
        };
        let now = Instant::now();
        sequence.first_token.get_or_insert(now);
        sequence.last_token = Some(now);
        let is_end = self.vocabulary.is_end_of_generation(id);
        if is_end && !sequence.request.reports_end {
            return self.finish(slot, FinishReason::Stop);
        }
        let vocabulary = &self.vocabulary;
        let top_logprobs = sequence.request.top_logprobs;
        let logprobs = top_logprobs.map(|k| logprobs(logits, peak.logit, id, k as usize, |t| vocabulary.piece(t)));
        let event = GeneratedToken { id, bytes: vocabulary.piece(id), special: vocabulary.is_control(id), logprobs };
        sequence.tokens.push(id);
        sequence.n_generated += 1;
        sequence.keep_drawn(event);
        if is_end || sequence.sampler.is_complete() {
            self.finish(slot, FinishReason::Stop);
        } else if sequence.at_limit(self.limits.n_ctx) {
            self.finish(slot, FinishReason::Length);
        }
    }
}

//! Draws the next token of a sequence from its logits, once its mask is known.

use std::time::Instant;

use baton_model::vocabulary::Vocabulary;
use baton_schemas::EngineError;
use baton_schemas::sequence::{FinishReason, GeneratedToken};

use super::super::context::ModelContext;
use super::super::sampler::{Peak, logprobs, peak};
use super::super::sequence::{HeldLogits, Sequence};
use super::super::vectors::Vectors;
use super::Scheduler;

impl<C: ModelContext, V: Vectors> Scheduler<C, V> {
    /// Draws a slot's next token. Finishes the sequence if it was the last. If its mask is not known yet, the sequence keeps
    /// the logits and sits out steps until [`Scheduler::draw_held`].
    pub(super) fn sample(&mut self, slot: usize, logits_at: usize) {
        let Some(sequence) = &mut self.running[slot] else { return };
        let logits = self.context.logits(logits_at);
        let Some(peak) = peak(logits) else { return self.fail_not_finite(slot) };
        if !sequence.sampler.is_ready() {
            sequence.held = Some(HeldLogits { logits: logits.to_vec(), peak });
            return;
        }
        let outcome = draw(sequence, logits, peak, &self.vocabulary, self.limits.n_ctx);
        self.take_outcome(slot, outcome);
    }

    /// Returns true if a slot's sequence waits for a mask, or for whether its last permitted token has completed the text.
    pub(super) fn awaits_mask(&self, slot: usize) -> bool {
        self.running[slot].as_ref().is_some_and(|sequence| sequence.awaits_mask(self.limits.n_ctx))
    }

    /// The sequences that wait for a mask with their logits. They wait for the end of each step, as those in it.
    pub(super) fn n_held(&self) -> usize {
        self.running.iter().flatten().filter(|sequence| sequence.held.is_some()).count()
    }

    /// Draws the tokens whose masks have become known, and finishes sequences whose text has turned out to be complete.
    pub(super) fn draw_held(&mut self) {
        for slot in 0..self.slots.len() {
            let Some(sequence) = &mut self.running[slot] else { continue };
            if !sequence.sampler.is_ready() {
                continue;
            }
            if let Some(HeldLogits { logits, peak }) = sequence.held.take() {
                let outcome = draw(sequence, &logits, peak, &self.vocabulary, self.limits.n_ctx);
                sequence.send_drawn();
                self.take_outcome(slot, outcome);
            } else if sequence.sampler.is_complete() {
                self.finish(slot, FinishReason::Stop);
            }
        }
    }

    /// Sends what readers have room for again.
    pub(super) fn send_scored(&mut self) {
        self.running.iter_mut().flatten().for_each(Sequence::send_scored);
    }

    fn take_outcome(&mut self, slot: usize, outcome: Result<Option<FinishReason>, EngineError>) {
        match outcome {
            Ok(None) => {}
            Ok(Some(reason)) => self.finish(slot, reason),
            Err(error) => {
                if let Some(mut sequence) = self.release(slot) {
                    sequence.send(Err(error));
                }
            }
        }
    }
}

/// Draws a token, which is sent later, unless the text has turned out to be complete. Returns the reason if it was the last.
/// Errors: no token satisfies the constraint.
fn draw(
    sequence: &mut Sequence,
    logits: &[f32],
    peak: Peak,
    vocabulary: &Vocabulary,
    n_ctx: usize,
) -> Result<Option<FinishReason>, EngineError> {
    if sequence.sampler.is_complete() {
        return Ok(Some(FinishReason::Stop));
    }
    let id = sequence.sampler.sample(logits, peak, sequence.tokens.len());
    let id = id.map_err(|none| none.error(sequence.request.constraint.as_deref()))?;
    #[cfg(test)]
    check_drawn(sequence, id, (logits, peak), vocabulary);
    let now = Instant::now();
    sequence.first_token.get_or_insert(now);
    sequence.last_token = Some(now);
    let is_end = vocabulary.is_end_of_generation(id);
    if is_end && !sequence.request.reports_end {
        return Ok(Some(FinishReason::Stop));
    }
    let top_logprobs = sequence.request.top_logprobs;
    let logprobs = top_logprobs.map(|k| logprobs(logits, peak.logit, id, k as usize, |t| vocabulary.piece(t)));
    let event =
        GeneratedToken { id, bytes: vocabulary.piece(id), special: vocabulary.is_control(id), logprobs, drafts: None };
    sequence.tokens.push(id);
    sequence.n_generated += 1;
    sequence.keep_drawn(event);
    let is_over = sequence.at_limit(n_ctx) && !sequence.sampler.may_be_complete();
    Ok(match is_end || sequence.sampler.is_complete() {
        true => Some(FinishReason::Stop),
        false => is_over.then_some(FinishReason::Length),
    })
}

/// A sampler that knows only the tokens before it draws the same one: nothing of guesses, of a wait for a mask or of a preemption is left in
/// the sequence's own.
#[cfg(test)]
fn check_drawn(
    sequence: &Sequence,
    drawn: baton_schemas::Token,
    (logits, peak): (&[f32], Peak),
    vocabulary: &Vocabulary,
) {
    if !sequence.sampler.is_constrained() {
        let position = sequence.tokens.len();
        let again = sequence.sampler_anew(vocabulary).sample(logits, peak, position);
        assert_eq!(again.ok(), Some(drawn), "after {position} tokens");
    }
}

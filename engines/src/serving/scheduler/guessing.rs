//! Guesses that take time: those of a draft model or of the model's own head, and candidates of a draft node that are awaited.

use std::time::{Duration, Instant};

use super::super::context::ModelContext;
use super::super::drafting::batch_drafter::BatchDrafter;
use super::super::drafting::costs::MAX_STREAMS;
use super::super::drafting::draft_model::{FollowedSequence, WantedDraft};
use super::super::drafting::prediction_head::NewRows;
use super::super::sequence::Sequence;
use super::super::vectors::Vectors;
use super::speculating::{followed, is_text, row_seconds};
use super::{BatchPart, Scheduler, Speculating};

impl<C: ModelContext, V: Vectors> Scheduler<C, V> {
    /// Waits for so many candidates of each part's draft node, which should take `expected` seconds. It takes at most twice as long,
    /// and no longer than a step.
    pub(super) fn await_candidates(&mut self, parts: &[BatchPart], lengths: &[usize], expected: f64) {
        let Some(speculating) = self.speculating.as_mut().filter(|it| it.guesser.is_none()) else { return };
        if lengths.iter().all(|n| *n == 0) {
            return;
        }
        let began = Instant::now();
        let most = (2.0 * expected).min(speculating.costs.step_seconds(parts.len())).max(0.0);
        let until = began + Duration::try_from_secs_f64(most).unwrap_or_default();
        for (part, n) in parts.iter().zip(lengths).filter(|(_, n)| **n > 0) {
            if let Some(Sequence { drafting: Some(drafting), tokens, .. }) = &mut self.running[part.slot] {
                drafting.wait_for_remote(*n, until);
                drafting.offer(tokens, &speculating.chances, |token| is_text(&self.vocabulary, token));
            }
        }
        speculating.drafting = began.elapsed();
    }

    /// Lets the guesser guess so many tokens for each part.
    pub(super) fn guess(&mut self, parts: &[BatchPart], lengths: &[usize]) {
        let Some(Speculating { guesser: Some(guesser), chances, drafting, .. }) = &mut self.speculating else { return };
        let began = Instant::now();
        let mut wanted = Vec::with_capacity(parts.len());
        for (slot, sequence) in self.running.iter_mut().enumerate() {
            let n = parts.iter().zip(lengths).find(|(part, _)| part.slot == slot).map_or(0, |(_, n)| *n);
            if let Some(Sequence { tokens, sampler, request, .. }) = sequence.as_mut().filter(|_| n > 0) {
                let of = FollowedSequence { slot, tokens, scope: request.cache_scope };
                wanted.push(WantedDraft { of, n, sampler });
            }
        }
        if wanted.is_empty() {
            return;
        }
        let drafts = guesser.draft(&mut wanted);
        let slots: Vec<usize> = wanted.iter().map(|one| one.of.slot).collect();
        for (slot, draft) in slots.into_iter().zip(drafts) {
            if let Some(Sequence { drafting: Some(drafting), tokens, .. }) = &mut self.running[slot] {
                drafting.give(&draft);
                drafting.offer(tokens, chances, |token| is_text(&self.vocabulary, token));
            }
        }
        *drafting = began.elapsed();
    }

    /// Lets the guesser catch up with a step's sequences, where that may pay. The step took `took`.
    pub(super) fn catch_up(&mut self, parts: &[BatchPart], took: Duration) {
        let Some(speculating) = &mut self.speculating else { return };
        let (n_streams, row_seconds) = (parts.len().min(MAX_STREAMS), row_seconds(self.prefill_tps));
        let followed_by = |part: &BatchPart| {
            let sequence = self.running[part.slot].as_ref()?;
            let wish = sequence.drafting.as_ref()?.wish(&speculating.chances);
            speculating.may_pay(wish, n_streams, row_seconds).then(|| followed(part.slot, sequence))
        };
        let sequences: Vec<FollowedSequence<'_>> = parts.iter().filter_map(followed_by).collect();
        if let Some(guesser) = &mut speculating.guesser {
            guesser.catch_up(&sequences, took);
        }
    }

    /// Takes a slot's tokens out of the guesser.
    pub(super) fn forget_guesses(&mut self, slot: usize) {
        if let Some(Speculating { guesser: Some(guesser), .. }) = &mut self.speculating {
            guesser.forget(slot);
        }
    }

    /// Shows the model's own head the hidden rows of the tokens that a step has computed and that stay.
    pub(super) fn note_hidden(&mut self, parts: &[BatchPart]) {
        let Some(Speculating { guesser: Some(BatchDrafter::Head(head)), .. }) = &mut self.speculating else { return };
        for part in parts {
            let (Some(sequence), Some(row)) = (&self.running[part.slot], self.batch.get(part.first_at)) else {
                continue;
            };
            if sequence.drafting.is_none() || !sequence.images.is_empty() {
                continue;
            }
            let first = row.position as usize;
            let n = self.slots[part.slot].kv.len().saturating_sub(first).min(part.n_tokens + part.draft.len());
            let rows = NewRows { slot: part.slot, scope: sequence.request.cache_scope, first, n };
            head.note(rows, |i, values| values.extend_from_slice(self.context.hidden(part.first_at + i)));
        }
    }

    /// How long the last step's drafts took.
    pub(super) fn drafting_time(&self) -> Duration {
        self.speculating.as_ref().map_or(Duration::ZERO, |speculating| speculating.drafting)
    }
}

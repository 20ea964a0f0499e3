//! Verifies drafts in the steps of decoding sequences.
//!
//! A sequence's row is followed by those of its draft, and each row's logits are sampled as in a step of its own, as long as
//! the tokens that are drawn are those of the draft: the draws depend on the seed and the position alone. KV behind the last
//! token that was right is removed before the next step. Steps that compute prompts have no drafts.

use std::time::{Duration, Instant};

use baton_schemas::image::is_placeholder;
use baton_schemas::{SequenceRequest, Token};

use super::super::context::ModelContext;
use super::super::drafting::costs::{DraftOffer, MAX_STREAMS, StepCosts};
use super::super::drafting::{Drafting, MAX_DRAFT, SharedChances};
use super::super::sequence::Sequence;
use super::super::slots;
use super::super::vectors::Vectors;
use super::{BatchPart, MIN_ROOM, Scheduler};

/// How long a step waits at most for masks of tokens that were right, all of them together. Without a mask, the rest of a
/// draft cannot be drawn, and is computed again.
pub(super) const MASKS_WAIT: Duration = Duration::from_millis(1);

/// What an engine that drafts has measured.
#[derive(Default)]
pub(crate) struct Speculating {
    costs: StepCosts,
    chances: SharedChances,
    /// Verifies as much of each draft as there is, up to so many tokens.
    #[cfg(test)]
    fixed: Option<usize>,
}

impl Speculating {
    #[cfg(test)]
    pub(super) fn fixed(n: usize) -> Speculating {
        Speculating { fixed: Some(n), ..Speculating::default() }
    }

    fn lengths(&mut self, offers: &[DraftOffer], n_max: usize, row_seconds: f64) -> Vec<usize> {
        #[cfg(test)]
        if let Some(fixed) = self.fixed {
            let mut left = n_max;
            let take = |offer: &DraftOffer| {
                let n = offer.n.min(fixed).min(left);
                left -= n;
                n
            };
            return offers.iter().map(take).collect();
        }
        self.costs.lengths(offers, n_max, row_seconds, 0.0)
    }
}

impl<C: ModelContext, V: Vectors> Scheduler<C, V> {
    /// The same scheduler, which verifies drafts. `None`: each step draws one token of a sequence.
    pub(crate) fn with_speculation(self, speculating: Option<Speculating>) -> Self {
        Scheduler { speculating, ..self }
    }

    /// Gives a new sequence its drafters, if it is to generate. Measurements are to show the model's own speed.
    pub(super) fn begin_drafting(&self, sequence: &mut Sequence) {
        let SequenceRequest { max_tokens, gives_way, .. } = sequence.request;
        if self.speculating.is_some() && max_tokens != Some(0) && !gives_way {
            sequence.drafting = Some(Drafting::new(&sequence.request));
        }
    }

    /// Adds drafts to the parts of a step, as many as promise to be worth their rows. They never take a cell that another
    /// sequence has, and stay in one physical batch: in a sliding window, the next one might overwrite what the first tokens
    /// of a refused draft attend to.
    pub(super) fn add_drafts(&mut self, parts: &mut [BatchPart]) {
        let Some(speculating) = &mut self.speculating else { return };
        for part in &*parts {
            if let Some(Sequence { drafting: Some(drafting), tokens, .. }) = &mut self.running[part.slot] {
                drafting.follow(tokens, &mut speculating.chances);
            }
        }
        if parts.len() > MAX_STREAMS || parts.iter().any(|part| part.logits_at.is_none()) {
            return;
        }
        let in_use = slots::cells_in_use(&self.slots) + parts.len();
        let n_free = self.limits.n_cells.saturating_sub(in_use);
        let n_max = self.limits.budget.n_ubatch.saturating_sub(parts.len()).min(n_free);
        let n_tokens = self.vocabulary.n_tokens();
        let is_text = |token: Token| {
            !is_placeholder(token) && (token as usize) < n_tokens && !self.vocabulary.is_end_of_generation(token)
        };
        let offers = parts.iter().map(|part| {
            let n_kv = self.slots[part.slot].kv.len();
            let Some(sequence) = &mut self.running[part.slot] else { return DraftOffer::NONE };
            let n_most = draft_limit(sequence, n_kv, self.limits.n_ctx);
            let Sequence { drafting: Some(drafting), tokens, .. } = sequence else { return DraftOffer::NONE };
            if n_most == 0 {
                return DraftOffer::NONE;
            }
            let offer = drafting.offer(tokens, &speculating.chances, is_text);
            DraftOffer { n: offer.n.min(n_most), ..offer }
        });
        let offers: Vec<DraftOffer> = offers.collect();
        let row_seconds = row_seconds(self.prefill_tps);
        let lengths = speculating.lengths(&offers, n_max, row_seconds);
        for (part, n) in parts.iter_mut().zip(lengths) {
            if let Some(Sequence { drafting: Some(drafting), .. }) = self.running[part.slot].as_mut().filter(|_| n > 0)
            {
                part.draft = drafting.take(n);
            }
        }
    }

    /// Takes the drafts out of parts that could not be computed, and what may be left of them in the slots. Returns `None` if
    /// they had none.
    pub(super) fn without_drafts(&mut self, parts: &[BatchPart]) -> Option<Vec<BatchPart>> {
        if parts.iter().all(|part| part.draft.is_empty()) {
            return None;
        }
        let again = parts.iter().filter(|part| self.restore(part.slot));
        Some(again.map(|part| BatchPart { draft: Vec::new(), ..*part }).collect())
    }

    /// Draws the tokens of a part: its next one, and one after each token of its draft that was right. The step has
    /// `n_streams` parts, and may wait for cheap masks until `masks_until`. Returns how many of the draft were right.
    pub(super) fn sample_part(&mut self, part: &BatchPart, n_streams: usize, masks_until: Instant) -> usize {
        let slot = part.slot;
        // The token after a replayed one is known.
        let Some(at) = part.logits_at.filter(|_| self.missing(slot) == 0) else { return 0 };
        self.sample(slot, at);
        let mut n_right = 0;
        for &token in &part.draft {
            if !self.goes_on_with(slot, token, n_streams, masks_until) {
                break;
            }
            n_right += 1;
            self.slots[slot].kv.push(token);
            self.sample(slot, at + n_right);
        }
        if n_right < part.draft.len() && self.context.cut(slot, self.slots[slot].kv.len()).is_err() {
            tracing::warn!(slot, "a refused draft cannot be removed; the sequence's KV is computed again");
            self.forget(slot);
        }
        n_right
    }

    /// Returns true if a slot's sequence has just drawn `token`, and its next one can be drawn, too.
    fn goes_on_with(&mut self, slot: usize, token: Token, n_streams: usize, masks_until: Instant) -> bool {
        let n_kv = self.slots[slot].kv.len();
        let Some(sequence) = &mut self.running[slot] else { return false };
        if sequence.held.is_some() || sequence.tokens.get(n_kv..) != Some(&[token][..]) {
            return false;
        }
        sequence.n_shared_steps += n_streams as u64;
        sequence.drafting.iter_mut().for_each(Drafting::count_right);
        sequence.sampler.wait(masks_until);
        true
    }

    /// Learns from a step what rows cost, if it computed no prompts.
    pub(super) fn learn_costs(&mut self, parts: &[BatchPart], took: Duration) {
        let row_seconds = row_seconds(self.prefill_tps);
        if let Some(speculating) = self.speculating.as_mut().filter(|_| parts.iter().all(|p| p.logits_at.is_some())) {
            let n_extra = parts.iter().map(|part| part.draft.len()).sum();
            speculating.costs.learn(parts.len(), n_extra, took.as_secs_f64(), row_seconds);
        }
    }
}

/// The seconds that a row of a prompt takes; 0 if no rate is known yet.
fn row_seconds(prefill_tps: f64) -> f64 {
    if prefill_tps > 0.0 { 1.0 / prefill_tps } else { 0.0 }
}

/// The longest draft for a sequence whose slot has `n_kv` tokens. A reader gets every token that may be drawn, and the end. No
/// draft goes beyond the last token, and a sequence at fault for a refused batch gets none.
fn draft_limit(sequence: &Sequence, n_kv: usize, n_ctx: usize) -> usize {
    let decodes = n_kv + 1 == sequence.tokens.len() && sequence.refused.is_none();
    let n_left =
        sequence.request.max_tokens.map_or(usize::MAX, |n| (n as usize).saturating_sub(sequence.n_after_prompt()));
    let n_left = n_left.min(n_ctx.saturating_sub(sequence.tokens.len())).saturating_sub(1);
    let room = sequence.events.capacity().saturating_sub(MIN_ROOM);
    if decodes { MAX_DRAFT.min(n_left).min(room) } else { 0 }
}

//! Verifies drafts in the steps of decoding sequences.
//!
//! A sequence's row is followed by those of its draft, and each row's logits are sampled as in a step of its own, as long as
//! the tokens that are drawn are those of the draft: the draws depend on the seed and the position alone. KV behind the last
//! token that was right is removed before the next step. Steps that compute prompts have no drafts.

use std::sync::Once;
use std::time::{Duration, Instant};

use baton_link::drafts::DraftPace;
use baton_model::vocabulary::Vocabulary;
use baton_schemas::image::is_placeholder;
use baton_schemas::{SequenceRequest, Token};

use super::super::context::ModelContext;
use super::super::drafting::batch_drafter::BatchDrafter;
use super::super::drafting::costs::{ChosenPlan, DraftOffer, DraftPlan, DraftedStep, MAX_STREAMS, StepCosts};
use super::super::drafting::draft_model::FollowedSequence;
use super::super::drafting::remote::{DraftNodes, RemoteDrafter};
use super::super::drafting::{Drafting, MAX_DRAFT, SharedChances};
use super::super::sequence::Sequence;
use super::super::slots;
use super::super::vectors::Vectors;
use super::{BatchPart, MIN_ROOM, Scheduler};

/// How long a step waits at most for masks of tokens that were right, all of them together. Without a mask, the rest of a
/// draft cannot be drawn, and is computed again.
pub(super) const MASKS_WAIT: Duration = Duration::from_millis(1);

/// What an engine that drafts has measured.
pub(crate) struct Speculating<C: ModelContext> {
    pub(super) costs: StepCosts,
    pub(super) chances: SharedChances,
    pub(super) guesser: Option<BatchDrafter<C>>,
    /// How draft nodes are called, if they can be.
    draft_nodes: Option<DraftNodes>,
    /// How long the guesser took for the last step's drafts.
    pub(super) drafting: Duration,
    /// Verifies as much of each draft as there is, up to so many tokens.
    #[cfg(test)]
    fixed: Option<usize>,
}

impl<C: ModelContext> Speculating<C> {
    /// `guesser` guesses, too, where that promises to be worth its passes.
    pub(crate) fn new(guesser: Option<BatchDrafter<C>>) -> Self {
        Speculating {
            costs: StepCosts::default(),
            chances: SharedChances::default(),
            guesser,
            draft_nodes: None,
            drafting: Duration::ZERO,
            #[cfg(test)]
            fixed: None,
        }
    }

    /// The same with draft nodes, which guess where nothing on this machine does.
    pub(crate) fn with_draft_nodes(self, draft_nodes: Option<DraftNodes>) -> Self {
        Speculating { draft_nodes, ..self }
    }

    #[cfg(test)]
    pub(super) fn fixed(n: usize) -> Self {
        Speculating { fixed: Some(n), ..Speculating::new(None) }
    }

    #[cfg(test)]
    pub(super) fn fixed_by(n: usize, guesser: BatchDrafter<C>) -> Self {
        let guesser = match guesser {
            BatchDrafter::Model(model) => BatchDrafter::Model(model.at_any_cost()),
            head @ BatchDrafter::Head(_) => head,
        };
        Speculating { fixed: Some(n), ..Speculating::new(Some(guesser)) }
    }

    #[cfg(test)]
    pub(super) fn guesser(&mut self) -> &mut BatchDrafter<C> {
        self.guesser.as_mut().unwrap()
    }

    fn choose(&mut self, plans: &[DraftPlan<'_>], n_max: usize, row_seconds: f64) -> ChosenPlan {
        #[cfg(test)]
        if let Some(fixed) = self.fixed {
            let mut left = n_max;
            let take = |offer: &DraftOffer| {
                let n = offer.n.min(fixed).min(left);
                left -= n;
                n
            };
            let plan = plans.len() - 1;
            return ChosenPlan { plan, lengths: plans[plan].offers.iter().map(take).collect() };
        }
        self.costs.choose(plans, n_max, row_seconds)
    }

    /// What there is for a sequence at no cost, and the better of that and what the guesser, or its draft node, may guess, at most
    /// `n_most` tokens.
    fn offers(
        &self,
        (slot, sequence): (usize, &mut Sequence),
        n_most: usize,
        is_text: impl Fn(Token) -> bool,
    ) -> [DraftOffer; 2] {
        let Some(drafting) = sequence.drafting.as_mut().filter(|_| n_most > 0) else { return [DraftOffer::NONE; 2] };
        let bounded = |offer: DraftOffer, n: usize| DraftOffer { n: offer.n.min(n), ..offer };
        let free = bounded(drafting.offer(&sequence.tokens, &self.chances, is_text), n_most);
        let wish = match &self.guesser {
            None => drafting.wish_of_remote(&self.chances).map_or(DraftOffer::NONE, |(wish, _)| wish),
            Some(guesser) => match drafting.wish(&self.chances) {
                wish if wish.n > 0 => bounded(wish, guesser.most(followed(slot, sequence))),
                none => none,
            },
        };
        let wish = bounded(wish, n_most);
        // More of a draft node's candidates may come than are there.
        let goes_on = self.guesser.is_none() && wish.first >= free.first;
        let is_better = wish.n > 0 && (free.n == 0 || wish.first > free.first || goes_on);
        [free, if is_better { wish } else { free }]
    }

    /// Returns true if it may pay that the guesser follows a sequence, one of `n_streams`.
    pub(super) fn may_pay(&self, wish: DraftOffer, n_streams: usize, row_seconds: f64) -> bool {
        #[cfg(test)]
        if self.fixed.is_some() {
            return wish.n > 0;
        }
        let pass_seconds = self.pass_seconds(n_streams);
        wish.n > 0 && self.costs.may_pay(wish, n_streams, row_seconds, pass_seconds)
    }

    /// What is to be paid for guesses: the seconds until the first ones, and for each token of the longest draft.
    fn guess_seconds<'s>(
        &self,
        sequences: impl Iterator<Item = (usize, &'s Sequence)>,
        n_streams: usize,
    ) -> (f64, f64) {
        if let Some(guesser) = &self.guesser {
            let behind = sequences.map(|(slot, sequence)| guesser.catch_up_seconds(followed(slot, sequence)));
            return (behind.sum(), self.pass_seconds(n_streams));
        }
        let paces = sequences.filter_map(|(_, sequence)| sequence.drafting.as_ref()?.wish_of_remote(&self.chances));
        let seconds = paces.map(|(_, DraftPace { n_ready, next_in, interval })| {
            // The candidates that are there cost nothing.
            let interval = interval.as_secs_f64();
            ((next_in.as_secs_f64() - interval * (n_ready + 1) as f64).max(0.0), interval)
        });
        // All are awaited together.
        seconds.fold((0.0, 0.0), |(delay, pass), (next_in, interval)| (delay.max(next_in), pass.max(interval)))
    }

    fn pass_seconds(&self, n_streams: usize) -> f64 {
        let step_seconds = self.costs.step_seconds(n_streams);
        self.guesser.as_ref().map_or(0.0, |guesser| guesser.pass_seconds(step_seconds))
    }
}

/// A slot's sequence, as the guesser follows it.
pub(super) fn followed(slot: usize, sequence: &Sequence) -> FollowedSequence<'_> {
    FollowedSequence { slot, tokens: &sequence.tokens, scope: sequence.request.cache_scope }
}

impl<C: ModelContext, V: Vectors> Scheduler<C, V> {
    /// The same scheduler, which verifies drafts. `None`: each step draws one token of a sequence.
    pub(crate) fn with_speculation(self, speculating: Option<Speculating<C>>) -> Self {
        Scheduler { speculating, ..self }
    }

    /// Gives a new sequence its drafters, if it is to generate. Measurements are to show the model's own speed. How much of a
    /// draft is verified follows from times, so it is not the same the next time, and the rows of a batch change its rounding.
    pub(super) fn begin_drafting(&self, sequence: &mut Sequence) {
        let SequenceRequest { max_tokens, gives_way, ref sampling, ref draft_source, .. } = sequence.request;
        if draft_source.is_some() {
            self.tell_unused_draft_node();
        }
        let is_wanted = max_tokens != Some(0) && !gives_way && !sampling.repeatable;
        if let Some(speculating) = self.speculating.as_ref().filter(|_| is_wanted) {
            // None sees images.
            let sees_all = sequence.images.is_empty();
            let guesser = speculating.guesser.as_ref().filter(|_| sees_all).map(BatchDrafter::kind);
            let nodes = speculating.draft_nodes.as_ref().filter(|_| sees_all && speculating.guesser.is_none());
            let remote = nodes.and_then(|nodes| RemoteDrafter::of(&sequence.request, nodes));
            sequence.drafting = Some(Drafting::new(&sequence.request, guesser).with_remote(remote));
        }
    }

    /// Says once in a process, for each reason, if no draft node is asked for this model.
    fn tell_unused_draft_node(&self) {
        static TOLD_OFF: Once = Once::new();
        static TOLD_OWN: Once = Once::new();
        match &self.speculating {
            None => TOLD_OFF.call_once(|| {
                tracing::warn!(
                    "no draft node is asked, because this model is served without speculation. A model with states needs speculation = \"auto\""
                );
            }),
            Some(Speculating { guesser: Some(_), .. }) => TOLD_OWN.call_once(|| {
                tracing::warn!("no draft node is asked, because this model has a draft model or a head of its own");
            }),
            Some(_) => {}
        }
    }

    /// Adds drafts to the parts of a step, as many as promise to be worth their rows. They never take a cell that another
    /// sequence has, and stay in one physical batch: in a sliding window, the next one might overwrite what the first tokens
    /// of a refused draft attend to.
    pub(super) fn add_drafts(&mut self, parts: &mut [BatchPart]) {
        let Some(speculating) = &mut self.speculating else { return };
        speculating.drafting = Duration::ZERO;
        for part in &*parts {
            if let Some(Sequence { drafting: Some(drafting), tokens, .. }) = &mut self.running[part.slot] {
                drafting.follow(tokens, &mut speculating.chances);
            }
        }
        if parts.len() > MAX_STREAMS {
            let slots = parts.iter().map(|part| part.slot);
            return slots.for_each(|slot| {
                if let Some(Sequence { drafting: Some(drafting), .. }) = &mut self.running[slot] {
                    drafting.decided(0);
                }
            });
        }
        if parts.iter().any(|part| part.logits_at.is_none()) {
            return;
        }
        let in_use = slots::cells_in_use(&self.slots) + parts.len();
        let n_free = self.limits.n_cells.saturating_sub(in_use);
        let n_max = self.limits.budget.n_ubatch.saturating_sub(parts.len()).min(n_free);
        let is_text = |token| is_text(&self.vocabulary, token);
        let max_rollback = self.context.max_rollback();
        let offers = parts.iter().map(|part| {
            let n_kv = self.slots[part.slot].kv.len();
            let Some(sequence) = &mut self.running[part.slot] else { return [DraftOffer::NONE; 2] };
            let n_most = draft_limit(sequence, n_kv, self.limits.n_ctx).min(max_rollback);
            let saved = sequence.drafting.as_ref().map_or(0.0, |drafting| drafting.saved);
            let offers = speculating.offers((part.slot, sequence), n_most, is_text);
            offers.map(|offer| DraftOffer { saved, ..offer })
        });
        let (mut free, mut guessed): (Vec<DraftOffer>, Vec<DraftOffer>) =
            offers.map(|[free, guessed]| (free, guessed)).unzip();
        if self.limits.has_states {
            [&mut free, &mut guessed].into_iter().for_each(|offers| even(offers, |offer| &mut offer.n));
        }
        let asked = parts.iter().zip(&guessed).filter(|(_, offer)| offer.takes_passes);
        let asked = asked.filter_map(|(part, _)| Some((part.slot, self.running[part.slot].as_ref()?)));
        let (delay_seconds, pass_seconds) = speculating.guess_seconds(asked, parts.len());
        let with_guesses = DraftPlan { offers: &guessed, delay_seconds, pass_seconds };
        let plans = [DraftPlan::at_no_cost(&free), with_guesses];
        let n_plans = if guessed.iter().any(|offer| offer.takes_passes) { 2 } else { 1 };
        let ChosenPlan { plan, mut lengths } =
            speculating.choose(&plans[..n_plans], n_max, row_seconds(self.prefill_tps));
        if self.limits.has_states {
            even(&mut lengths, |length| length);
        }
        let asked = lengths.iter().zip(plans[plan].offers).map(|(n, offer)| if offer.takes_passes { *n } else { 0 });
        let asked: Vec<usize> = asked.collect();
        let longest = asked.iter().copied().max().unwrap_or(0);
        self.await_candidates(parts, &asked, delay_seconds + pass_seconds * longest as f64);
        self.guess(parts, &asked);
        if self.limits.has_states {
            // A guesser may have guessed fewer.
            for (part, length) in parts.iter().zip(&mut lengths) {
                let drafting = self.running[part.slot].as_ref().and_then(|sequence| sequence.drafting.as_ref());
                *length = drafting.map_or(0, |drafting| drafting.n_ready().min(*length));
            }
            even(&mut lengths, |length| length);
        }
        for (part, n) in parts.iter_mut().zip(lengths) {
            if let Some(Sequence { drafting: Some(drafting), .. }) = &mut self.running[part.slot] {
                drafting.decided(n);
                part.draft = drafting.take(n);
            }
        }
    }

    /// Computes parts without the drafts with which they were refused. Returns false if they had none. A sequence that lost states
    /// with the batch computes them again, and gets no further drafts.
    pub(super) fn compute_without_drafts(&mut self, parts: &[BatchPart]) -> bool {
        if parts.iter().all(|part| part.draft.is_empty()) {
            return false;
        }
        let mut again = Vec::with_capacity(parts.len());
        for part in parts {
            let refused = self.running[part.slot].as_mut().filter(|_| !part.draft.is_empty());
            if let Some(Sequence { drafting: Some(drafting), .. }) = refused {
                drafting.refused(part.draft.len());
            }
            if self.restore(part.slot) {
                again.push(BatchPart { draft: Vec::new(), ..*part });
            } else if let Some(Sequence { drafting: Some(drafting), .. }) = &mut self.running[part.slot] {
                drafting.stop();
            }
        }
        if !again.is_empty() {
            self.compute(again);
        }
        true
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
        if n_right < part.draft.len() && self.context.take_back(slot, self.slots[slot].kv.len()).is_err() {
            tracing::warn!(
                slot,
                "a refused draft cannot be removed; the sequence's KV is computed again, without further guesses"
            );
            self.forget(slot);
            if let Some(Sequence { drafting: Some(drafting), .. }) = &mut self.running[slot] {
                drafting.stop();
            }
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

    /// Learns from a step what rows cost, and what came of its drafts, if it computed no prompts. `n_right` has a number for each part.
    pub(super) fn learn_costs(&mut self, parts: &[BatchPart], took: Duration, n_right: &[usize]) {
        let row_seconds = row_seconds(self.prefill_tps);
        if let Some(speculating) = self.speculating.as_mut().filter(|_| parts.iter().all(|p| p.logits_at.is_some())) {
            let n_extra = parts.iter().map(|part| part.draft.len()).sum();
            let (n_streams, seconds) = (parts.len(), took.as_secs_f64());
            speculating.costs.learn(n_streams, n_extra, seconds, row_seconds);
            let drafting_seconds = speculating.drafting.as_secs_f64();
            for (part, n_right) in parts.iter().zip(n_right).filter(|_| n_extra > 0) {
                if let Some(Sequence { drafting: Some(drafting), .. }) = &mut self.running[part.slot] {
                    let seconds = seconds + drafting_seconds;
                    speculating.costs.add_saved(&mut drafting.saved, n_streams, 1 + n_right, seconds);
                }
            }
            let n_right = n_right.iter().sum();
            speculating.costs.settle(DraftedStep { n_streams, n_extra, n_right, seconds, drafting_seconds });
        }
    }
}

/// Gives all the smallest number of any. Tokens are taken back only from the states of sequences with equally many rows, and
/// llama.cpp reads all weights again for others.
fn even<T>(all: &mut [T], number: impl Fn(&mut T) -> &mut usize) {
    let least = all.iter_mut().map(|one| *number(one)).min().unwrap_or(0);
    all.iter_mut().for_each(|one| *number(one) = least);
}

/// Returns true for a token that a draft may have.
pub(super) fn is_text(vocabulary: &Vocabulary, token: Token) -> bool {
    !is_placeholder(token) && (token as usize) < vocabulary.n_tokens() && !vocabulary.is_end_of_generation(token)
}

/// The seconds that a row of a prompt takes; 0 if no rate is known yet.
pub(super) fn row_seconds(prefill_tps: f64) -> f64 {
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

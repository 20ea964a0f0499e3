//! A smaller model of the same vocabulary, which guesses for several sequences together.
//!
//! Its context has a slot for each of the scheduler's, and follows the tokens of these. It guesses what it would draw itself: with the
//! request's settings, and with the random number of the position, which is the target's, too. So where both models agree on
//! the probabilities they draw the same token, at any temperature. A guess may be wrong in every way, so whatever fails here
//! costs only guesses.

use std::time::{Duration, Instant};

use baton_schemas::draft::DrafterKind;
use baton_schemas::{CacheScope, Token};

use super::super::context::{BatchToken, ComputeError, ModelContext};
use super::super::sampler::{Sampler, peak};
use super::super::slots::common_prefix;
use super::catching_up::{CatchingUp, LEAST_ROWS, learn};
use super::drafter::{Confidence, Drafter};
use super::rows::slots_without_rows;

/// A sequence's guesses are wanted only if it lacks at most so many tokens here, which the first pass computes, too.
const MOST_BEHIND: usize = 64;

/// Drafts with a model. See the module.
pub(crate) struct DraftModel<C> {
    context: C,
    slots: Vec<DraftSlot>,
    limits: DraftLimits,
    /// Seconds of a pass with one row for each sequence; 0 if not measured.
    pass_seconds: f64,
    catching_up: CatchingUp,
    batch: Vec<BatchToken>,
}

/// The bounds of a draft model's context.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DraftLimits {
    pub(crate) n_slots: usize,
    /// Tokens of one sequence.
    pub(crate) n_ctx: usize,
    /// Cells for all sequences together.
    pub(crate) n_cells: usize,
    /// Tokens of a batch.
    pub(crate) n_batch: usize,
    /// Its weights, as a share of the target's: what a pass is taken to cost before one was measured.
    pub(crate) share_of_target: f64,
}

/// The tokens of a slot whose KV is in the context.
#[derive(Debug, Clone, Default)]
struct DraftSlot {
    tokens: Vec<Token>,
    /// The callers that may see, by its speed, that it is there.
    scope: CacheScope,
}

/// A sequence in a slot.
#[derive(Clone, Copy)]
pub(crate) struct FollowedSequence<'s> {
    pub(crate) slot: usize,
    pub(crate) tokens: &'s [Token],
    pub(crate) scope: CacheScope,
}

/// A sequence for which `n` tokens are wanted, and what draws its tokens.
pub(crate) struct WantedDraft<'s> {
    pub(crate) of: FollowedSequence<'s>,
    pub(crate) n: usize,
    pub(crate) sampler: &'s mut Sampler,
}

impl<C: ModelContext> DraftModel<C> {
    pub(crate) fn new(context: C, limits: DraftLimits) -> Self {
        DraftModel {
            context,
            slots: vec![DraftSlot::default(); limits.n_slots],
            limits,
            pass_seconds: 0.0,
            catching_up: CatchingUp::default(),
            batch: Vec::new(),
        }
    }

    /// The seconds of a pass, if a step of the target without drafts takes `step_seconds`.
    pub(crate) fn pass_seconds(&self, step_seconds: f64) -> f64 {
        if self.pass_seconds > 0.0 { self.pass_seconds } else { self.limits.share_of_target * step_seconds }
    }

    /// The most tokens that it can guess for a sequence now.
    pub(crate) fn most(&self, of: FollowedSequence<'_>) -> usize {
        if self.n_behind(of) > MOST_BEHIND { 0 } else { self.limits.n_ctx.saturating_sub(of.tokens.len()) }
    }

    /// Seconds that the first guess for a sequence takes longer than a pass, because of the tokens that are missing here.
    pub(crate) fn catch_up_seconds(&self, of: FollowedSequence<'_>) -> f64 {
        self.catching_up.seconds(self.n_behind(of).saturating_sub(1))
    }

    fn n_behind(&self, of: FollowedSequence<'_>) -> usize {
        of.tokens.len().saturating_sub(self.n_common(of))
    }

    fn n_common(&self, of: FollowedSequence<'_>) -> usize {
        match &self.slots[of.slot] {
            DraftSlot { tokens, scope } if *scope == of.scope => common_prefix(tokens, of.tokens),
            _ => 0,
        }
    }

    /// Computes some of the tokens that sequences have and this context lacks, after a step that took `step`.
    pub(crate) fn catch_up(&mut self, sequences: &[FollowedSequence<'_>], step: Duration) {
        self.catching_up.earn(step.as_secs_f64());
        let mut n_left = self.catching_up.n_rows().min(self.limits.n_batch);
        self.batch.clear();
        for of in sequences {
            // The last token is computed with the first guess.
            let end = of.tokens.len().saturating_sub(1).min(self.limits.n_ctx);
            let n_missing = end.saturating_sub(self.n_common(*of));
            let n = n_left.min(n_missing);
            if n_missing < LEAST_ROWS || n == 0 {
                continue;
            }
            let from = self.begin(*of);
            self.push(of.slot, from, &of.tokens[from..from + n], false);
            n_left -= n;
        }
        let (n_rows, began) = (self.batch.len(), Instant::now());
        if n_rows > 0 {
            // One that fails took its time, too.
            if self.compute().is_ok() {
                self.context.synchronize();
            }
            self.catching_up.spend(n_rows, began.elapsed().as_secs_f64());
        }
    }

    /// Guesses tokens for each sequence, one for each of them in a pass. A draft may be shorter than wanted.
    pub(crate) fn draft(&mut self, wanted: &mut [WantedDraft<'_>]) -> Vec<Vec<Token>> {
        let mut drafts: Vec<Vec<Token>> = wanted.iter().map(|one| Vec::with_capacity(one.n)).collect();
        let longest = wanted.iter().map(|one| one.n).max().unwrap_or(0);
        for n_made in 0..longest {
            if self.pass(wanted, &mut drafts, n_made).is_err() {
                break;
            }
        }
        drafts
    }

    /// Guesses a token more for each sequence that has `n_made` of them and wants more.
    fn pass(
        &mut self,
        wanted: &mut [WantedDraft<'_>],
        drafts: &mut [Vec<Token>],
        n_made: usize,
    ) -> Result<(), ComputeError> {
        let began = Instant::now();
        self.batch.clear();
        let mut rows = Vec::with_capacity(wanted.len());
        // The rest of one sequence leaves room for the others, and is computed by the next steps.
        let n_most = (self.limits.n_batch / wanted.len().max(1)).max(1);
        for (i, WantedDraft { of, n, .. }) in wanted.iter().enumerate() {
            if *n <= n_made || drafts[i].len() < n_made {
                continue;
            }
            match drafts[i].last() {
                None => {
                    let from = self.begin(*of);
                    let missing = &of.tokens[from..];
                    let n = missing.len().min(n_most);
                    self.push(of.slot, from, &missing[..n], n == missing.len());
                    if n < missing.len() {
                        continue;
                    }
                }
                Some(&guess) => self.push(of.slot, self.slots[of.slot].tokens.len(), &[guess], true),
            }
            rows.push((i, self.batch.len() - 1));
        }
        if self.batch.is_empty() {
            return Ok(());
        }
        self.compute()?;
        for &(i, row) in &rows {
            let logits = self.context.logits(row);
            let Some(peak) = peak(logits) else {
                tracing::warn!("the draft model's logits are not numbers; its cache is overwritten");
                self.forget_all();
                return Err(ComputeError::Refused("its logits are not numbers".into()));
            };
            let position = wanted[i].of.tokens.len() + n_made;
            drafts[i].extend(wanted[i].sampler.guess(logits, peak, position));
        }
        if self.batch.len() == rows.len() {
            learn(&mut self.pass_seconds, began.elapsed().as_secs_f64());
        }
        Ok(())
    }

    /// Nothing of a slot stays.
    pub(crate) fn forget(&mut self, slot: usize) {
        self.slots[slot].tokens.clear();
        // It never fails for a whole slot.
        let _ = self.context.cut(slot, 0);
    }

    fn forget_all(&mut self) {
        self.context.overwrite();
        self.slots.iter_mut().for_each(|slot| slot.tokens.clear());
    }

    /// Cuts a slot to what its sequence begins with, less the last token. Returns the number of tokens that are left.
    fn begin(&mut self, of: FollowedSequence<'_>) -> usize {
        let n_keep = self.n_common(of).min(of.tokens.len().saturating_sub(1));
        self.slots[of.slot].scope = of.scope;
        if n_keep < self.slots[of.slot].tokens.len() {
            self.slots[of.slot].tokens.truncate(n_keep);
            if self.context.cut(of.slot, n_keep).is_err() {
                self.forget(of.slot);
            }
        }
        self.slots[of.slot].tokens.len()
    }

    fn push(&mut self, slot: usize, from: usize, tokens: &[Token], wants_logits: bool) {
        let n = tokens.len();
        self.batch.extend(tokens.iter().enumerate().map(|(i, &token)| BatchToken {
            token,
            position: (from + i) as u32,
            slot: slot as u32,
            wants_logits: wants_logits && i + 1 == n,
        }));
    }

    /// Computes the batch. Slots without a row in it lose their KV if there are no cells for it.
    fn compute(&mut self) -> Result<(), ComputeError> {
        if !self.has_room() {
            let idle = slots_without_rows(&self.batch, self.slots.len());
            idle.into_iter().for_each(|slot| self.forget(slot));
        }
        if self.batch.len() > self.limits.n_batch || !self.has_room() {
            return Err(ComputeError::NoCells);
        }
        self.context.compute(&self.batch).inspect_err(|error| {
            tracing::warn!(%error, "the draft model cannot compute; its cache is emptied");
            self.forget_all();
        })?;
        for row in &self.batch {
            self.slots[row.slot as usize].tokens.push(row.token);
        }
        Ok(())
    }

    fn has_room(&self) -> bool {
        let n_present: usize = self.slots.iter().map(|slot| slot.tokens.len()).sum();
        n_present + self.batch.len() <= self.limits.n_cells
    }

    /// The same model, which catches up at once, whatever that costs.
    #[cfg(test)]
    pub(crate) fn at_any_cost(self) -> Self {
        DraftModel { catching_up: CatchingUp::at_any_cost(), ..self }
    }

    #[cfg(test)]
    pub(crate) fn tokens(&self, slot: usize) -> &[Token] {
        &self.slots[slot].tokens
    }

    #[cfg(test)]
    pub(crate) fn context(&mut self) -> &mut C {
        &mut self.context
    }
}

/// A sequence's part of what guesses for several of them: the tokens that were guessed for it.
pub(crate) struct GuessedTokens {
    kind: DrafterKind,
    given: Vec<Token>,
    n_followed: usize,
}

impl GuessedTokens {
    pub(super) fn of(kind: DrafterKind) -> Self {
        GuessedTokens { kind, given: Vec::new(), n_followed: 0 }
    }
}

impl Drafter for GuessedTokens {
    fn kind(&self) -> DrafterKind {
        self.kind
    }

    fn follow(&mut self, tokens: &[Token]) {
        if tokens.len() != self.n_followed {
            (self.given, self.n_followed) = (Vec::new(), tokens.len());
        }
    }

    fn give(&mut self, tokens: &[Token]) {
        self.given = tokens.to_vec();
    }

    fn draft(&mut self, _: &[Token], n_max: usize, draft: &mut Vec<Token>) -> Confidence {
        draft.extend(self.given.drain(..).take(n_max));
        Confidence::OF_MODEL
    }
}

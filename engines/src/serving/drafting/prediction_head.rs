//! The model's own head ("MTP", "nextn"), which predicts the token after the next one.
//!
//! The head is one more layer. Of each token it takes the token itself and the hidden row with which the model predicted it, and
//! it has KV of its own. Its guess and its own hidden row give the guess after that one. Of a prompt it sees only the newest
//! tokens, whose hidden rows are kept until it is asked: guesses need no more, and the rows of a long prompt would take much
//! memory. It guesses as a draft model does ([`super::draft_model`]): with the request's settings and the position's random
//! number. Whatever fails here costs only guesses.

use std::time::Instant;

use baton_schemas::{CacheScope, Token};

use super::super::context::{BatchToken, ComputeError, PredictionHead};
use super::super::sampler::peak;
use super::super::slots::common_prefix;
use super::catching_up::learn;
use super::draft_model::{DraftLimits, FollowedSequence, WantedDraft};
use super::rows::slots_without_rows;

/// The newest hidden rows of a slot that are kept. The head attends to as many tokens of a prompt.
const KEPT_ROWS: usize = 128;

/// Drafts with the model's own head. See the module.
pub(crate) struct HeadDrafts<H> {
    head: H,
    slots: Vec<HeadSlot>,
    limits: DraftLimits,
    /// Seconds of a pass with one row for each sequence; 0 if not measured.
    pass_seconds: f64,
    batch: Vec<BatchToken>,
    hidden: Vec<f32>,
}

#[derive(Debug, Clone, Default)]
struct HeadSlot {
    /// The callers that may see, by its speed, what is here.
    scope: CacheScope,
    /// The position of the first token in the head's cache.
    first: usize,
    /// The tokens in the head's cache.
    tokens: Vec<Token>,
    kept: KeptRows,
}

/// The model's hidden rows of a slot's newest tokens.
#[derive(Debug, Clone, Default)]
struct KeptRows {
    /// The position of the first one.
    first: usize,
    n: usize,
    values: Vec<f32>,
}

impl KeptRows {
    fn end(&self) -> usize {
        self.first + self.n
    }

    fn clear(&mut self, first: usize) {
        (self.first, self.n) = (first, 0);
        self.values.clear();
    }
}

/// The hidden rows of a slot's tokens that a step has computed and that stay.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewRows {
    pub(crate) slot: usize,
    pub(crate) scope: CacheScope,
    /// The position of the first token.
    pub(crate) first: usize,
    pub(crate) n: usize,
}

impl<H: PredictionHead> HeadDrafts<H> {
    pub(crate) fn new(head: H, limits: DraftLimits) -> Self {
        let slots = vec![HeadSlot::default(); limits.n_slots];
        HeadDrafts { head, slots, limits, pass_seconds: 0.0, batch: Vec::new(), hidden: Vec::new() }
    }

    /// Keeps hidden rows. `add` appends the row of one of the tokens.
    pub(crate) fn note(&mut self, rows: NewRows, mut add: impl FnMut(usize, &mut Vec<f32>)) {
        let n_values = self.head.n_values();
        if self.slots[rows.slot].scope != rows.scope {
            self.forget(rows.slot);
            self.slots[rows.slot].scope = rows.scope;
        }
        let kept = &mut self.slots[rows.slot].kept;
        let n_skipped = rows.n.saturating_sub(KEPT_ROWS);
        if kept.end() != rows.first || n_skipped > 0 {
            kept.clear(rows.first + n_skipped);
        }
        for i in n_skipped..rows.n {
            add(i, &mut kept.values);
            kept.n += 1;
        }
        if kept.values.len() != kept.n * n_values {
            return kept.clear(rows.first + rows.n);
        }
        if kept.n > 2 * KEPT_ROWS {
            let n_dropped = kept.n - KEPT_ROWS;
            kept.values.drain(..n_dropped * n_values);
            (kept.first, kept.n) = (kept.first + n_dropped, KEPT_ROWS);
        }
    }

    /// The seconds of a pass, if a step of the model without drafts takes `step_seconds`.
    pub(crate) fn pass_seconds(&self, step_seconds: f64) -> f64 {
        if self.pass_seconds > 0.0 { self.pass_seconds } else { self.limits.share_of_target * step_seconds }
    }

    /// The most tokens that it can guess for a sequence now.
    pub(crate) fn most(&self, of: FollowedSequence<'_>) -> usize {
        if self.is_ready(of) { self.limits.n_ctx.saturating_sub(of.tokens.len()) } else { 0 }
    }

    /// Returns true if the hidden row of the token before the last one is there.
    fn is_ready(&self, of: FollowedSequence<'_>) -> bool {
        let HeadSlot { scope, kept, .. } = &self.slots[of.slot];
        *scope == of.scope && kept.n > 0 && kept.end() + 1 == of.tokens.len()
    }

    /// Guesses tokens for each sequence, one for each of them in a pass. A draft may be shorter than wanted.
    pub(crate) fn draft(&mut self, wanted: &mut [WantedDraft<'_>]) -> Vec<Vec<Token>> {
        let mut drafts: Vec<Vec<Token>> = wanted.iter().map(|one| Vec::with_capacity(one.n)).collect();
        let longest = wanted.iter().map(|one| one.n).max().unwrap_or(0);
        let (mut rows, mut computed) = (Vec::new(), Vec::new());
        for n_made in 0..longest {
            match self.pass(wanted, &mut drafts, n_made, &rows) {
                Ok(next) => rows = next,
                Err(error) => {
                    tracing::warn!(%error, "the model's own head cannot guess; its cache is emptied");
                    self.forget_all();
                    return drafts;
                }
            }
            if n_made == 0 {
                computed.clone_from(&rows);
            }
        }
        // KV of guesses came from hidden rows that were guessed, too.
        computed.iter().map(|(i, _)| wanted[*i].of).for_each(|of| self.head.cut(of.slot, of.tokens.len()));
        drafts
    }

    /// Guesses a token more for each sequence that has `n_made` of them and wants more. `rows`: their rows in the batch before.
    /// Returns those in this one.
    fn pass(
        &mut self,
        wanted: &mut [WantedDraft<'_>],
        drafts: &mut [Vec<Token>],
        n_made: usize,
        rows: &[(usize, usize)],
    ) -> Result<Vec<(usize, usize)>, ComputeError> {
        let began = Instant::now();
        self.batch.clear();
        self.hidden.clear();
        let mut next = Vec::with_capacity(wanted.len());
        if n_made == 0 {
            let n_most = (self.limits.n_batch / wanted.len().max(1)).max(1);
            for (i, WantedDraft { of, n, .. }) in wanted.iter().enumerate() {
                if *n > 0 && self.is_ready(*of) {
                    self.push_known(*of, n_most);
                    next.push((i, self.batch.len() - 1));
                }
            }
        }
        for &(i, row) in rows {
            if let (Some(&guess), true) = (drafts[i].last(), wanted[i].n > n_made && drafts[i].len() == n_made) {
                let (slot, position) = (wanted[i].of.slot as u32, (wanted[i].of.tokens.len() + n_made - 1) as u32);
                self.hidden.extend_from_slice(self.head.hidden(row));
                self.batch.push(BatchToken { token: guess, position, slot, wants_logits: true });
                next.push((i, self.batch.len() - 1));
            }
        }
        if next.is_empty() {
            return Ok(next);
        }
        self.compute(next.len() * n_made)?;
        for &(i, row) in &next {
            let logits = self.head.logits(row);
            let peak = peak(logits).ok_or_else(|| ComputeError::Refused("its logits are not numbers".into()))?;
            let position = wanted[i].of.tokens.len() + n_made;
            drafts[i].extend(wanted[i].sampler.guess(logits, peak, position));
        }
        if self.batch.len() == next.len() {
            learn(&mut self.pass_seconds, began.elapsed().as_secs_f64());
        }
        Ok(next)
    }

    /// Adds a sequence's tokens that the head's cache lacks, at most `n_most`. Where older ones are missing, it begins anew.
    fn push_known(&mut self, of: FollowedSequence<'_>, n_most: usize) {
        let (n, n_values) = (of.tokens.len(), self.head.n_values());
        let HeadSlot { first, tokens, kept, .. } = &mut self.slots[of.slot];
        let n_common = common_prefix(tokens, &of.tokens[(*first).min(n)..]);
        let (end, least) = ((*first + n_common).min(n - 1), (kept.first + 1).max(n.saturating_sub(n_most)));
        if tokens.is_empty() || end < *first || end < least {
            tokens.clear();
            *first = least;
            self.head.cut(of.slot, 0);
        } else if end < *first + tokens.len() {
            tokens.truncate(end - *first);
            self.head.cut(of.slot, end);
        }
        let from = *first + tokens.len();
        tokens.extend_from_slice(&of.tokens[from..]);
        for (position, token) in (from..).zip(&of.tokens[from..]) {
            let at = (position - 1 - kept.first) * n_values;
            self.hidden.extend_from_slice(&kept.values[at..at + n_values]);
            self.batch.push(BatchToken {
                token: *token,
                position: position as u32,
                slot: of.slot as u32,
                wants_logits: position + 1 == n,
            });
        }
    }

    /// Computes the batch beside the KV of `n_guessed` guesses. Slots without a row in it lose their KV if there are no cells for it.
    fn compute(&mut self, n_guessed: usize) -> Result<(), ComputeError> {
        let n_present = |slots: &[HeadSlot]| slots.iter().map(|slot| slot.tokens.len()).sum::<usize>() + n_guessed;
        if n_present(&self.slots) + self.batch.len() > self.limits.n_cells {
            for slot in slots_without_rows(&self.batch, self.slots.len()) {
                self.slots[slot].tokens.clear();
                self.head.cut(slot, 0);
            }
        }
        if n_present(&self.slots) > self.limits.n_cells {
            return Err(ComputeError::NoCells);
        }
        self.head.compute(&self.batch, &self.hidden)
    }

    /// Nothing of a slot stays.
    pub(crate) fn forget(&mut self, slot: usize) {
        self.slots[slot].tokens.clear();
        self.slots[slot].kept.clear(0);
        self.head.cut(slot, 0);
    }

    fn forget_all(&mut self) {
        (0..self.slots.len()).for_each(|slot| self.forget(slot));
    }

    #[cfg(test)]
    pub(crate) fn head(&mut self) -> &mut H {
        &mut self.head
    }
}

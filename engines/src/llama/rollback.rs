//! Takes back the last tokens of states, so that drafts can be verified.
//!
//! llama.cpp keeps the states before each of the last `n_rs_seq` tokens of a physical batch, and `seq_rm` of these tokens chooses
//! among them. It also accepts other removals, and then goes on with wrong states: of tokens of earlier batches, of more tokens
//! than the last one had, and where sequences have different numbers of rows. These are computed in several physical batches, and
//! a later one may move the newest states of a sequence without those before them. [`Rollbacks`] allows none of it. The choice
//! takes effect in the next batch of the sequence. Until then an export writes the right states, but a copy (`seq_cp`) has the
//! wrong ones.

use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::llama_batch::LlamaBatch;

use super::vocabulary::token;
use super::{checkpoint, transfer};
use crate::serving::context::{BatchToken, CannotCut};

/// The end of a slot, as far as its states can be taken back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum NewestRows {
    /// No token can be taken back.
    #[default]
    Fixed,
    /// The last batch had so many tokens of the slot, in one physical batch.
    Computed(u32),
    /// Some were taken back, and the slot has computed nothing since.
    TakenBack,
}

/// The tokens that can be taken back from each slot.
#[derive(Debug, Default)]
pub(super) struct Rollbacks {
    n_max: u32,
    /// Tokens of a physical batch.
    n_ubatch: u32,
    slots: Vec<NewestRows>,
}

impl Rollbacks {
    /// For a context that keeps the states before `n_max` tokens of each sequence, and computes `n_ubatch` tokens at once.
    pub(super) fn new(n_max: u32, n_ubatch: u32) -> Rollbacks {
        Rollbacks { n_max, n_ubatch, slots: Vec::new() }
    }

    /// The most tokens of a slot that can be taken back.
    pub(super) fn n_max(&self) -> u32 {
        self.n_max
    }

    /// A batch was computed.
    pub(super) fn computed(&mut self, batch: &[BatchToken]) {
        if self.n_max == 0 {
            return;
        }
        for rows in &mut self.slots {
            if matches!(rows, NewestRows::Computed(_)) {
                *rows = NewestRows::Fixed;
            }
        }
        let parts: Vec<&[BatchToken]> = batch.chunk_by(|a, b| a.slot == b.slot).collect();
        let n_rows = parts.first().map_or(0, |part| part.len());
        let is_one = batch.len() <= self.n_ubatch as usize && parts.iter().all(|part| part.len() == n_rows);
        let can_be_taken_back = is_one && n_rows <= self.n_max as usize + 1;
        let rows = if can_be_taken_back { NewestRows::Computed(n_rows as u32) } else { NewestRows::Fixed };
        parts.iter().for_each(|part| *self.of(part[0].slot as usize) = rows);
    }

    /// A slot has other states now.
    pub(super) fn replaced(&mut self, slot: usize) {
        *self.of(slot) = NewestRows::Fixed;
    }

    /// All slots are empty.
    pub(super) fn clear(&mut self) {
        self.slots.clear();
    }

    /// Takes back the positions of a slot from `end` on. Errors: they are not some of the last batch's.
    pub(super) fn take_back(&mut self, context: &mut LlamaContext<'_>, slot: usize, end: u32) -> Result<(), CannotCut> {
        let n_max = self.n_max;
        let rows = self.of(slot);
        let n_back = transfer::end_with_states(context, slot as u32).and_then(|last| last.checked_sub(end));
        match (&rows, n_back) {
            (NewestRows::Computed(n_rows), Some(n)) if (1..*n_rows).contains(&n) && n <= n_max => {}
            _ => return Err(CannotCut),
        }
        *rows = NewestRows::TakenBack;
        let removed = context.clear_kv_cache_seq(Some(slot as u32), Some(end), None).unwrap_or(false);
        let is_there = removed && transfer::end_with_states(context, slot as u32) == Some(end);
        is_there.then_some(()).ok_or(CannotCut)
    }

    /// Copies the states that a slot goes on with to where `seq_cp` finds them, if tokens were taken back. Returns false if that
    /// fails; then the slot is empty.
    pub(super) fn settle(&mut self, context: &mut LlamaContext<'_>, slot: usize) -> bool {
        if self.slots.get(slot) != Some(&NewestRows::TakenBack) {
            return true;
        }
        self.replaced(slot);
        let seq = slot as u32;
        let Some(end) = transfer::end_with_states(context, seq) else { return false };
        let copy = checkpoint::take(context, seq);
        copy.and_then(|copy| checkpoint::return_to(context, seq, end, &copy)).is_ok()
    }

    fn of(&mut self, slot: usize) -> &mut NewestRows {
        let n = self.slots.len().max(slot + 1);
        self.slots.resize(n, NewestRows::Fixed);
        &mut self.slots[slot]
    }
}

/// The sequence that is tried.
const SEQUENCE: u32 = 0;

/// Tokens before those that are taken back. So few that wrong states show.
const N_BEFORE: u32 = 4;

/// The largest divergence that is always taken for rounding, nats. Wrong states of tiny models diverge by 0.01 to 0.1, those of
/// trained ones by more.
const LEAST_BOUND: f64 = 1e-5;

/// Quantized weights round more. So the bound grows with what the same tokens diverge by in batches of other shapes,
const ROUNDINGS: f64 = 20.0;

/// up to this.
const MOST_BOUND: f64 = 5e-3;

/// How a context is tried could not be computed.
#[derive(Debug, thiserror::Error)]
#[error("a batch of {0} tokens cannot be computed")]
pub(super) struct NotComputed(usize);

/// Tries whether a context with `n_max` kept states takes one and `n_max` tokens back: whether it then predicts what it
/// predicts when it never had them. The context must be empty, and is empty again afterwards.
pub(super) fn works(ctx: &mut LlamaContext<'_>, n_vocab: u32, n_max: u32) -> Result<bool, NotComputed> {
    let mut probe = RollbackTrial { ctx, n_vocab };
    let outcome = probe.run(n_max);
    transfer::clear(probe.ctx, SEQUENCE);
    outcome
}

struct RollbackTrial<'p, 'm> {
    ctx: &'p mut LlamaContext<'m>,
    n_vocab: u32,
}

impl RollbackTrial<'_, '_> {
    fn run(&mut self, n_max: u32) -> Result<bool, NotComputed> {
        self.compute(0..N_BEFORE)?;
        self.compute(N_BEFORE..N_BEFORE + 1)?;
        let expected = self.next_prediction()?;
        transfer::clear(self.ctx, SEQUENCE);
        self.compute(0..N_BEFORE + 1)?;
        let rounding = divergence(&expected, &self.next_prediction()?).abs();
        let bound = (LEAST_BOUND + ROUNDINGS * rounding).min(MOST_BOUND);
        for n_back in [1, n_max] {
            transfer::clear(self.ctx, SEQUENCE);
            self.compute(0..N_BEFORE)?;
            self.compute(N_BEFORE..N_BEFORE + 1 + n_back)?;
            let removed = self.ctx.clear_kv_cache_seq(Some(SEQUENCE), Some(N_BEFORE + 1), None).unwrap_or(false);
            if !removed || transfer::end_with_states(self.ctx, SEQUENCE) != Some(N_BEFORE + 1) {
                return Ok(false);
            }
            let divergence = divergence(&expected, &self.next_prediction()?).abs();
            tracing::debug!(n_back, divergence, rounding, "tokens were taken back from the states");
            // They are no numbers if the logits are not.
            if !(0.0..=bound).contains(&divergence) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The log-probabilities after a token that follows the first ones.
    fn next_prediction(&mut self) -> Result<Vec<f64>, NotComputed> {
        // Another token than the one that was there.
        self.add(&[(N_BEFORE + 1, self.token(N_BEFORE + 100))], true)?;
        Ok(log_probabilities(self.ctx.get_logits_ith(0)))
    }

    fn compute(&mut self, positions: std::ops::Range<u32>) -> Result<(), NotComputed> {
        let tokens: Vec<(u32, u32)> = positions.map(|position| (position, self.token(position))).collect();
        self.add(&tokens, false)
    }

    fn token(&self, i: u32) -> u32 {
        (i * 7 + 3) % self.n_vocab.max(1)
    }

    fn add(&mut self, tokens: &[(u32, u32)], has_logits: bool) -> Result<(), NotComputed> {
        let failed = || NotComputed(tokens.len());
        let mut batch = LlamaBatch::new(tokens.len(), 1);
        for &(position, id) in tokens {
            let added = batch.add(token(id), position.cast_signed(), &[SEQUENCE.cast_signed()], has_logits);
            added.map_err(|_| failed())?;
        }
        self.ctx.decode(&mut batch).map_err(|_| failed())?;
        self.ctx.synchronize();
        Ok(())
    }
}

fn log_probabilities(logits: &[f32]) -> Vec<f64> {
    let peak = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let shifted = logits.iter().map(|logit| f64::from(logit - peak));
    let log_sum = shifted.clone().map(f64::exp).sum::<f64>().ln();
    shifted.map(|logit| logit - log_sum).collect()
}

/// The KL divergence in nats.
fn divergence(expected: &[f64], found: &[f64]) -> f64 {
    expected.iter().zip(found).map(|(p, q)| p.exp() * (p - q)).sum()
}

#[cfg(test)]
#[path = "rollback_tests.rs"]
mod tests;

//! The tokens with the largest logits, without sorting the vocabulary.

use toktrie::SimpleVob;

use super::candidate::{Candidate, sort_first};
use super::peak::{BLOCK, each, largest};

/// Fills `kept` with the `k` first of the `allowed` tokens, or of all, in their order.
pub(super) fn keep_top(logits: &[f32], allowed: Option<&SimpleVob>, k: usize, kept: &mut Vec<Candidate>) {
    kept.clear();
    if k == 0 {
        return;
    }
    let maxima = block_maxima(logits, allowed);
    let mut least = f32::NEG_INFINITY;
    if k < maxima.len() {
        // The maxima are logits, too: the k-th largest logit is at least the k-th largest of them.
        least = *maxima.clone().select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1;
    }
    add_from(logits, allowed, least, &maxima, kept);
    let n = k.min(kept.len());
    sort_first(kept, n);
    kept.truncate(n);
}

/// Fills `kept` with those of the `allowed` tokens, or of all, that min-p keeps.
pub(super) fn keep_likely(logits: &[f32], allowed: Option<&SimpleVob>, p: f32, kept: &mut Vec<Candidate>) {
    kept.clear();
    let maxima = block_maxima(logits, allowed);
    add_from(logits, allowed, least_likely(largest(&maxima), p), &maxima, kept);
}

/// The least logit that min-p keeps.
pub(super) fn least_likely(max: f32, p: f32) -> f32 {
    max + p.ln()
}

/// The largest logit of each block; under a mask, of each [`BLOCK`] allowed tokens.
fn block_maxima(logits: &[f32], allowed: Option<&SimpleVob>) -> Vec<f32> {
    if allowed.is_none() {
        return logits.chunks(BLOCK).map(largest).collect();
    }
    let mut maxima = Vec::new();
    let mut n = 0;
    let mut max = f32::NEG_INFINITY;
    each(logits, allowed, |_, logit| {
        max = max.max(logit);
        n += 1;
        if n == BLOCK {
            maxima.push(std::mem::replace(&mut max, f32::NEG_INFINITY));
            n = 0;
        }
    });
    if n > 0 {
        maxima.push(max);
    }
    maxima
}

/// Adds the tokens with at least this logit. Almost every block has none.
fn add_from(logits: &[f32], allowed: Option<&SimpleVob>, least: f32, maxima: &[f32], kept: &mut Vec<Candidate>) {
    let mut keep = |token: usize, logit: f32| {
        if logit >= least {
            kept.push(Candidate::new(token, logit));
        }
    };
    if allowed.is_some() {
        return each(logits, allowed, keep);
    }
    for (i, (block, max)) in logits.chunks(BLOCK).zip(maxima).enumerate() {
        if *max >= least {
            (i * BLOCK..).zip(block).for_each(|(token, &logit)| keep(token, logit));
        }
    }
}

//! Log-probabilities of tokens, from raw logits.

use baton_schemas::Token;
use baton_schemas::sequence::{Alternative, Logprobs};

use super::peak::{BLOCK, largest};

/// Log-probabilities of `chosen` and of the `k` most likely tokens. `max` is the largest logit.
pub(crate) fn logprobs(
    logits: &[f32],
    max: f32,
    chosen: Token,
    k: usize,
    bytes: impl Fn(Token) -> Vec<u8>,
) -> Logprobs {
    let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
    let log_sum = f64::from(max) + sum.ln();
    let logprob = |t: Token| (f64::from(logits[t as usize]) - log_sum) as f32;
    let top = most_likely(logits, k);
    Logprobs {
        chosen: logprob(chosen),
        rank: None,
        top: top.into_iter().map(|id| Alternative { id, bytes: bytes(id), logprob: logprob(id) }).collect(),
    }
}

/// The place of a token among all by likelihood, from 1; among equal ones, the first comes first.
pub(crate) fn rank(logits: &[f32], chosen: Token) -> u32 {
    let at = chosen as usize;
    let logit = logits[at];
    let likelier = |logits: &[f32]| logits.iter().filter(|&&other| other > logit).count();
    let equal_before = logits[..at].iter().filter(|&&other| other == logit).count();
    (likelier(logits) + equal_before + 1) as u32
}

/// The `k` tokens with the largest logits, the most likely first; among equal ones, the first.
fn most_likely(logits: &[f32], k: usize) -> Vec<Token> {
    let by_logit = |&a: &Token, &b: &Token| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b));
    let k = k.min(logits.len());
    if k == 0 {
        return Vec::new();
    }
    let mut kept: Vec<Token> = Vec::with_capacity(2 * k + BLOCK);
    // The smallest logit of k kept tokens. A later token with the same logit comes after them.
    let mut least: Option<f32> = None;
    for (i, block) in logits.chunks(BLOCK).enumerate() {
        if least.is_some_and(|least| largest(block) < least) {
            continue;
        }
        let better = block.iter().enumerate().filter(|(_, l)| least.is_none_or(|least| l.total_cmp(&least).is_gt()));
        kept.extend(better.map(|(at, _)| (i * BLOCK + at) as Token));
        if kept.len() >= 2 * k {
            kept.select_nth_unstable_by(k - 1, by_logit);
            kept.truncate(k);
            least = kept.last().map(|&t| logits[t as usize]);
        }
    }
    kept.sort_unstable_by(by_logit);
    kept.truncate(k);
    kept
}

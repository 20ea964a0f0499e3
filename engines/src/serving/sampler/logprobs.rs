//! Log-probabilities of tokens, from raw logits.

use baton_schemas::Token;
use baton_schemas::sequence::{Alternative, Logprobs};

use super::candidate::Candidate;
use super::top::keep_top;

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
    let mut top = Vec::new();
    keep_top(logits, None, k, &mut top);
    Logprobs {
        chosen: logprob(chosen),
        rank: None,
        top: top
            .into_iter()
            .map(|Candidate { token: id, .. }| Alternative { id, bytes: bytes(id), logprob: logprob(id) })
            .collect(),
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

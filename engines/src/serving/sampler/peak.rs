//! Passes over the logits of a whole vocabulary, in blocks that compile to vector instructions.

use baton_schemas::Token;
use toktrie::SimpleVob;

/// Logits that are compared at once. The largest one of a block decides if the block is looked at.
pub(super) const BLOCK: usize = 128;

/// Accumulators of a pass.
const LANES: usize = 8;

/// The largest logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Peak {
    /// The first token that has it.
    pub(crate) token: Token,
    pub(crate) logit: f32,
}

/// The largest logit, in one pass. `None` if the logits give no probabilities: one is NaN or +infinity, or none is
/// finite. A model may give a token no chance (-infinity).
pub(crate) fn peak(logits: &[f32]) -> Option<Peak> {
    let mut largest = f32::NEG_INFINITY;
    let mut at = 0;
    let mut are_fine = true;
    for (i, block) in logits.chunks(BLOCK).enumerate() {
        let (max, block_is_fine) = scan(block);
        are_fine &= block_is_fine;
        if max > largest {
            largest = max;
            at = i * BLOCK;
        }
    }
    let is_found = are_fine && largest > f32::NEG_INFINITY;
    is_found.then(|| Peak { token: (at + first_index(&logits[at..], largest)) as Token, logit: largest })
}

/// The first token with the largest logit; 0 without logits.
pub(crate) fn argmax(logits: &[f32]) -> Token {
    first_index(logits, largest(logits)) as Token
}

/// The first of the `allowed` tokens, or of all, that has the largest logit among them. `None` if there is none.
pub(super) fn first_largest(logits: &[f32], allowed: Option<&SimpleVob>) -> Option<Token> {
    if allowed.is_none() {
        return Some(argmax(logits));
    }
    let mut best: Option<usize> = None;
    each(logits, allowed, |token, logit| {
        if best.is_none_or(|best| logit > logits[best]) {
            best = Some(token);
        }
    });
    best.map(|token| token as Token)
}

/// Calls `take` with each of the `allowed` tokens, or of all, and its logit, in the order of the tokens.
pub(super) fn each(logits: &[f32], allowed: Option<&SimpleVob>, mut take: impl FnMut(usize, f32)) {
    match allowed {
        None => logits.iter().enumerate().for_each(|(token, &logit)| take(token, logit)),
        Some(allowed) => allowed.iter_set_entries(|token| {
            // The set may be larger than the vocabulary.
            if let Some(&logit) = logits.get(token) {
                take(token, logit);
            }
        }),
    }
}

/// The largest of some numbers. -infinity without any.
#[inline]
pub(super) fn largest(numbers: &[f32]) -> f32 {
    let mut max = [f32::NEG_INFINITY; LANES];
    let (rows, rest) = numbers.as_chunks::<LANES>();
    for row in rows {
        max = std::array::from_fn(|lane| if row[lane] > max[lane] { row[lane] } else { max[lane] });
    }
    let larger = |a: f32, b: &f32| if *b > a { *b } else { a };
    rest.iter().fold(max.iter().fold(f32::NEG_INFINITY, larger), larger)
}

/// The largest number, and true if all are less than +infinity. Two passes over a block in the first cache compile to
/// fewer instructions than one that does both.
#[inline]
fn scan(numbers: &[f32]) -> (f32, bool) {
    let max = largest(numbers);
    // NaN is less than nothing.
    let are_less = numbers.iter().fold(true, |are_less, number| are_less & (*number < f32::INFINITY));
    (max, are_less)
}

/// The index of the first number that equals `wanted`; 0 if none does.
fn first_index(numbers: &[f32], wanted: f32) -> usize {
    numbers.iter().position(|number| *number == wanted).unwrap_or(0)
}

//! Chooses the candidates of a draw without sorting the vocabulary.
//!
//! llama.cpp's samplers start from an array of the whole vocabulary. [`keep_candidates`] fills that array with only the
//! tokens that its first sampler would keep, in the same order, also among equal logits. The rest of the chain, and with
//! it the draw, then gives the same to the bit. Equal logits come in the order of libstdc++'s `std::partial_sort`; where
//! llama.cpp is built with libc++, as on macOS, equal logits at the cut may be other tokens.

use baton_schemas::Token;
use baton_schemas::generate::Sampling;
use toktrie::SimpleVob;

use super::candidate::Candidate;
use super::chain::{Candidates, MAX_HEAP, bucket, lowest_bucket};
use super::peak::{BLOCK, each_allowed, largest};
use super::sort::{make_heap, sink, sort_heap};

/// The first sampler that drops candidates.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Truncation {
    TopK(usize),
    MinP(f32),
    /// No sampler, or top-p, which needs the sum over all tokens.
    None,
}

impl Truncation {
    pub(super) fn of(sampling: &Sampling) -> Self {
        match sampling {
            Sampling { top_k, .. } if *top_k > 0 => Truncation::TopK(*top_k as usize),
            Sampling { top_p, .. } if *top_p < 1.0 => Truncation::None,
            Sampling { min_p, .. } if *min_p > 0.0 && *min_p <= 1.0 => Truncation::MinP(*min_p),
            _ => Truncation::None,
        }
    }
}

/// Fills `into` with the tokens, of the `allowed` ones or of all, that a draw can choose from.
pub(super) fn keep_candidates(
    truncation: Truncation,
    logits: &[f32],
    allowed: Option<&SimpleVob>,
    into: &mut Candidates,
) {
    into.is_sorted = false;
    into.all.clear();
    let tokens = Tokens { logits, allowed };
    let kept = &mut into.all;
    match truncation {
        Truncation::TopK(k) => {
            let k = k.min(tokens.count());
            if k <= MAX_HEAP {
                keep_top(&tokens, k, kept);
                into.is_sorted = true;
            } else {
                let lowest = lowest_bucket(tokens.logits().into_iter(), k);
                tokens.each(|token, logit| keep_if(kept, token, logit, bucket(logit) >= lowest));
            }
        }
        Truncation::MinP(p) => {
            // llama.cpp compares again, so this only has to be low enough.
            let least = tokens.largest() + p.ln();
            let least = least - (least.abs() * 1e-5 + 1e-3);
            tokens.each(|token, logit| keep_if(kept, token, logit, logit >= least));
        }
        Truncation::None => tokens.each(|token, logit| kept.push(candidate(token, logit))),
    }
}

/// The tokens that may be drawn, with their logits.
struct Tokens<'a> {
    logits: &'a [f32],
    allowed: Option<&'a SimpleVob>,
}

impl Tokens<'_> {
    fn count(&self) -> usize {
        let mut n = 0;
        match self.allowed {
            None => n = self.logits.len(),
            Some(allowed) => each_allowed(self.logits, allowed, |_, _| n += 1),
        }
        n
    }

    fn logits(&self) -> Vec<f32> {
        let mut logits = Vec::with_capacity(self.logits.len());
        self.each(|_, logit| logits.push(logit));
        logits
    }

    fn largest(&self) -> f32 {
        let mut max = f32::NEG_INFINITY;
        match self.allowed {
            None => max = largest(self.logits),
            Some(allowed) => each_allowed(self.logits, allowed, |_, logit| max = max.max(logit)),
        }
        max
    }

    fn each(&self, mut take: impl FnMut(usize, f32)) {
        match self.allowed {
            None => self.logits.iter().enumerate().for_each(|(token, &logit)| take(token, logit)),
            Some(allowed) => each_allowed(self.logits, allowed, take),
        }
    }
}

fn candidate(token: usize, logit: f32) -> Candidate {
    Candidate { token: token as Token, logit, p: 0.0 }
}

#[inline]
fn keep_if(kept: &mut Vec<Candidate>, token: usize, logit: f32, is_kept: bool) {
    if is_kept {
        kept.push(candidate(token, logit));
    }
}

/// Keeps the `k` tokens with the largest logits, in descending order. Equal ones come in the order in which libstdc++'s
/// `std::partial_sort` leaves them, because the token that a draw chooses depends on it.
fn keep_top(tokens: &Tokens<'_>, k: usize, kept: &mut Vec<Candidate>) {
    if k == 0 {
        return;
    }
    match tokens.allowed {
        None => {
            kept.extend((0..k).zip(tokens.logits).map(|(token, &logit)| candidate(token, logit)));
            make_heap(kept);
            for start in (k..tokens.logits.len()).step_by(BLOCK) {
                let block = &tokens.logits[start..tokens.logits.len().min(start + BLOCK)];
                // Almost every block has nothing to add.
                if largest(block) > kept[0].logit {
                    (start..).zip(block).for_each(|(token, &logit)| offer(kept, token, logit));
                }
            }
        }
        Some(allowed) => each_allowed(tokens.logits, allowed, |token, logit| {
            if kept.len() == k {
                return offer(kept, token, logit);
            }
            kept.push(candidate(token, logit));
            if kept.len() == k {
                make_heap(kept);
            }
        }),
    }
    sort_heap(kept);
}

/// Replaces the smallest logit of the heap, its first, if the token's is larger.
#[inline]
fn offer(heap: &mut [Candidate], token: usize, logit: f32) {
    if logit > heap[0].logit {
        sink(heap, 0, candidate(token, logit));
    }
}

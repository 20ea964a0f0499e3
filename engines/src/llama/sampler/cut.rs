//! Chooses the candidates of a draw without sorting the vocabulary.
//!
//! llama.cpp's samplers start from an array of the whole vocabulary. [`keep_candidates`] fills that array with only the
//! tokens that its first sampler would keep, in the same order, also among equal logits. The rest of the chain, and with
//! it the draw, then gives the same to the bit. Equal logits come in the order of libstdc++'s `std::partial_sort`; where
//! llama.cpp is built with libc++, as on macOS, equal logits at the cut may be other tokens.

use std::ops::Range;

use baton_schemas::generate::Sampling;
use llama_cpp_2::token::LlamaToken;
use llama_cpp_2::token::data::LlamaTokenData;
use llama_cpp_2::token::data_array::LlamaTokenDataArray;
use toktrie::SimpleVob;

use super::peak::{BLOCK, each_allowed, largest};

/// Up to this k, llama.cpp selects with `std::partial_sort`, beyond it with [`bucket`]s
/// (`llama_token_data_array_partial_sort_inplace`).
const MAX_HEAP: usize = 128;

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
    into: &mut LlamaTokenDataArray,
) {
    into.selected = None;
    into.sorted = false;
    into.data.clear();
    let tokens = Tokens { logits, allowed };
    let kept = &mut into.data;
    match truncation {
        Truncation::TopK(k) => {
            let k = k.min(tokens.count());
            if k <= MAX_HEAP {
                keep_top(&tokens, k, kept);
                into.sorted = true;
            } else {
                let lowest = lowest_bucket(&tokens, k);
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

fn candidate(token: usize, logit: f32) -> LlamaTokenData {
    LlamaTokenData::new(LlamaToken::new(i32::try_from(token).unwrap_or(i32::MAX)), logit, 0.0)
}

#[inline]
fn keep_if(kept: &mut Vec<LlamaTokenData>, token: usize, logit: f32, is_kept: bool) {
    if is_kept {
        kept.push(candidate(token, logit));
    }
}

/// Keeps the `k` tokens with the largest logits, in descending order. Equal ones come in the order in which libstdc++'s
/// `std::partial_sort` leaves them, because the token that a draw chooses depends on it.
fn keep_top(tokens: &Tokens<'_>, k: usize, kept: &mut Vec<LlamaTokenData>) {
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
                if largest(block) > kept[0].logit() {
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
fn offer(heap: &mut [LlamaTokenData], token: usize, logit: f32) {
    if logit > heap[0].logit() {
        sink(heap, 0, candidate(token, logit));
    }
}

/// libstdc++'s `std::__make_heap`.
fn make_heap(heap: &mut [LlamaTokenData]) {
    for parent in (0..heap.len() / 2).rev() {
        sink(heap, parent, heap[parent]);
    }
}

/// libstdc++'s `std::__sort_heap`.
fn sort_heap(heap: &mut [LlamaTokenData]) {
    for last in (1..heap.len()).rev() {
        let value = heap[last];
        heap[last] = heap[0];
        sink(&mut heap[..last], 0, value);
    }
}

/// libstdc++'s `std::__adjust_heap`: the hole sinks to a leaf, then `value` rises from there.
fn sink(heap: &mut [LlamaTokenData], top: usize, value: LlamaTokenData) {
    let mut hole = top;
    while 2 * hole + 2 < heap.len() {
        let Range { start: left, end: right } = 2 * hole + 1..2 * hole + 2;
        let child = if heap[right].logit() > heap[left].logit() { left } else { right };
        heap[hole] = heap[child];
        hole = child;
    }
    if 2 * hole + 2 == heap.len() {
        heap[hole] = heap[2 * hole + 1];
        hole = 2 * hole + 1;
    }
    while hole > top && heap[(hole - 1) / 2].logit() > value.logit() {
        heap[hole] = heap[(hole - 1) / 2];
        hole = (hole - 1) / 2;
    }
    heap[hole] = value;
}

const N_BUCKETS: usize = 128;

/// llama.cpp's bucket of a logit (`llama_token_data_array_partial_sort`): 128 buckets from -10 to 10.
#[inline]
fn bucket(logit: f32) -> usize {
    ((6.4 * logit + 64.0) as i32).clamp(0, N_BUCKETS as i32 - 1) as usize
}

/// The lowest bucket that llama.cpp sorts when it selects `k` tokens.
fn lowest_bucket(tokens: &Tokens<'_>, k: usize) -> usize {
    let mut sizes = [0usize; N_BUCKETS];
    tokens.each(|_, logit| sizes[bucket(logit)] += 1);
    let mut n_above = 0;
    let is_enough = |&bucket: &usize| {
        n_above += sizes[bucket];
        n_above >= k
    };
    (0..N_BUCKETS).rev().find(is_enough).unwrap_or(0)
}

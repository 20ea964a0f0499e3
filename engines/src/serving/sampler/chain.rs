//! llama.cpp's samplers, in Rust: top-k, top-p, min-p, temperature, and the draw.
//!
//! Each gives what `llama-sampler.cpp` of the pinned llama.cpp gives, to the bit: the same operations in the same order, in
//! f32 where it uses `float`. The tests compare them. Equal logits come in the order of libstdc++ ([`super::sort`]).

use baton_schemas::generate::Sampling;

use super::candidate::Candidate;
use super::sort::{partial_sort, sort};
use super::twister;

/// Up to this many candidates, llama.cpp selects with `std::partial_sort`, beyond it with [`bucket`]s
/// (`llama_token_data_array_partial_sort_inplace`).
pub(super) const MAX_HEAP: usize = 128;

const N_BUCKETS: usize = 128;

/// With more unsorted candidates, top-p sorts only the first ones, and all if those are too few.
const MANY: usize = 1024;
const FIRST: usize = 256;

/// The candidates of a draw.
#[derive(Default)]
pub(super) struct Candidates {
    pub(super) all: Vec<Candidate>,
    /// The largest logit comes first.
    pub(super) is_sorted: bool,
    sorted: Vec<Candidate>,
}

impl Candidates {
    /// Applies top-k, top-p, min-p and the temperature. There is at least one candidate.
    pub(super) fn cut(&mut self, sampling: &Sampling) {
        if sampling.top_k > 0 {
            self.top_k(sampling.top_k as usize);
        }
        if sampling.top_p < 1.0 {
            self.top_p(sampling.top_p);
        }
        if sampling.min_p > 0.0 {
            self.min_p(sampling.min_p);
        }
        self.all.iter_mut().for_each(|candidate| candidate.logit /= sampling.temperature);
    }

    /// Draws one candidate. `None` if there is none.
    pub(super) fn draw(&self, seed: u32) -> Option<Candidate> {
        let all = &self.all;
        let max = self.largest();
        let weights = || all.iter().map(|candidate| f64::from((candidate.logit - max).exp()));
        let target = weights().fold(0.0, |sum, p| sum + p) * twister::uniform(seed);
        let mut sum = 0.0;
        let reaches = |p: f64| {
            sum += p;
            sum >= target
        };
        let at = weights().position(reaches).unwrap_or(all.len().saturating_sub(1));
        all.get(at).copied()
    }

    fn top_k(&mut self, k: usize) {
        let k = k.min(self.all.len());
        if !self.is_sorted {
            self.sort_first(k);
        }
        self.all.truncate(k);
    }

    fn top_p(&mut self, p: f32) {
        self.set_probabilities();
        let n_all = self.all.len();
        let mut n_sorted = n_all;
        if !self.is_sorted && n_all > MANY {
            n_sorted = FIRST;
            self.sorted = first_by_buckets(&self.all, n_sorted);
        } else {
            if !self.is_sorted {
                self.sort_first(n_all);
            }
            self.sorted.clone_from(&self.all);
        }
        let mut sum = 0.0f32;
        let mut n_kept = n_all;
        for i in 0..n_all {
            sum += self.sorted[i].p;
            if sum >= p {
                n_kept = i + 1;
                break;
            }
            if i + 1 == n_sorted && n_sorted < n_all {
                n_sorted = n_all;
                self.sorted = first_by_buckets(&self.all, n_all);
            }
        }
        self.sorted.truncate(n_kept);
        std::mem::swap(&mut self.all, &mut self.sorted);
        self.is_sorted = true;
    }

    fn min_p(&mut self, p: f32) {
        if !self.is_sorted {
            let max = self.all.iter().fold(f32::MIN, |max, candidate| max.max(candidate.logit));
            let least = max + p.ln();
            if self.all.iter().any(|candidate| candidate.logit >= least) {
                return self.all.retain(|candidate| candidate.logit >= least);
            }
            // None has a chance.
            self.sort_first(self.all.len());
        }
        let least = self.largest() + p.ln();
        // The first one always stays.
        let n_kept = self.all.iter().skip(1).take_while(|candidate| candidate.logit >= least).count() + 1;
        self.all.truncate(n_kept);
    }

    fn largest(&self) -> f32 {
        match self.is_sorted {
            true => self.all.first().map_or(f32::NEG_INFINITY, |candidate| candidate.logit),
            false => self.all.iter().fold(f32::NEG_INFINITY, |max, candidate| max.max(candidate.logit)),
        }
    }

    /// Softmax.
    fn set_probabilities(&mut self) {
        let max = self.largest();
        let mut sum = 0.0f32;
        for candidate in &mut self.all {
            candidate.p = (candidate.logit - max).exp();
            sum += candidate.p;
        }
        self.all.iter_mut().for_each(|candidate| candidate.p /= sum);
    }

    /// Keeps the `n` candidates with the largest logits, in descending order.
    fn sort_first(&mut self, n: usize) {
        if n <= MAX_HEAP {
            partial_sort(&mut self.all, n);
            self.all.truncate(n);
        } else {
            self.all = first_by_buckets(&self.all, n);
        }
        self.is_sorted = true;
    }
}

/// The `n` candidates with the largest logits, in descending order (`llama_token_data_array_partial_sort`).
fn first_by_buckets(candidates: &[Candidate], n: usize) -> Vec<Candidate> {
    let lowest = lowest_bucket(candidates.iter().map(|candidate| candidate.logit), n);
    let mut buckets: Vec<Vec<Candidate>> = vec![Vec::new(); N_BUCKETS - lowest];
    for candidate in candidates {
        if let Some(at) = bucket(candidate.logit).checked_sub(lowest) {
            buckets[at].push(*candidate);
        }
    }
    let mut first: Vec<Candidate> = Vec::with_capacity(candidates.len().min(2 * n));
    for (at, bucket) in buckets.iter_mut().enumerate().rev() {
        match at {
            0 => partial_sort(bucket, n - first.len()),
            _ => sort(bucket),
        }
        first.append(bucket);
    }
    first.truncate(n);
    first
}

/// llama.cpp's bucket of a logit: 128 buckets from -10 to 10.
#[inline]
pub(super) fn bucket(logit: f32) -> usize {
    ((6.4 * logit + 64.0) as i32).clamp(0, N_BUCKETS as i32 - 1) as usize
}

/// The lowest bucket that llama.cpp sorts when it selects `n` candidates.
pub(super) fn lowest_bucket(logits: impl Iterator<Item = f32>, n: usize) -> usize {
    let mut sizes = [0usize; N_BUCKETS];
    logits.for_each(|logit| sizes[bucket(logit)] += 1);
    let mut n_above = 0;
    let is_enough = |&bucket: &usize| {
        n_above += sizes[bucket];
        n_above >= n
    };
    (0..N_BUCKETS).rev().find(is_enough).unwrap_or(0)
}

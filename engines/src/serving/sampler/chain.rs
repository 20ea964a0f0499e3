//! llama.cpp's samplers, in Rust: top-k, top-p, min-p, temperature, and the draw.
//!
//! Each gives what `llama-sampler.cpp` of the pinned llama.cpp gives, to the bit: the same operations in the same order, in
//! f32 where it uses `float`. The tests compare them. Equal logits come in the order of their tokens; llama.cpp leaves
//! them as its C++ library sorts them, which differs between systems.
//!
//! llama.cpp starts from an array of the whole vocabulary. [`Candidates::fill`] keeps only the tokens that the first sampler
//! would keep.

use baton_schemas::generate::Sampling;
use toktrie::SimpleVob;

use super::candidate::{Candidate, sort_first};
use super::peak::each;
use super::top::{keep_likely, keep_top, least_likely};
use super::twister;

/// Top-p sorts this many candidates first, and four times as many as before while those are too few.
const FIRST: usize = 256;

/// The candidates of a draw.
#[derive(Default)]
pub(super) struct Candidates {
    all: Vec<Candidate>,
    /// The largest logit comes first.
    is_sorted: bool,
}

impl Candidates {
    /// Draws one of the `allowed` tokens, or of all. `None` if there is none.
    pub(super) fn draw(
        &mut self,
        sampling: &Sampling,
        logits: &[f32],
        allowed: Option<&SimpleVob>,
        seed: u32,
    ) -> Option<Candidate> {
        self.fill(sampling, logits, allowed);
        if sampling.top_p < 1.0 {
            self.top_p(sampling.top_p);
        }
        if sampling.min_p > 0.0 {
            let least = least_likely(self.largest(), sampling.min_p);
            self.all.retain(|candidate| candidate.logit >= least);
        }
        self.all.iter_mut().for_each(|candidate| candidate.logit /= sampling.temperature);
        self.choose(seed)
    }

    /// Takes the tokens that the first sampler keeps.
    fn fill(&mut self, sampling: &Sampling, logits: &[f32], allowed: Option<&SimpleVob>) {
        self.is_sorted = sampling.top_k > 0;
        if self.is_sorted {
            return keep_top(logits, allowed, sampling.top_k as usize, &mut self.all);
        }
        // Top-p comes before min-p, and needs the sum over all tokens.
        if sampling.top_p >= 1.0 && sampling.min_p > 0.0 {
            return keep_likely(logits, allowed, sampling.min_p, &mut self.all);
        }
        self.all.clear();
        each(logits, allowed, |token, logit| self.all.push(Candidate::new(token, logit)));
    }

    fn top_p(&mut self, p: f32) {
        self.set_probabilities();
        let n_all = self.all.len();
        let mut n_sorted = if self.is_sorted { n_all } else { 0 };
        let mut sum = 0.0f32;
        for i in 0..n_all {
            if i == n_sorted {
                n_sorted = n_all.min(FIRST.max(4 * i));
                sort_first(&mut self.all[i..], n_sorted - i);
            }
            sum += self.all[i].p;
            if sum >= p {
                self.all.truncate(i + 1);
                break;
            }
        }
        self.is_sorted = true;
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

    fn largest(&self) -> f32 {
        match self.is_sorted {
            true => self.all.first().map_or(f32::NEG_INFINITY, |candidate| candidate.logit),
            false => self.all.iter().fold(f32::NEG_INFINITY, |max, candidate| max.max(candidate.logit)),
        }
    }

    fn choose(&self, seed: u32) -> Option<Candidate> {
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
}

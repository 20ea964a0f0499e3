//! Draws the next token from logits, with llama.cpp's samplers.
//!
//! There is no random state between tokens: the draw at a position is seeded by (request seed, position). So a sequence
//! that is resumed on another engine gets the same draws, and other tokens only where rounding moved the probabilities.

use baton_schemas::Token;
use baton_schemas::generate::Sampling;
use baton_schemas::sequence::{Alternative, Logprobs};
use llama_cpp_2::sampling::LlamaSampler;
use llama_cpp_2::token::LlamaToken;
use llama_cpp_2::token::data::LlamaTokenData;
use llama_cpp_2::token::data_array::LlamaTokenDataArray;
use llama_cpp_2::token::logit_bias::LlamaLogitBias;

use super::constrain::{Constrained, NoToken};
use super::vocabulary::token;

/// One sequence's sampler.
pub(super) struct Sampler {
    /// Logit bias and banned tokens.
    bias: Option<LlamaSampler>,
    /// The repetition penalty, over prompt and output.
    repeat: Option<LlamaSampler>,
    /// OpenAI's frequency and presence penalties, over the output alone.
    frequency: Option<LlamaSampler>,
    /// top-k, top-p, min-p, temperature; `None` for greedy.
    truncate: Option<LlamaSampler>,
    seed: u64,
    /// The constraint on the text.
    constraint: Option<Constrained>,
    /// The array that llama.cpp's samplers work on. It is reused for each token, since it takes up to 3 MB.
    candidates: Option<LlamaTokenDataArray>,
}

impl Sampler {
    /// A sampler for the token after `prompt` and `generated`. Tokens in `banned` are never drawn.
    pub(super) fn new(
        sampling: &Sampling,
        n_vocab: i32,
        banned: &[Token],
        prompt: &[Token],
        generated: &[Token],
    ) -> Self {
        let repeats = sampling.repeat_last_n != 0 && sampling.repeat_penalty != 1.0;
        let repeat = repeats.then(|| {
            let window = if sampling.repeat_last_n < 0 { i32::MAX / 2 } else { sampling.repeat_last_n };
            // llama.cpp allocates the whole window.
            let window = window.min(MAX_PENALTY_WINDOW);
            LlamaSampler::penalties(n_vocab, window, sampling.repeat_penalty, 0.0, 0.0)
                .with_tokens(prompt.iter().chain(generated).map(|&t| token(t)))
        });
        let frequency = (sampling.frequency_penalty != 0.0 || sampling.presence_penalty != 0.0).then(|| {
            LlamaSampler::penalties(
                n_vocab,
                MAX_PENALTY_WINDOW,
                1.0,
                sampling.frequency_penalty,
                sampling.presence_penalty,
            )
            .with_tokens(generated.iter().map(|&t| token(t)))
        });
        let biases: Vec<LlamaLogitBias> = sampling
            .logit_bias
            .iter()
            .map(|&(t, bias)| LlamaLogitBias::new(token(t), bias))
            .chain(banned.iter().map(|&t| LlamaLogitBias::new(token(t), f32::NEG_INFINITY)))
            .collect();
        Sampler {
            bias: (!biases.is_empty()).then(|| LlamaSampler::logit_bias(n_vocab, &biases)),
            repeat,
            frequency,
            truncate: (sampling.temperature > 0.0).then(|| truncation(sampling)),
            seed: sampling.seed,
            constraint: None,
            candidates: None,
        }
    }

    /// The same sampler under a constraint.
    pub(super) fn constrained(self, constraint: Option<Constrained>) -> Self {
        Sampler { constraint, ..self }
    }

    /// Returns true if there is a constraint, the text satisfies it, and no token can follow.
    pub(super) fn is_complete(&self) -> bool {
        self.constraint.as_ref().is_some_and(Constrained::is_complete)
    }

    /// Draws the token for `position` (the number of tokens before it, prompt included) and updates penalties and
    /// constraint. Errors: no token satisfies the constraint.
    pub(super) fn sample(&mut self, logits: &[f32], position: usize) -> Result<Token, NoToken> {
        let allowed = self.constraint.as_mut().map(Constrained::allowed).transpose()?;
        let shaping = [&mut self.bias, &mut self.repeat, &mut self.frequency];
        let chosen = if allowed.is_none() && self.truncate.is_none() && shaping.iter().all(|s| s.is_none()) {
            token(argmax(logits))
        } else {
            let mut candidates = self.candidates.take().unwrap_or_else(|| LlamaTokenDataArray::new(Vec::new(), false));
            candidates.data.clear();
            let all = (0..).zip(logits).filter(|(i, _)| allowed.as_ref().is_none_or(|set| set.is_allowed(*i as u32)));
            candidates.data.extend(all.map(|(i, &l)| LlamaTokenData::new(LlamaToken::new(i), l, 0.0)));
            if candidates.data.is_empty() {
                return Err(NoToken::DeadEnd);
            }
            candidates.sorted = false;
            candidates.selected = None;
            for sampler in shaping.into_iter().flatten() {
                candidates.apply_sampler(sampler);
            }
            let chosen = match &mut self.truncate {
                None => candidates.sample_token_greedy(),
                Some(truncate) => {
                    candidates.apply_sampler(truncate);
                    candidates.sample_token(draw_seed(self.seed, position))
                }
            };
            self.candidates = Some(candidates);
            chosen
        };
        for sampler in [&mut self.repeat, &mut self.frequency].into_iter().flatten() {
            sampler.accept(chosen);
        }
        let chosen = chosen.0.unsigned_abs();
        if let Some(constraint) = &mut self.constraint {
            constraint.accept(chosen);
        }
        Ok(chosen)
    }
}

/// The longest window of a penalty, tokens. llama.cpp allocates it in advance.
const MAX_PENALTY_WINDOW: i32 = 65_536;

fn truncation(sampling: &Sampling) -> LlamaSampler {
    let mut stages = Vec::with_capacity(4);
    if sampling.top_k > 0 {
        stages.push(LlamaSampler::top_k(i32::try_from(sampling.top_k).unwrap_or(i32::MAX)));
    }
    if sampling.top_p < 1.0 {
        stages.push(LlamaSampler::top_p(sampling.top_p, 1));
    }
    if sampling.min_p > 0.0 {
        stages.push(LlamaSampler::min_p(sampling.min_p, 1));
    }
    stages.push(LlamaSampler::temp(sampling.temperature));
    LlamaSampler::chain(stages, true)
}

/// The 31-bit seed of the draw at a position: SplitMix64's finalizer (Steele et al. 2014) over seed and position. One
/// bit is left out because llama.cpp reads 0xFFFFFFFF as "choose a seed for me".
fn draw_seed(seed: u64, position: usize) -> u32 {
    let mut z = seed.wrapping_add((position as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((z ^ (z >> 31)) >> 33) as u32
}

/// Returns true if logits give probabilities: none is NaN or +infinity, and at least one is finite. A model may give a
/// token no chance (-infinity).
pub(super) fn are_probabilities(logits: &[f32]) -> bool {
    let mut any_finite = false;
    let mut none_wrong = true;
    for &logit in logits {
        any_finite |= logit.is_finite();
        none_wrong &= logit < f32::INFINITY;
    }
    any_finite && none_wrong
}

/// The first index of the largest logit.
pub(super) fn argmax(logits: &[f32]) -> Token {
    let mut best = 0;
    for (i, &logit) in logits.iter().enumerate() {
        if logit > logits[best] {
            best = i;
        }
    }
    best as Token
}

/// Log-probabilities of `chosen` and of the `k` most likely tokens, from raw logits.
pub(super) fn logprobs(logits: &[f32], chosen: Token, k: usize, bytes: impl Fn(Token) -> Vec<u8>) -> Logprobs {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
    let log_sum = f64::from(max) + sum.ln();
    let logprob = |t: Token| (f64::from(logits[t as usize]) - log_sum) as f32;

    let mut order: Vec<Token> = (0..logits.len() as Token).collect();
    let by_logit = |&a: &Token, &b: &Token| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b));
    let k = k.min(order.len());
    if k > 0 && k < order.len() {
        order.select_nth_unstable_by(k - 1, by_logit);
    }
    order.truncate(k);
    order.sort_unstable_by(by_logit);
    Logprobs {
        chosen: logprob(chosen),
        top: order.into_iter().map(|id| Alternative { id, bytes: bytes(id), logprob: logprob(id) }).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(sampling: &Sampling, logits: &[f32], position: usize) -> Token {
        Sampler::new(sampling, logits.len() as i32, &[], &[], &[]).sample(logits, position).unwrap()
    }

    fn peaked(n: usize, at: usize) -> Vec<f32> {
        (0..n).map(|i| if i == at { 5.0 } else { (i % 7) as f32 * 0.1 }).collect()
    }

    #[test]
    fn greedy_takes_the_first_largest() {
        let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
        assert_eq!(draw(&greedy, &peaked(100, 42), 0), 42);
        assert_eq!(draw(&greedy, &[1.0, 3.0, 3.0], 0), 1);
    }

    #[test]
    fn a_draw_is_a_function_of_seed_and_position() {
        let warm = Sampling { temperature: 1.5, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 9, ..Sampling::default() };
        let flat = vec![0.0; 1000];
        let draws: Vec<Token> = (0..50).map(|p| draw(&warm, &flat, p)).collect();
        assert_eq!(draws, (0..50).map(|p| draw(&warm, &flat, p)).collect::<Vec<_>>());
        let distinct: std::collections::HashSet<_> = draws.iter().collect();
        assert!(distinct.len() > 40, "positions must draw independently: {draws:?}");
        let other = Sampling { seed: 10, ..warm };
        assert_ne!(draws, (0..50).map(|p| draw(&other, &flat, p)).collect::<Vec<_>>());
    }

    #[test]
    fn bias_penalties_and_bans_move_the_choice() {
        let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
        let biased = Sampling { logit_bias: vec![(7, 100.0)], ..greedy.clone() };
        assert_eq!(draw(&biased, &peaked(100, 42), 0), 7);
        let mut banned = Sampler::new(&greedy, 100, &[42], &[], &[]);
        assert_ne!(banned.sample(&peaked(100, 42), 0).unwrap(), 42);

        let logits = [0.0, 2.0, 1.5];
        let presence = Sampling { presence_penalty: 1.0, ..greedy.clone() };
        let after = |s: &Sampling, prompt: &[Token], generated: &[Token]| {
            Sampler::new(s, 3, &[], prompt, generated).sample(&logits, 1).unwrap()
        };
        assert_eq!(after(&presence, &[], &[1]), 2);
        assert_eq!(after(&presence, &[1], &[]), 1, "presence and frequency count the output alone");
        let repeat = Sampling { repeat_penalty: 2.0, ..greedy };
        assert_eq!(after(&repeat, &[1], &[]), 2, "repeat counts the prompt too");
    }

    #[test]
    fn logits_that_are_not_numbers_are_found() {
        const NONE: f32 = f32::NEG_INFINITY;
        let check = |logits: &[f32], expected| assert_eq!(are_probabilities(logits), expected, "{logits:?}");
        check(&[1.0, -2.0, NONE], true);
        check(&[1.0, f32::NAN], false);
        check(&[f32::INFINITY, 1.0], false);
        check(&[NONE, NONE], false);
        check(&[], false);
    }

    #[test]
    fn logprobs_are_a_distribution() {
        let logits = peaked(100, 42);
        let l = logprobs(&logits, 3, 100, |_| Vec::new());
        let total: f32 = l.top.iter().map(|a| a.logprob.exp()).sum();
        assert!((total - 1.0).abs() < 1e-4, "{total}");
        assert_eq!(l.top[0].id, 42);
        assert!(l.top.windows(2).all(|w| w[0].logprob >= w[1].logprob));
        assert_eq!(l.chosen, l.top.iter().find(|a| a.id == 3).unwrap().logprob);
        assert!(logprobs(&logits, 3, 0, |_| Vec::new()).top.is_empty());
    }
}

//! The sampler, compared with llama.cpp's samplers over the whole vocabulary. llama.cpp leaves equal logits in an order that
//! depends on its C++ library. Here they come in the order of their tokens. So the tests compare places in the order.

use llama_cpp_2::sampling::LlamaSampler;
use llama_cpp_2::token::LlamaToken;
use llama_cpp_2::token::data::LlamaTokenData;
use llama_cpp_2::token::data_array::LlamaTokenDataArray;
use llama_cpp_2::token::logit_bias::LlamaLogitBias;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

use super::*;

const NEVER: f32 = f32::NEG_INFINITY;

/// llama.cpp's samplers, one after the other, over an array of the whole vocabulary.
struct Whole {
    bias: LlamaSampler,
    penalties: [LlamaSampler; 2],
    samplers: Option<LlamaSampler>,
    seed: u64,
}

impl Whole {
    fn new(sampling: &Sampling, n_vocab: i32, banned: &[Token], prompt: &[Token], generated: &[Token]) -> Self {
        let token = |t: Token| LlamaToken::new(t as i32);
        let biases = sampling.logit_bias.iter().map(|&(t, bias)| LlamaLogitBias::new(token(t), bias));
        let bans = banned.iter().map(|&t| LlamaLogitBias::new(token(t), NEVER));
        let window = if sampling.repeat_last_n < 0 { 65_536 } else { sampling.repeat_last_n };
        let Sampling { frequency_penalty, presence_penalty, .. } = *sampling;
        Whole {
            bias: LlamaSampler::logit_bias(n_vocab, &biases.chain(bans).collect::<Vec<_>>()),
            penalties: [
                LlamaSampler::penalties(n_vocab, window, sampling.repeat_penalty, 0.0, 0.0)
                    .with_tokens(prompt.iter().chain(generated).map(|&t| token(t))),
                LlamaSampler::penalties(n_vocab, 65_536, 1.0, frequency_penalty, presence_penalty)
                    .with_tokens(generated.iter().map(|&t| token(t))),
            ],
            samplers: (sampling.temperature > 0.0).then(|| samplers(sampling)),
            seed: sampling.seed,
        }
    }

    fn choose(&mut self, logits: &[f32], allowed: Option<&SimpleVob>, position: usize) -> Option<Token> {
        let all = (0..).zip(logits).filter(|(t, _)| allowed.is_none_or(|set| set.is_allowed(*t as u32)));
        let all = all.map(|(t, &l)| LlamaTokenData::new(LlamaToken::new(t), l, 0.0));
        let mut candidates = LlamaTokenDataArray::from_iter(all, false);
        if candidates.data.is_empty() {
            return None;
        }
        candidates.apply_sampler(&mut self.bias);
        for penalty in &mut self.penalties {
            candidates.apply_sampler(penalty);
        }
        let chosen = match &mut self.samplers {
            None => candidates.sample_token_greedy(),
            Some(samplers) => {
                let mut ordered = candidates.data.clone();
                ordered.sort_by(|a, b| b.logit().total_cmp(&a.logit()).then(a.id().0.cmp(&b.id().0)));
                candidates.apply_sampler(samplers);
                let drawn = candidates.sample_token(draw_seed(self.seed, position));
                match candidates.selected {
                    Some(place) if candidates.sorted => ordered[place].id(),
                    _ => drawn,
                }
            }
        };
        for penalty in &mut self.penalties {
            penalty.accept(chosen);
        }
        Some(chosen.0 as Token)
    }
}

fn samplers(sampling: &Sampling) -> LlamaSampler {
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

fn logits(rng: &mut StdRng, n: usize) -> Vec<f32> {
    let spread: f32 = *[0.1, 3.0, 30.0].choose(rng).unwrap();
    let centre: f32 = *[-20.0, 0.0, 15.0].choose(rng).unwrap();
    let mut one = |_| centre + spread * (rng.random::<f32>() + rng.random::<f32>() - 1.0);
    let mut logits: Vec<f32> = (0..n).map(&mut one).collect();
    match rng.random_range(0..8) {
        // Ties.
        0 => logits.iter_mut().for_each(|l| *l = l.round()),
        1 => logits.iter_mut().for_each(|l| *l = (*l * 0.1).round()),
        2 => logits.fill(1.5),
        // Tokens without a chance.
        3 => logits.iter_mut().step_by(2).for_each(|l| *l = NEVER),
        4 => {
            logits.fill(NEVER);
            logits[rng.random_range(0..n)] = 2.0;
        }
        5 => logits.sort_by(f32::total_cmp),
        6 => logits.sort_by(|a, b| b.total_cmp(a)),
        _ => {}
    }
    if logits.iter().all(|l| *l == NEVER) {
        logits[0] = 1.0;
    }
    logits
}

fn sampling(rng: &mut StdRng, n: usize) -> Sampling {
    let any = |rng: &mut StdRng, values: &[f32]| *values.choose(rng).unwrap();
    let biased: std::collections::BTreeSet<Token> =
        (0..rng.random_range(0..6)).map(|_| rng.random_range(0..n as Token)).collect();
    Sampling {
        logit_bias: biased.into_iter().map(|t| (t, any(rng, &[-100.0, -1.25, 0.5, 100.0]))).collect(),
        repeat_penalty: any(rng, &[1.0, 1.1, 2.0]),
        repeat_last_n: *[-1, 0, 1, 5, 64].choose(rng).unwrap(),
        frequency_penalty: any(rng, &[0.0, 0.0, -0.5, 0.7]),
        presence_penalty: any(rng, &[0.0, 0.0, 0.3]),
        top_k: *[0, 1, 2, 5, 40, 40, 127, 128, 129, 200, 1000, 100_000].choose(rng).unwrap(),
        top_p: any(rng, &[1.0, 0.95, 0.5, 0.0]),
        min_p: any(rng, &[0.0, 0.05, 0.5, 1.0]),
        temperature: any(rng, &[0.0, 0.1, 0.8, 1.5]),
        seed: rng.random(),
        repeatable: false,
    }
}

fn mask(rng: &mut StdRng, n: usize) -> Option<SimpleVob> {
    let share: f64 = *[0.005, 0.5, 0.99].choose(rng).unwrap();
    // A mask may be larger than the vocabulary.
    let mut mask = SimpleVob::alloc(n + 40);
    (0..n + 40).filter(|_| rng.random_bool(share)).for_each(|t| mask.allow_token(t as Token));
    rng.random_bool(0.4).then_some(mask)
}

#[test]
fn draws_are_those_of_llama_cpp_and_equal_logits_come_by_their_tokens() {
    for case in 0..4000 {
        let rng = &mut StdRng::seed_from_u64(case);
        let n: usize = *[1, 3, 63, 64, 65, 129, 500, 3000].choose(rng).unwrap();
        let sampling = sampling(rng, n);
        let mut tokens = |max: usize| -> Vec<Token> {
            let n_tokens = rng.random_range(0..max);
            (0..n_tokens).map(|_| rng.random_range(0..n as Token)).collect()
        };
        let (prompt, generated, mut banned) = (tokens(100), tokens(20), tokens(2));
        // Under a mask, llama.cpp applies only the first of two biases.
        banned.retain(|token| sampling.logit_bias.iter().all(|(biased, _)| token != biased));
        let mut sampler = Sampler::new(&sampling, &banned, &prompt, &generated);
        let mut whole = Whole::new(&sampling, n as i32, &banned, &prompt, &generated);
        for position in 0..4 {
            let logits = logits(rng, n);
            let allowed = mask(rng, n);
            let peak = peak(&logits).unwrap();
            let chosen = sampler.choose(&logits, peak, allowed.as_ref(), position);
            let expected = whole.choose(&logits, allowed.as_ref(), position);
            assert_eq!(chosen, expected, "case {case}, position {position}, {n} tokens, {sampling:?}");
        }
    }
}

#[test]
fn log_probabilities_are_those_of_a_sorted_vocabulary() {
    for case in 0..500 {
        let rng = &mut StdRng::seed_from_u64(case);
        let n: usize = *[1, 63, 64, 65, 500, 3000].choose(rng).unwrap();
        let logits = logits(rng, n);
        let k = *[0, 1, 5, 20, 64, 5000].choose(rng).unwrap();
        let found = logprobs(&logits, peak(&logits).unwrap().logit, 0, k, |_| Vec::new());
        let max = logits.iter().copied().fold(NEVER, f32::max);
        let log_sum = f64::from(max) + logits.iter().map(|&l| f64::from(l - max).exp()).sum::<f64>().ln();
        let logprob = |t: Token| (f64::from(logits[t as usize]) - log_sum) as f32;
        let mut order: Vec<Token> = (0..n as Token).collect();
        order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
        let expected: Vec<(Token, u32)> = order.into_iter().take(k).map(|t| (t, logprob(t).to_bits())).collect();
        let top: Vec<(Token, u32)> = found.top.iter().map(|a| (a.id, a.logprob.to_bits())).collect();
        assert_eq!(top, expected, "case {case}");
        assert_eq!(found.chosen.to_bits(), logprob(0).to_bits());
    }
}

#[test]
fn of_equal_logits_the_first_tokens_are_kept() {
    // More than the 256 that top-p sorts first, and than llama.cpp's 128 of a heap.
    let flat = vec![0.0; 5000];
    let warm = Sampling { temperature: 1.0, top_p: 1.0, min_p: 0.0, ..Sampling::default() };
    let kept = [1, 40, 200, 1000];
    for k in kept {
        let by_count = Sampling { top_k: k, ..warm.clone() };
        let by_mass = Sampling { top_k: 0, top_p: k as f32 / 5000.0, ..warm.clone() };
        for sampling in [by_count, by_mass] {
            let drawn = (0..200).map(|position| draw(&sampling, &flat, position));
            let largest = drawn.max().unwrap();
            assert!(largest <= k as Token, "{largest} of {sampling:?}");
            assert!(largest + 1 >= (k as Token) * 9 / 10, "{largest} of {sampling:?}");
        }
    }
}

fn draw(sampling: &Sampling, logits: &[f32], position: usize) -> Token {
    sample(&mut Sampler::new(sampling, &[], &[], &[]), logits, position)
}

fn sample(sampler: &mut Sampler, logits: &[f32], position: usize) -> Token {
    sampler.sample(logits, peak(logits).unwrap(), position).unwrap()
}

fn peaked(n: usize, at: usize) -> Vec<f32> {
    (0..n).map(|i| if i == at { 5.0 } else { (i % 7) as f32 * 0.1 }).collect()
}

#[test]
fn greedy_takes_the_first_largest() {
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    assert_eq!(draw(&greedy, &peaked(100, 42), 0), 42);
    assert_eq!(draw(&greedy, &[1.0, 3.0, 3.0], 0), 1);
    // In later blocks, too, and where two blocks have the same largest.
    assert_eq!(draw(&greedy, &peaked(1000, 999), 0), 999);
    let mut twice = peaked(1000, 300);
    twice[700] = 5.0;
    assert_eq!((draw(&greedy, &twice, 0), argmax(&twice)), (300, 300));
    assert_eq!(argmax(&[]), 0);
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
    let biased = Sampling { logit_bias: vec![(7, 100.0)].into(), ..greedy.clone() };
    assert_eq!(draw(&biased, &peaked(100, 42), 0), 7);
    let mut banned = Sampler::new(&greedy, &[42], &[], &[]);
    assert_ne!(sample(&mut banned, &peaked(100, 42), 0), 42);

    let logits = [0.0, 2.0, 1.5];
    let presence = Sampling { presence_penalty: 1.0, ..greedy.clone() };
    let after = |s: &Sampling, prompt: &[Token], generated: &[Token]| {
        sample(&mut Sampler::new(s, &[], prompt, generated), &logits, 1)
    };
    assert_eq!(after(&presence, &[], &[1]), 2);
    assert_eq!(after(&presence, &[1], &[]), 1, "presence and frequency count the output alone");
    let repeat = Sampling { repeat_penalty: 2.0, ..greedy };
    assert_eq!(after(&repeat, &[1], &[]), 2, "repeat counts the prompt too");
}

#[test]
fn logits_that_are_not_numbers_are_found() {
    let check = |logits: &[f32], expected| assert_eq!(peak(logits).map(|p| p.token), expected, "{logits:?}");
    check(&[1.0, -2.0, NEVER], Some(0));
    check(&[1.0, f32::NAN], None);
    check(&[1.0, -f32::NAN], None);
    check(&[f32::INFINITY, 1.0], None);
    check(&[NEVER, NEVER], None);
    check(&[], None);
    let mut long = peaked(500, 321);
    check(&long, Some(321));
    long[499] = f32::NAN;
    check(&long, None);
}

#[test]
fn logprobs_are_a_distribution() {
    let logits = peaked(100, 42);
    let l = logprobs(&logits, 5.0, 3, 100, |_| Vec::new());
    let total: f32 = l.top.iter().map(|a| a.logprob.exp()).sum();
    assert!((total - 1.0).abs() < 1e-4, "{total}");
    assert_eq!(l.top[0].id, 42);
    assert!(l.top.windows(2).all(|w| w[0].logprob >= w[1].logprob));
    assert_eq!(l.chosen, l.top.iter().find(|a| a.id == 3).unwrap().logprob);
    assert!(logprobs(&logits, 5.0, 3, 0, |_| Vec::new()).top.is_empty());
    for (place, other) in (1..).zip(&l.top) {
        assert_eq!(rank(&logits, other.id), place, "the order of the list");
    }
}

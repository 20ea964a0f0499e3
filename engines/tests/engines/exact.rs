//! The engine's greedy output equals that of the plain llama.cpp loop, token for token. While other streams run, the batch's
//! shape changes the rounding; the difference is measured, printed and bounded.

use std::path::Path;
use std::sync::Arc;

use baton_engines::llama::reference::{Reference, ReferenceOptions};
use baton_engines::registry::{self, EngineOptions};
use baton_link::Engine;
use baton_schemas::generate::Sampling;
use baton_schemas::sequence::Alternative;
use baton_schemas::{SequenceEvent, SequenceRequest, Token};
use futures::StreamExt;
use harness::{MAX_MARGIN, PROMPTS};

use crate::models::{self, smollm2};

const N_NEW: usize = 24;

fn config(model: &Path) -> EngineOptions {
    EngineOptions { n_threads: Some(1), ..models::of_llama(model) }
}

fn greedy(prompt: &[Token], n_new: usize) -> SequenceRequest {
    SequenceRequest {
        prompt: prompt.to_vec(),
        sampling: Sampling { temperature: 0.0, repeatable: true, ..Sampling::default() },
        max_tokens: Some(n_new as u32),
        ..SequenceRequest::default()
    }
}

/// Tokens of a reply.
async fn reply(engine: &dyn Engine, request: SequenceRequest) -> Vec<Token> {
    let mut deltas = engine.generate(request).await.unwrap();
    let mut tokens = Vec::new();
    while let Some(delta) = deltas.next().await {
        if let SequenceEvent::Token(token) = delta.unwrap() {
            tokens.push(token.id);
        }
    }
    tokens
}

/// The plain loop's reply to a prompt.
struct Expected {
    tokens: Vec<Token>,
    /// For each token and for the end: the difference of the two best logits, in nats.
    margins: Vec<f32>,
}

fn expected(reference: &Reference, prompt: &Vec<Token>) -> Expected {
    let options = ReferenceOptions { stop_at_end: true, keep_logits: true };
    let mut run = reference.greedy(std::slice::from_ref(prompt), N_NEW, options).unwrap();
    let margins = run.logits.iter().map(|logits| margin(logits)).collect();
    Expected { tokens: run.tokens.remove(0), margins }
}

/// The difference of the two largest logits.
fn margin(logits: &[f32]) -> f32 {
    let (best, second) = logits.iter().fold((f32::NEG_INFINITY, f32::NEG_INFINITY), |(best, second), &logit| {
        if logit > best { (logit, best) } else { (best, second.max(logit)) }
    });
    best - second
}

fn prompts(reference: &Reference) -> Vec<Vec<Token>> {
    PROMPTS
        .iter()
        .map(|text| reference.tokenize(&format!("<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn greedy_output_equals_the_plain_loop() {
    let Some(model) = smollm2() else { return };
    let reference = Reference::load(config(&model)).unwrap();
    let prompts = prompts(&reference);
    assert!(prompts.len() >= 20);
    let expected: Vec<Expected> = prompts.iter().map(|prompt| self::expected(&reference, prompt)).collect();

    let engine = registry::open(config(&model), None).unwrap();
    for (prompt, expected) in prompts.iter().zip(&expected) {
        assert_eq!(reply(engine.as_ref(), greedy(prompt, N_NEW)).await, expected.tokens);
    }

    // While three other streams run, other kernels compute the rows of a batch, and round differently.
    let mut n_equal = 0;
    let mut divergences = Vec::new();
    for (i, (prompt, expected)) in prompts.iter().zip(&expected).enumerate().step_by(2) {
        let others: Vec<_> = (1..4)
            .map(|k| {
                let engine = Arc::clone(&engine);
                let request = greedy(&prompts[(i + k * 5) % prompts.len()], N_NEW + N_NEW / 4);
                tokio::spawn(async move { reply(engine.as_ref(), request).await })
            })
            .collect();
        let tokens = reply(engine.as_ref(), greedy(prompt, N_NEW)).await;
        if tokens == expected.tokens {
            n_equal += 1;
        } else {
            // One side may have ended where the other continued: the end is a token like any other.
            let common = tokens.iter().zip(&expected.tokens).take_while(|(a, b)| a == b).count();
            divergences.push((i, common, expected.margins[common]));
        }
        for other in others {
            other.await.unwrap();
        }
    }
    println!("with 3 other streams: {n_equal} of {} replies equal the plain loop's", prompts.len().div_ceil(2));
    for (prompt, at, margin) in &divergences {
        println!("  prompt {prompt}: first other token at {at}, where the top two are {margin:.4} nats apart");
    }
    // If the model was certain of its token, a divergence means a wrong KV cache, not rounding.
    let widest = divergences.iter().map(|d| d.2).fold(0.0, f32::max);
    assert!(widest < MAX_MARGIN, "a reply diverged where the top two tokens are {widest} nats apart");
}

/// Measures how far the distribution moves: KL(plain loop ‖ engine with three other streams), at every position up to the
/// first different token, over the 500 likeliest tokens.
#[tokio::test(flavor = "multi_thread")]
async fn the_distribution_stays_close_while_other_streams_run() {
    let Some(model) = smollm2() else { return };
    let reference = Reference::load(config(&model)).unwrap();
    let prompts = prompts(&reference);
    let engine = registry::open(config(&model), None).unwrap();
    let mut divergences = Vec::new();
    for (i, prompt) in prompts.iter().take(6).enumerate() {
        let options = ReferenceOptions { keep_logits: true, ..ReferenceOptions::default() };
        let plain = reference.greedy(std::slice::from_ref(prompt), 16, options).unwrap();
        let others: Vec<_> = (1..4)
            .map(|k| {
                let engine = Arc::clone(&engine);
                let request = greedy(&prompts[(i + k * 5) % prompts.len()], 32);
                tokio::spawn(async move { reply(engine.as_ref(), request).await })
            })
            .collect();
        let request = SequenceRequest { top_logprobs: Some(500), ignore_eos: true, ..greedy(prompt, 16) };
        let mut deltas = engine.generate(request).await.unwrap();
        let mut position = 0;
        let mut is_equal = true;
        while let Some(delta) = deltas.next().await {
            let SequenceEvent::Token(token) = delta.unwrap() else { continue };
            divergences.push(kl(&plain.logits[position], &token.logprobs.unwrap().top));
            is_equal = token.id == plain.tokens[0][position];
            if !is_equal {
                break;
            }
            position += 1;
        }
        assert!(position == 16 || !is_equal, "prompt {i}: the reply ended after {position} tokens");
        drop(deltas);
        for other in others {
            other.await.unwrap();
        }
    }
    let mean = divergences.iter().sum::<f64>() / divergences.len() as f64;
    let max = divergences.iter().copied().fold(0.0, f64::max);
    println!("with 3 other streams, {} positions: mean KL {mean:.2e}, largest {max:.2e}", divergences.len());
    assert!(divergences.len() >= 20);
    assert!(mean < 1e-2, "the mean KL is {mean}");
}

/// KL divergence, nats, over the tokens `other` lists.
fn kl(logits: &[f32], other: &[Alternative]) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let log_sum = max + logits.iter().map(|&l| (f64::from(l) - max).exp()).sum::<f64>().ln();
    let terms = other.iter().map(|alternative| {
        let logprob = f64::from(logits[alternative.id as usize]) - log_sum;
        logprob.exp() * (logprob - f64::from(alternative.logprob))
    });
    terms.sum::<f64>().max(0.0)
}

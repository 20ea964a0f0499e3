//! Log-probabilities of a prompt's tokens equal those of the plain llama.cpp loop that gets the prompt one token at a time, within
//! the rounding of another batch.

use baton_engines::llama::reference::{Reference, ReferenceOptions};
use baton_engines::registry::{self, EngineOptions};
use baton_link::Engine;
use baton_schemas::sequence::{GeneratedToken, Logprobs};
use baton_schemas::{SequenceEvent, SequenceRequest, Token};
use futures::StreamExt;
use harness::{MAX_NOISE, long_prompt};

use crate::models::{self, smollm2};

const TEXT: &str = "The capital of France is Paris, and the capital of Norway is Oslo. In winter it is cold there.";

/// By how much rounding moves a log-probability on average, in nats.
const MEAN_NOISE: f32 = 0.03;

async fn scored(engine: &dyn Engine, prompt: &[Token], n_top: u32) -> Vec<GeneratedToken> {
    let request = SequenceRequest {
        prompt: prompt.to_vec(),
        max_tokens: Some(0),
        prompt_logprobs: Some(n_top),
        ..SequenceRequest::default()
    };
    let mut events = engine.generate(request).await.unwrap();
    let mut tokens = Vec::new();
    while let Some(event) = events.next().await {
        if let SequenceEvent::Token(token) = event.unwrap() {
            tokens.push(token);
        }
    }
    tokens
}

fn logprob(logits: &[f32], token: Token) -> f32 {
    let max = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
    (f64::from(logits[token as usize] - max) - sum.ln()) as f32
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompts_log_probabilities_equal_those_of_one_token_at_a_time() {
    let Some(model) = smollm2() else { return };
    let config = || EngineOptions { n_threads: Some(1), ..models::of_llama(&model) };
    let reference = Reference::load(config()).unwrap();
    let prompt = reference.tokenize(TEXT);
    let options = ReferenceOptions { stop_at_end: false, keep_logits: true };
    let expected: Vec<f32> = (1..prompt.len())
        .map(|n| {
            let run = reference.greedy(&[prompt[..n].to_vec()], 1, options).unwrap();
            logprob(&run.logits[0], prompt[n])
        })
        .collect();

    let engine = registry::open(config(), None).unwrap();
    let tokens = scored(&*engine, &prompt, 5).await;
    assert_eq!(tokens.iter().map(|token| token.id).collect::<Vec<_>>(), prompt);
    assert_eq!(tokens[0].logprobs, None, "nothing predicts the first token");
    let logprobs: Vec<&Logprobs> = tokens[1..].iter().map(|token| token.logprobs.as_ref().unwrap()).collect();
    let noise: Vec<f32> = logprobs.iter().zip(&expected).map(|(l, expected)| (l.chosen - expected).abs()).collect();
    let mean = noise.iter().sum::<f32>() / noise.len() as f32;
    let max = noise.iter().copied().fold(0.0, f32::max);
    println!("{} tokens: the difference is {mean:.4} nats on average and {max:.4} at most", noise.len());
    assert!(mean < MEAN_NOISE && max < MAX_NOISE, "{noise:?}");
    for (token, Logprobs { chosen, rank, top }) in tokens[1..].iter().zip(&logprobs) {
        assert_eq!(top.len(), 5);
        let listed = top.iter().position(|other| other.id == token.id).map(|at| at as u32 + 1);
        assert!(if listed.is_some() { *rank == listed } else { *rank > Some(5) }, "{rank:?} {listed:?}");
        assert!(top.is_sorted_by(|a, b| a.logprob >= b.logprob), "{top:?}");
        assert!(
            top.iter().all(|other| (other.id == token.id) == (other.logprob == *chosen) || other.logprob == *chosen)
        );
    }

    // The prompt is cached now, and computed again. A long one takes many steps, more than its reader's window holds.
    let again = scored(&*engine, &prompt, 5).await;
    for (token, again) in tokens.iter().zip(&again) {
        let of = |token: &GeneratedToken| token.logprobs.as_ref().map_or(0.0, |logprobs| logprobs.chosen);
        assert!(token.id == again.id && (of(token) - of(again)).abs() < MAX_NOISE, "{token:?} {again:?}");
    }
    assert_eq!(again.len(), tokens.len());
    let long = reference.tokenize(&long_prompt("long", 300));
    assert_eq!(scored(&*engine, &long, 0).await.len(), long.len());
}

//! Tiny models of the architectures that llama.cpp names the tensors of: it computes them, and every weight matters.

use baton_engines::llama::reference::Reference;
use baton_engines::registry::EngineOptions;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::token::LlamaToken;
use tiny_gguf::Architecture;

use crate::models;

const N_TOKENS: usize = 8;

/// The logits of a model's first tokens, computed one after the other: two tokens in turn.
fn logits(architecture: Architecture, seed: u64) -> Vec<Vec<f32>> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny_gguf::write(&path, architecture, seed);
    let n_bytes = path.metadata().unwrap().len();
    println!("{architecture:?}, seed {seed}: {} KiB", n_bytes >> 10);
    let options = EngineOptions { n_slots: Some(1), n_threads: Some(1), ..models::of_llama(path) };
    let reference = Reference::load(options).unwrap();
    assert!(reference.tokenize("the").len() == 2, "{architecture:?} has the tokenizer of all tiny models");
    let mut context = reference.context(256).unwrap();
    let compute = |i: usize| {
        let mut batch = LlamaBatch::new(1, 1);
        batch.add(LlamaToken(7 * (i % 2) as i32 + 1), i as i32, &[0], true).unwrap();
        context.decode(&mut batch).unwrap();
        context.get_logits_ith(0).to_vec()
    };
    (0..N_TOKENS).map(compute).collect()
}

#[test]
fn every_described_architecture_computes_finite_logits_of_its_seed() {
    for architecture in Architecture::DESCRIBED {
        let first = logits(architecture, 1);
        let second = logits(architecture, 2);
        assert!(first.iter().chain(&second).flatten().all(|value| value.is_finite()), "{architecture:?}");
        assert!(first.iter().zip(&second).all(|(a, b)| a != b), "{architecture:?} ignores its seed");
        // The same token after another history: the cache is used.
        assert!(first.iter().zip(&first[2..]).all(|(a, b)| a != b), "{architecture:?} forgets what came before");
        let spread = |row: &Vec<f32>| row.iter().map(|value| value.abs()).fold(0f32, f32::max);
        println!("{architecture:?}: the largest logit is {}", first.iter().map(spread).fold(0f32, f32::max));
    }
}

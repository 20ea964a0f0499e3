//! Engines that speculate, from the option to the reply: the same text as without, and no guesses for models whose states
//! cannot be taken back.

use std::path::Path;
use std::sync::Arc;

use baton_engines::registry::{self, EngineOptions};
use baton_link::Engine;
use baton_model::gguf::Gguf;
use baton_model::options::Speculation;
use baton_schemas::generate::Sampling;
use baton_schemas::node::TokenizeRequest;
use baton_schemas::sequence::{DraftCounts, Timings};
use baton_schemas::{KeyTag, SequenceEvent, SequenceRequest, Token};
use futures::StreamExt;
use harness::PROMPTS;
use tiny_gguf::Architecture;
use tiny_gguf::file::Value;

use crate::models::{self, smollm2};

async fn engine(model: &Path, speculation: Speculation) -> Arc<dyn Engine> {
    let options = EngineOptions { n_threads: Some(1), speculation: Some(speculation), ..models::of_llama(model) };
    models::start(options, None).await
}

async fn reply(engine: &dyn Engine, request: SequenceRequest) -> (Vec<Token>, Timings) {
    let mut events = engine.generate(request).await.unwrap();
    let (mut tokens, mut at_end) = (Vec::new(), None);
    while let Some(event) = events.next().await {
        match event.unwrap() {
            SequenceEvent::Token(token) => tokens.push(token.id),
            SequenceEvent::Finished { timings, .. } => at_end = Some(timings),
            _ => {}
        }
    }
    (tokens, at_end.unwrap())
}

fn request(prompt: Vec<Token>, temperature: f32, n: u32) -> SequenceRequest {
    let sampling = Sampling { temperature, seed: 7, ..Sampling::default() };
    SequenceRequest { prompt, sampling, max_tokens: Some(n), ignore_eos: true, ..SequenceRequest::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_with_states_says_the_same_with_speculation_and_keeps_more_states() {
    let folder = tempfile::tempdir().unwrap();
    let models = [
        (Architecture::Qwen35, true),
        (Architecture::Lfm2, true),
        (Architecture::NemotronH, true),
        (Architecture::Qwen3Next, false),
        (Architecture::Mamba, false),
    ];
    for (architecture, takes_back) in models {
        let file = folder.path().join("tiny.gguf");
        tiny_gguf::write(&file, architecture, 1);
        let prompt: Vec<Token> = (100..110).cycle().take(60).collect();
        let (mut replies, mut kv) = (Vec::new(), Vec::new());
        for speculation in Speculation::ALL {
            let engine = engine(&file, speculation).await;
            let predicted = replies.first().map(|(tokens, _): &(Vec<Token>, Timings)| tokens.clone());
            let request =
                SequenceRequest { predicted: predicted.unwrap_or_default(), ..request(prompt.clone(), 0.0, 24) };
            replies.push(reply(&*engine, request).await);
            kv.push(engine.info().await.unwrap().memory.kv);
        }
        let [(without, _), (with, timings)] = &replies[..] else { panic!() };
        assert_eq!(with, without, "{architecture:?}");
        // Four slots and two scratch sequences keep eight more states each.
        let state_bytes = Gguf::open(&file).unwrap().kv_shape().unwrap().state_bytes;
        let expected = if takes_back { 6 * 8 * state_bytes } else { 0 };
        assert_eq!(kv[1] - kv[0], expected, "{architecture:?}");
        assert!(takes_back || timings.drafts.all().n == 0, "{architecture:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_models_own_head_guesses_and_its_memory_counts() {
    // With the values of K and V that a token has in all blocks of the head.
    for (architecture, n_heads, n_values, n_sequences) in [
        (Architecture::Qwen35, 1, 2 * 2 * 64, 6),
        (Architecture::NemotronHMoe, 1, 2 * 2 * 64, 6),
        // Latent attention has K alone.
        (Architecture::BailingMoe3, 1, 128 + 32, 6),
        (Architecture::DeepSeek2, 1, 32 + 16, 5),
        (Architecture::GlmDsa, 1, 128 + 64, 5),
        (Architecture::Step35, 2, 2 * 2 * 2 * 32, 5),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tiny.gguf");
        tiny_gguf::write_with_heads(&file, architecture, 1, n_heads);
        let states = Gguf::open(&file).unwrap().kv_shape().unwrap().state_bytes;
        // Rounding exchanges experts, and then replies part: `scheduler/tests/speculation.rs` measures it.
        let n_equal = if architecture == Architecture::Qwen35 { N_TOKENS } else { 1 };
        let more = more_memory_with_guesses(&file, n_equal).await;
        // Eight more states of each sequence.
        assert_eq!(more, 1_024 * n_values * 2 + n_sequences * 8 * states, "{architecture:?}");
    }
}

/// Tokens of a reply with a model's own head.
const N_TOKENS: usize = 200;

/// The bytes by which the memory of KV and states is larger if the model guesses. So many tokens must be those without guesses.
async fn more_memory_with_guesses(file: &Path, n_equal: usize) -> u64 {
    let mut found = Vec::new();
    for speculation in Speculation::ALL {
        let options = EngineOptions {
            n_threads: Some(1),
            n_ctx: Some(512),
            n_cells: Some(1_024),
            speculation: Some(speculation),
            ..models::of_llama(file)
        };
        let engine = models::start(options, None).await;
        // Nothing in the prompt comes twice, so there is nothing else to guess from. A draw between two equally likely tokens would follow
        // their order, which rounding changes where states are kept.
        let (tokens, timings) = reply(&*engine, request((100..140).collect(), 0.0, N_TOKENS as u32)).await;
        found.push((tokens, timings.drafts.mtp.n, engine.info().await.unwrap()));
    }
    let [(without, none, plain), (with, guesses, drafting)] = &found[..] else { panic!() };
    assert_eq!((with.len(), &with[..n_equal], *none), (N_TOKENS, &without[..n_equal], 0));
    println!("{guesses} guesses were verified");
    assert_eq!((plain.fingerprint, &plain.kv), (drafting.fingerprint, &drafting.kv));
    drafting.memory.kv - plain.memory.kv
}

#[tokio::test(flavor = "multi_thread")]
async fn a_real_model_says_the_same_with_speculation() {
    let Some(model) = smollm2() else { return };
    let (off, auto) = (engine(&model, Speculation::Off).await, engine(&model, Speculation::Auto).await);
    let (mut drafts, mut n_equal, mut n_replies) = (DraftCounts::default(), 0, 0);
    for (i, text) in PROMPTS.iter().enumerate().take(8) {
        let text = format!("{text} {text}");
        let tokenize =
            TokenizeRequest { text: text.as_str().into(), add_special: true, parse_special: false, key: KeyTag::NONE };
        let prompt = off.tokenize(&tokenize).await.unwrap();
        let request = request(prompt, if i % 2 == 0 { 0.0 } else { 0.7 }, 32);
        let (expected, _) = reply(&*off, request.clone()).await;
        let predicted = SequenceRequest { predicted: expected.clone(), ..request.clone() };
        for request in [request, predicted] {
            let (found, timings) = reply(&*auto, request).await;
            drafts = drafts.plus(timings.drafts.all());
            n_equal += usize::from(found == expected);
            n_replies += 1;
        }
    }
    println!("{n_equal} of {n_replies} replies are equal; {drafts:?}");
    assert!(drafts.n_accepted > 0, "no guess was right: {drafts:?}");
    // Rounding depends on the processor: `scheduler/tests/speculation.rs` measures it.
    assert!(4 * n_equal >= 3 * n_replies);
}

/// Why an engine does not start with this draft model.
async fn refused(model: &Path, draft: &Path) -> String {
    let options = EngineOptions { draft: Some(draft.to_owned()), ..models::of_llama(model) };
    registry::start(options, None).await.err().unwrap().to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_model_needs_the_models_vocabulary_and_a_state_that_can_be_taken_back() {
    let folder = tempfile::tempdir().unwrap();
    let written = |architecture: Architecture| {
        let file = folder.path().join(format!("{architecture:?}.gguf"));
        tiny_gguf::write(&file, architecture, 1);
        file
    };
    let other = folder.path().join("other.gguf");
    tiny_gguf::write_with_template(&other, Architecture::Llama, 1);
    let mut file = tiny_gguf::file::Gguf::read(&other);
    let tokens = file.metadata.iter_mut().find(|(key, _)| key == "tokenizer.ggml.tokens").unwrap();
    let Value::Array(tokens) = &mut tokens.1 else { panic!() };
    tokens.swap(100, 101);
    file.write(&other);
    let [llama, bert, hybrid] = [Architecture::Llama, Architecture::Bert, Architecture::Qwen35].map(written);
    let fixed = written(Architecture::Qwen3Next);
    let check = async |model: &Path, draft: &Path, why: &str| {
        let error = refused(model, draft).await;
        let expected =
            format!("{} cannot be used as a draft model for this model: {why}. --draft names it.", draft.display());
        assert_eq!(error, expected);
    };
    check(&llama, &other, "its vocabulary is not the model's").await;
    check(&llama, &bert, "it generates no text").await;
    let as_node =
        "its own state cannot be taken back by a token, but it can draft as a node (`baton node --role draft`)";
    check(&llama, &hybrid, as_node).await;
    check(&fixed, &llama, "the model's state cannot be taken back by a token, so no guesses can be verified").await;
    assert!(refused(&llama, &folder.path().join("none.gguf")).await.contains("none.gguf"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draft_model_counts_in_the_memory_and_changes_neither_the_text_nor_the_identity() {
    let folder = tempfile::tempdir().unwrap();
    let [model, draft] = [("model.gguf", 1), ("draft.gguf", 2)].map(|(name, seed)| {
        let file = folder.path().join(name);
        tiny_gguf::write(&file, Architecture::Llama, seed);
        file
    });
    let options = EngineOptions { n_threads: Some(1), n_ctx: Some(512), ..models::of_llama(&model) };
    let mut found = Vec::new();
    for draft in [None, Some(draft)] {
        let engine = models::start(EngineOptions { draft, ..options.clone() }, None).await;
        let (tokens, _) = reply(&*engine, request((100..140).collect(), 0.8, 40)).await;
        found.push((tokens, engine.info().await.unwrap()));
    }
    let [(without, plain), (with, drafting)] = &found[..] else { panic!() };
    assert_eq!(with, without);
    assert_eq!((plain.fingerprint, &plain.kv), (drafting.fingerprint, &drafting.kv));
    // It has as many weights, and as many cells, of equal types.
    assert_eq!((drafting.memory.model, drafting.memory.kv), (2 * plain.memory.model, 2 * plain.memory.kv));
}

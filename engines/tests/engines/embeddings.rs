//! Vectors equal those of a plain llama.cpp loop, for every kind of model, and do not change generated text.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use baton_engines::llama::reference::Reference;
use baton_engines::registry::EngineOptions;
use baton_link::Engine;
use baton_schemas::embed::{EmbedEvent, EmbedSequences, Pooling};
use baton_schemas::generate::Sampling;
use baton_schemas::node::{PairRequest, TokenizeRequest};
use baton_schemas::{EngineError, SequenceEvent, SequenceRequest, Token};
use futures::StreamExt;
use tempfile::TempDir;
use tiny_gguf::Architecture;

use crate::models;

fn config(model: &Path) -> EngineOptions {
    EngineOptions { n_threads: Some(1), n_ctx: Some(4_096), ..models::of_llama(model) }
}

fn tiny(architecture: Architecture, numbers: &[(&str, u32)]) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny_gguf::write_with(&path, architecture, 1, numbers);
    (folder, path)
}

async fn tokens(engine: &dyn Engine, text: &str) -> Vec<Token> {
    let request =
        TokenizeRequest { text: text.into(), add_special: true, parse_special: false, key: Default::default() };
    engine.tokenize(&request).await.unwrap()
}

async fn vectors(engine: &dyn Engine, inputs: &[Vec<Token>]) -> Vec<Vec<f32>> {
    let events = engine.embed(EmbedSequences { inputs: inputs.to_vec(), ..Default::default() }).await.unwrap();
    let vectors = events.filter_map(async |event| match event.unwrap() {
        EmbedEvent::Vector(vector) => Some(vector),
        EmbedEvent::Begun | EmbedEvent::Finished { .. } => None,
    });
    vectors.collect().await
}

/// 1 − cosine of two vectors of length 1.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    1.0 - a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>()
}

/// Checks that the vectors of texts with these lengths, alone and together, equal a plain loop's.
async fn check(model: &Path, pooling: Pooling, lengths: &[usize], tolerance: f32) {
    let path = model.to_owned();
    let reference = config(model);
    let engine = models::start(config(&path), None).await;
    assert_eq!(engine.info().await.unwrap().embedding.unwrap().pooling, pooling);
    let text = tokens(&*engine, "the quick brown fox jumps over the lazy dog by the river").await;
    let inputs: Vec<Vec<Token>> = lengths.iter().map(|&n| text.iter().copied().cycle().take(n).collect()).collect();
    let together = vectors(&*engine, &inputs).await;
    assert_eq!(together.len(), inputs.len());
    let reference = Reference::load(reference).unwrap();
    for (input, packed) in inputs.iter().zip(&together) {
        let plain = reference.embedding(input, pooling).unwrap();
        let alone = vectors(&*engine, std::slice::from_ref(input)).await;
        let d_alone = distance(&alone[0], &plain);
        let d_packed = distance(packed, &plain);
        println!("{} tokens: {d_alone} alone, {d_packed} with others", input.len());
        assert!(d_alone < tolerance && d_packed < tolerance, "{} tokens: {d_alone} {d_packed}", input.len());
    }
}

#[tokio::test]
async fn every_pooling_equals_a_plain_loops() {
    for (number, pooling) in [(1, Pooling::Mean), (2, Pooling::Cls), (3, Pooling::Last)] {
        let (_folder, model) = tiny(Architecture::Bert, &[("pooling_type", number)]);
        check(&model, pooling, &[3, 1, 40, 128, 128, 17], 1e-4).await;
        let (_folder, model) = tiny(Architecture::Qwen3, &[("pooling_type", number)]);
        check(&model, pooling, &[3, 1, 40, 900], 1e-4).await;
    }
}

#[tokio::test]
async fn a_model_without_a_pooling_uses_its_last_token_and_computes_long_texts_in_pieces() {
    for architecture in [Architecture::Llama, Architecture::Qwen3Moe, Architecture::GptOss, Architecture::Mamba] {
        let (_folder, model) = tiny(architecture, &[]);
        check(&model, Pooling::Last, &[5, 513, 1_200, 1, 30], 1e-3).await;
    }
    let (_folder, model) = tiny(Architecture::Bert, &[]);
    check(&model, Pooling::Mean, &[3, 100], 1e-4).await;
}

#[tokio::test]
async fn an_encoder_refuses_to_generate() {
    let (_folder, model) = tiny(Architecture::Bert, &[("pooling_type", 1)]);
    let engine = models::start(config(&model), None).await;
    let info = engine.info().await.unwrap();
    assert!(!info.generates && info.kv.is_none() && info.memory.kv == 0);
    assert_eq!(info.n_ctx as usize, tiny_gguf::bert::N_CTX);
    let text = tokens(&*engine, "quick fox").await;
    assert_eq!(text, [2, 6, 5, 3], "the tokenizer begins and ends a text");
    let request = SequenceRequest { prompt: text.clone(), ..SequenceRequest::default() };
    assert!(matches!(engine.generate(request).await.err(), Some(EngineError::Unsupported { .. })));
    let long = EmbedSequences { inputs: vec![vec![text[1]; tiny_gguf::bert::N_CTX + 1]], ..Default::default() };
    assert!(matches!(engine.embed(long).await.err(), Some(EngineError::ContextOverflow { .. })));
}

#[tokio::test]
async fn a_reranker_without_a_classifier_gives_nothing() {
    let (_folder, model) = tiny(Architecture::Bert, &[("pooling_type", 4)]);
    let engine = models::start(config(&model), None).await;
    let info = engine.info().await.unwrap();
    assert_eq!((info.embedding, info.reranking), (None, None));
    let refused = engine.embed(EmbedSequences { inputs: vec![vec![5]], ..Default::default() }).await.err();
    assert!(matches!(refused, Some(EngineError::Unsupported { .. })));
    let refused = engine.pair(&pair("a", "b")).await.err();
    assert!(matches!(refused, Some(EngineError::Unsupported { .. })));
}

fn pair(query: &str, document: &str) -> PairRequest {
    PairRequest { query: query.into(), document: document.into(), key: Default::default() }
}

/// Starts a tiny reranker. Checks that the scores of pairs, alone and together, equal those of a plain loop.
async fn check_scores(architecture: Architecture, documents: &[&str]) -> (Arc<dyn Engine>, Vec<f32>) {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("reranker.gguf");
    tiny_gguf::write_reranker(&model, architecture, 1);
    let reference = Reference::load(config(&model)).unwrap();
    let engine = models::start(config(&model), None).await;
    let mut pairs = Vec::new();
    for document in documents {
        pairs.push(engine.pair(&pair("quick fox", document)).await.unwrap());
    }
    let together = vectors(&*engine, &pairs).await;
    let mut scores = Vec::new();
    for (pair, packed) in pairs.iter().zip(&together) {
        let plain = reference.scores(pair).unwrap();
        let alone = vectors(&*engine, std::slice::from_ref(pair)).await;
        println!("{} tokens: plain {plain:?}, alone {alone:?}, with others {packed:?}", pair.len());
        assert!((packed[0] - plain[0]).abs() < 2e-3 && (alone[0][0] - plain[0]).abs() < 2e-3);
        assert_eq!((packed.len(), alone[0].len()), (1, 1), "only the score");
        scores.push(packed[0]);
    }
    assert!(scores.iter().any(|score| (score - scores[0]).abs() > 2e-3), "the documents differ: {scores:?}");
    (engine, scores)
}

#[tokio::test]
async fn a_rerankers_scores_equal_a_plain_loops() {
    let long = "river stone ".repeat(50);
    let (engine, _) = check_scores(Architecture::Bert, &["lazy dog", "fox", "", &long, "brown light river"]).await;
    let info = engine.info().await.unwrap();
    let n_ctx = info.reranking.unwrap().n_ctx;
    assert_eq!((info.embedding, info.generates, n_ctx as usize), (None, false, tiny_gguf::bert::N_CTX));
    // [CLS] quick fox [SEP] lazy dog, as llama-server joins them for this tokenizer; the text has no control tokens.
    assert_eq!(engine.pair(&pair("quick fox", "lazy dog")).await.unwrap(), [2, 6, 5, 3, 9, 8]);
    let spelled = engine.pair(&pair("fox", "[SEP]")).await.unwrap();
    assert!(spelled.starts_with(&[2, 5, 3]) && !spelled[3..].contains(&3), "{spelled:?}");
    let too_long = EmbedSequences { inputs: vec![vec![5; tiny_gguf::bert::N_CTX + 1]], ..Default::default() };
    assert!(matches!(engine.embed(too_long).await.err(), Some(EngineError::ContextOverflow { .. })));
}

#[tokio::test]
async fn a_reranker_with_a_form_in_its_file_reads_pairs_in_it() {
    let long = "the fox ".repeat(250);
    let (engine, scores) = check_scores(Architecture::Qwen3, &["the dog", "a", &long, "{query}", "<|end|>"]).await;
    assert!(scores.iter().all(|score| (0.0..=1.0).contains(score)), "probabilities: {scores:?}");
    let written = |query: &str, document: &str| format!("judge\n<Query>: {query}\n<Document>: {document}");
    let (start, end) = (257, 258);
    let spelled = "<|start|>judge<|message|>".repeat(60);
    let pairs = [("q", "d"), ("{document}", "{query}"), ("<|start|>", "x<|end|>"), (&spelled, "<|<|start|>start|>")];
    for (query, document) in pairs {
        let tokens = engine.pair(&pair(query, document)).await.unwrap();
        assert_eq!((tokens[0], &tokens[tokens.len() - 3..]), (start, &[end, 10, start][..]));
        let inner = &tokens[1..tokens.len() - 3];
        assert!(inner.iter().all(|&t| t < start), "only the form writes control tokens: {tokens:?}");
        assert_eq!(engine.detokenize(inner).await.unwrap(), written(query, document));
    }
}

#[tokio::test]
async fn the_real_models_vectors_are_the_plain_loops() {
    let Some(model) = models::smollm2() else { return };
    // On a GPU other kernels compute a text beside others: 9.3e-3 on an H200, whose KV is 0.11 away from that of f16 weights.
    let tolerance = if models::has_gpu() { 2e-2 } else { 5e-3 };
    check(&model, Pooling::Last, &[8, 64, 700], tolerance).await;
}

#[tokio::test]
async fn a_reply_is_the_same_while_vectors_are_computed() {
    let Some(model) = models::smollm2() else { return };
    let engine = models::start(config(&model), None).await;
    let prompt = tokens(&*engine, "The three largest cities of France are").await;
    let request = SequenceRequest {
        prompt,
        sampling: Sampling { temperature: 0.0, repeatable: true, ..Sampling::default() },
        max_tokens: Some(24),
        ignore_eos: true,
        ..SequenceRequest::default()
    };
    let reply = async || {
        let events = engine.generate(request.clone()).await.unwrap();
        let ids = events.filter_map(async |event| match event.unwrap() {
            SequenceEvent::Token(token) => Some(token.id),
            _ => None,
        });
        ids.collect::<Vec<_>>().await
    };
    let before = reply().await;
    let text = tokens(&*engine, &"a text among many others ".repeat(40)).await;
    let many = vec![text; 40];
    let mut vectors = engine.embed(EmbedSequences { inputs: many.clone(), ..Default::default() }).await.unwrap();
    assert!(matches!(vectors.next().await, Some(Ok(EmbedEvent::Vector(_)))));
    assert_eq!(reply().await, before);
    // The reply was generated while texts were waiting.
    assert!(engine.load().await.unwrap().queued > 0, "the texts were done before the reply");
    drop(vectors);
    assert_eq!(reply().await, before);
}

//! What the tests of other engines share that compare them with llama.cpp.

use std::path::Path;
use std::sync::Arc;

use baton_engines::registry::EngineOptions;
use baton_link::Engine;
use baton_link::handoff::KvPuller;
#[cfg(feature = "candle")]
use baton_link::handoff::PullPolicy;
use baton_schemas::node::TokenizeRequest;
use baton_schemas::sequence::{GeneratedToken, SequenceEvent};
use baton_schemas::{SequenceRequest, Token};
use futures::StreamExt;

use crate::{models, peers};

/// Log-probabilities of a text's tokens.
#[cfg(feature = "candle")]
pub(crate) async fn scores(engine: &dyn Engine, tokens: &[Token]) -> Vec<GeneratedToken> {
    let request = SequenceRequest { prompt_logprobs: Some(200), ..peers::request(tokens, 0, None) };
    collect(engine, request).await.0
}

/// A reply of `n` greedy tokens with their log-probabilities, and the number of tokens that were handed over.
pub(crate) async fn reply(
    engine: &dyn Engine,
    prompt: &[Token],
    n: u32,
    url: Option<&str>,
) -> (Vec<GeneratedToken>, u32) {
    let request = SequenceRequest { top_logprobs: Some(200), ignore_eos: true, ..peers::request(prompt, n, url) };
    collect(engine, request).await
}

async fn collect(engine: &dyn Engine, request: SequenceRequest) -> (Vec<GeneratedToken>, u32) {
    let mut events = engine.generate(request).await.unwrap();
    let (mut tokens, mut n_handed) = (Vec::new(), 0);
    while let Some(event) = events.next().await {
        match event.unwrap() {
            SequenceEvent::Token(token) => tokens.push(token),
            SequenceEvent::Handoff(report) => {
                assert_eq!(report.failure, None);
                n_handed = report.n_tokens;
            }
            SequenceEvent::Started { .. } | SequenceEvent::PrefillBegun => {}
            SequenceEvent::Finished { .. } => return (tokens, n_handed),
        }
    }
    panic!("the stream was cut");
}

/// The mean divergence of the second's probabilities from the first's, nats a token, over the likeliest tokens of the first
/// and one more for all others; up to the first token that differs. And the number of tokens that it is over.
pub(crate) fn divergence(expected: &[GeneratedToken], found: &[GeneratedToken]) -> (f64, usize) {
    let mut sum = 0.0;
    let mut n = 0;
    for (expected, found) in expected.iter().zip(found) {
        if let (Some(p), Some(q)) = (&expected.logprobs, &found.logprobs) {
            let (mut rest_p, mut rest_q) = (1.0f64, 1.0f64);
            for top in &p.top {
                let Some(other) = q.top.iter().find(|other| other.id == top.id) else { continue };
                let (log_p, log_q) = (f64::from(top.logprob), f64::from(other.logprob));
                sum += log_p.exp() * (log_p - log_q);
                rest_p -= log_p.exp();
                rest_q -= log_q.exp();
            }
            if rest_p > 1e-6 {
                sum += rest_p * (rest_p / rest_q.max(1e-9)).ln();
            }
            n += 1;
        }
        if expected.id != found.id {
            break;
        }
    }
    (sum / n.max(1) as f64, n)
}

/// The mean KL that different kernels explain.
pub(crate) const MAX_KL: f64 = 1e-2;

pub(crate) async fn llama(model: &Path, puller: Option<Arc<dyn KvPuller>>) -> Arc<dyn Engine> {
    let config = EngineOptions {
        n_threads: Some(1),
        n_ctx: Some(2_048),
        n_slots: Some(2),
        n_ubatch: None,
        ..models::of_llama(model)
    };
    models::start(config, puller).await
}

#[cfg(feature = "candle")]
pub(crate) fn puller() -> Option<Arc<dyn KvPuller>> {
    Some(peers::puller(PullPolicy::default()))
}

pub(crate) async fn tokens(engine: &dyn Engine, text: &str, parse_special: bool) -> Vec<Token> {
    let request = TokenizeRequest { text: text.into(), add_special: true, parse_special, key: Default::default() };
    engine.tokenize(&request).await.unwrap()
}

pub(crate) fn prose() -> String {
    let towns = ["Bergen", "Lisbon", "Kyoto", "Quito", "Dakar"];
    let days =
        (0..60).map(|i| format!("On day {i} the ship sailed from {}, carrying {} crates. ", towns[i % 5], i * 7));
    days.collect()
}

/// Texts of many scripts, and this repository's own.
pub(crate) fn corpus() -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let files = ["README.md", "LICENSE", "engines/model/src/gguf/header.rs", "docs/kv-frames.md", "Makefile"];
    let mut texts: Vec<String> = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(folder.join(file)).unwrap();
        // The context of the engines bounds a text.
        texts.extend(text.chars().collect::<Vec<_>>().chunks(1_500).map(|chars| chars.iter().collect()));
    }
    let short = [
        "",
        " ",
        "\n",
        "  two  spaces ",
        "\t\ttabs\r\n\r\n   lines   \n\n\n",
        "don't DON'T we'll They'VE it's 'quoted' O'Neil's",
        "1 12 123 1234 12345 1,234.50 ٣٤٥ ①②½ Ⅳ",
        "Größe Straße naïve café É́cole ΑΒΓ где? שלום مرحبا हिन्दी ไทย 東京タワー 한국어",
        "👩‍💻🎉🏳️‍🌈 \u{a0}\u{3000}x\u{200b}y \u{e000} \u{feff}",
        "<|im_start|>user\nhi<|im_end|>\n<bos><start_of_turn>model\n<end_of_turn><eos></s><unk>",
        "<|im_start<|im_end|>|> <0x0A> ▁x ▁▁",
        "if (x <= 10) {\n\t\treturn a[i]+b;\n}  // ok\n---***===___",
    ];
    texts.extend(short.map(str::to_owned));
    texts.push("ab".repeat(1_000));
    texts.push("a ".repeat(500));
    texts
}

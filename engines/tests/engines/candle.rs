//! The candle engine keeps the contract, and gives llama.cpp's tokens and probabilities: alone, and with KV handed over in
//! either direction.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use baton_engines::registry::{self, EngineKind, EngineOptions};
use baton_link::Engine;
#[cfg(feature = "llama")]
use baton_schemas::node::Role;
use baton_schemas::{EngineError, SequenceRequest, Token};
use tiny_gguf::Architecture;

use crate::{contract, models, peers};

pub(crate) fn config(model: &Path) -> EngineOptions {
    EngineOptions { n_ctx: Some(2_048), max_queued: Some(8), n_ubatch: None, ..models::of(EngineKind::Candle, model) }
}

fn tiny(folder: &Path, architecture: Architecture) -> PathBuf {
    let path = folder.join("tiny.gguf");
    tiny_gguf::write_with_template(&path, architecture, 1);
    path
}

#[tokio::test]
#[ignore = "minutes: make test-long; make test checks the contract with random weights"]
async fn candle_keeps_the_contract() {
    let Some(model) = models::smollm2() else { return };
    contract::check(models::start(config(&model), None).await).await;
}

/// Quick enough for a machine that emulates another.
#[tokio::test]
async fn candle_with_random_weights_keeps_the_contract() {
    let folder = tempfile::tempdir().unwrap();
    contract::check(models::start(config(&tiny(folder.path(), Architecture::Llama)), None).await).await;
}

#[test]
fn models_that_are_not_computed_are_refused_in_words() {
    let folder = tempfile::tempdir().unwrap();
    for (architecture, part) in [
        (Architecture::GptOss, "its architecture is \"gpt-oss\""),
        (Architecture::Mamba, "its architecture is \"mamba\""),
    ] {
        let error = registry::open(config(&tiny(folder.path(), architecture)), None).err().unwrap().to_string();
        assert!(error.contains(part) && error.contains("llama, qwen2, qwen3, gemma3"), "{error}");
    }
}

#[tokio::test]
async fn a_full_cache_and_a_long_prompt_are_refused_or_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let model = tiny(folder.path(), Architecture::Qwen3);
    let config = EngineOptions { n_ctx: Some(256), n_cells: Some(512), n_slots: Some(4), ..config(&model) };
    let engine = models::start(config, None).await;
    let long: Vec<Token> = (0..300).map(|i| 3 + i % 50).collect();
    let refused = engine.generate(peers::request(&long, 4, None)).await.err().unwrap();
    assert_eq!(refused, EngineError::ContextOverflow { n_prompt: 300, n_ctx: 256 });
    // Together they need more than the cache has, so some wait or start again; all end.
    let replies = (0..4).map(|salt| {
        let prompt: Vec<Token> = (0..200).map(|i| 3 + (i * 7 + salt) % 90).collect();
        let engine = Arc::clone(&engine);
        async move {
            let request = SequenceRequest { ignore_eos: true, ..peers::request(&prompt, 40, None) };
            peers::generate(&*engine, request).await.tokens.len()
        }
    });
    assert_eq!(futures::future::join_all(replies).await, [40; 4]);
}

#[cfg(feature = "llama")]
mod beside_llama {
    use super::*;
    use crate::beside_llama::{MAX_KL, corpus, divergence, llama, prose, puller, reply, scores, tokens};

    /// The mean KL that GPUs' kernels for quantized weights explain: they round activations to 8 bits. llama.cpp's own differ as
    /// much between CUDA and processors (docs/results/backends.md).
    const MAX_GPU_KL: f64 = 2e-2;

    /// One prompt, with 40 tokens of text after it.
    async fn check_computes_and_hands_over(model: &Path, n_prompt: usize) {
        let llama_alone = llama(model, puller()).await;
        let candle_alone = models::start(config(model), puller()).await;
        let (of_llama, of_candle) = (llama_alone.info().await.unwrap(), candle_alone.info().await.unwrap());
        assert_eq!(of_llama.fingerprint, of_candle.fingerprint);
        let kv = |info: &baton_schemas::node::NodeInfo| info.kv.clone().unwrap();
        assert_eq!(kv(&of_llama), kv(&of_candle), "layout, rotation and canary");

        let computes_alike = of_candle.devices.iter().all(|device| device.starts_with("CPU"));
        let most = if computes_alike { MAX_KL } else { MAX_GPU_KL };
        let text = tokens(&*llama_alone, &prose(), false).await;
        let (kl, n) =
            divergence(&scores(&*llama_alone, &text[..400]).await, &scores(&*candle_alone, &text[..400]).await);
        println!("{}: mean KL {kl:.1e} over {n} tokens of a text", of_llama.architecture);
        assert!(n > 300 && kl <= most, "{kl} over {n} tokens");

        let prompt = &text[..n_prompt];
        let (expected, _) = reply(&*llama_alone, prompt, 24, None).await;
        let node_of = |engine: Arc<dyn Engine>| peers::node(engine, Role::Prefill, peers::KEY);
        let from_candle = node_of(candle_alone.clone()).await;
        let decoder = llama(model, puller()).await;
        let (found, n_handed) = reply(&*decoder, prompt, 24, Some(&from_candle.url)).await;
        let (kl, n) = divergence(&expected, &found);
        println!("{}: candle to llama: mean KL {kl:.1e} over {n} tokens", of_llama.architecture);
        assert_eq!(n_handed as usize, n_prompt - 1);
        assert!(n >= 4 && kl <= most, "{kl} over {n} tokens");

        let (expected, _) = reply(&*candle_alone, prompt, 24, None).await;
        let from_llama = node_of(llama_alone.clone()).await;
        let decoder = models::start(config(model), puller()).await;
        let (found, n_handed) = reply(&*decoder, prompt, 24, Some(&from_llama.url)).await;
        let (kl, n) = divergence(&expected, &found);
        println!("{}: llama to candle: mean KL {kl:.1e} over {n} tokens", of_llama.architecture);
        assert_eq!(n_handed as usize, n_prompt - 1);
        assert!(n >= 4 && kl <= most, "{kl} over {n} tokens");

        // Candle's own KV comes back to the bit.
        let from_itself = node_of(candle_alone).await;
        let decoder = models::start(config(model), puller()).await;
        let (found, _) = reply(&*decoder, prompt, 24, Some(&from_itself.url)).await;
        let (kl, n) = divergence(&expected, &found);
        assert!(n >= 4 && kl == 0.0, "{kl} over {n} tokens");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn smollm2_is_computed_and_handed_over_as_by_llama() {
        let Some(model) = models::smollm2() else { return };
        check_computes_and_hands_over(&model, 300).await;
    }

    /// The prompt is longer than the sliding window.
    #[tokio::test(flavor = "multi_thread")]
    async fn gemma3_is_computed_and_handed_over_as_by_llama() {
        let Some(model) = models::gemma3() else { return };
        check_computes_and_hands_over(&model, 700).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn other_architectures_are_computed_and_handed_over_as_by_llama() {
        for architecture in [Architecture::Llama, Architecture::Qwen2, Architecture::Qwen3, Architecture::Gemma3] {
            let folder = tempfile::tempdir().unwrap();
            check_computes_and_hands_over(&tiny(folder.path(), architecture), 300).await;
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn tokens_are_those_of_llama_cpp() {
        let folder = tempfile::tempdir().unwrap();
        let tiny = tiny(folder.path(), Architecture::Llama);
        for model in [models::smollm2(), models::gemma3(), Some(tiny)].into_iter().flatten() {
            let (llama, candle) = (llama(&model, None).await, models::start(config(&model), None).await);
            for text in corpus() {
                for parse_special in [false, true] {
                    let expected = tokens(&*llama, &text, parse_special).await;
                    let found = tokens(&*candle, &text, parse_special).await;
                    let differs = expected.iter().zip(&found).position(|(a, b)| a != b);
                    assert!(expected == found, "{}: first at {differs:?}: {text:?}", model.display());
                }
            }
            let all: Vec<Token> = (0..llama.info().await.unwrap().n_vocab).collect();
            let of = (llama.pieces(&all).await.unwrap(), candle.pieces(&all).await.unwrap());
            let differs = of.0.iter().zip(&of.1).position(|(a, b)| a != b);
            assert!(of.0 == of.1, "{}: token {differs:?}", model.display());
            let facts =
                |info: baton_schemas::node::NodeInfo| (info.facts.bos_token, info.facts.eos_token, info.facts.infill);
            assert_eq!(facts(llama.info().await.unwrap()), facts(candle.info().await.unwrap()));
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn chats_are_rendered_as_by_llama() {
        let Some(model) = models::smollm2() else { return };
        let (llama, candle) = (llama(&model, None).await, models::start(config(&model), None).await);
        let conversation = serde_json::json!({ "messages": [
            { "role": "system", "content": "Be brief." },
            { "role": "user", "content": "Say <|im_end|> and <|im_start|>system twice." },
        ] });
        let conversation = serde_json::from_value(conversation).unwrap();
        assert_eq!(
            llama.render(&conversation, Default::default()).await.unwrap(),
            candle.render(&conversation, Default::default()).await.unwrap()
        );
    }
}

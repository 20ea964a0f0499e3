//! One engine prefills and another decodes, with KV handed over by TCP: the reply equals that of a single engine.

use std::sync::Arc;

use baton_engines::registry::EngineOptions;
use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::Engine;
use baton_link::handoff::{HttpPuller, PullPolicy};
use baton_schemas::handoff::HandoffFailure;
use baton_schemas::node::Role;
use baton_schemas::{SequenceRequest, Token};
use futures::StreamExt;

use crate::peers::{Reply, TestNode};
use crate::{models, peers};

async fn generate(engine: &dyn Engine, prompt: &[Token], n: u32, source: Option<&TestNode>) -> Reply {
    peers::generate(engine, peers::request(prompt, n, source.map(|node| node.url.as_str()))).await
}

fn puller() -> Arc<HttpPuller> {
    peers::puller(PullPolicy::default())
}

fn sim() -> SimConfig {
    SimConfig { prefill_tps: 50_000.0, decode_tps: 5_000.0, ..SimConfig::default() }
}

#[tokio::test]
async fn a_simulated_prompt_is_handed_over() {
    let node = peers::node(Arc::new(SimEngine::new(sim())), Role::Prefill, peers::KEY).await;
    let alone = SimEngine::new(sim());
    let decoder = SimEngine::with_puller(sim(), Some(puller()));
    let prompt: Vec<Token> = (0..2_000).map(|i| 1 + i % 250).collect();
    let expected = generate(&alone, &prompt, 20, None).await.tokens;
    let reply = generate(&decoder, &prompt, 20, Some(&node)).await;
    assert_eq!(reply.tokens, expected);
    let handoff = reply.handoff.unwrap();
    assert_eq!((handoff.n_tokens, handoff.failure), (1_999, None));
    assert_eq!(reply.timings.prompt_n, 0, "nothing was left to compute here");
    assert!(handoff.n_bytes > 1_999 * 256, "{handoff:?}");
}

#[tokio::test]
async fn chunks_larger_than_a_frame_are_cut() {
    // Of 9,000 tokens, the first chunk is half.
    let sim = || SimConfig { chunk_tokens: 8_192, n_ctx: 16_384, ..sim() };
    let node = peers::node(Arc::new(SimEngine::new(sim())), Role::Prefill, peers::KEY).await;
    let decoder = SimEngine::with_puller(sim(), Some(puller()));
    let reply = generate(&decoder, &peers::tokens(9_000), 2, Some(&node)).await;
    let handoff = reply.handoff.unwrap();
    assert_eq!((handoff.n_tokens, handoff.failure), (8_999, None), "{handoff:?}");
}

/// Sends an ephemeral prompt twice: the second time, nothing of it is cached anywhere.
async fn ephemeral_prompts_are_not_cached(decoder: &dyn Engine, prompt: &[Token], node: &TestNode) {
    for _ in 0..2 {
        let request = peers::request(prompt, 2, Some(&node.url));
        let reply = peers::generate(decoder, baton_schemas::SequenceRequest { ephemeral: true, ..request }).await;
        let handoff = reply.handoff.unwrap();
        assert_eq!((handoff.n_tokens as usize, handoff.n_cached), (prompt.len() - 1, 0), "{handoff:?}");
    }
}

#[tokio::test]
async fn an_ephemeral_prompt_stays_on_neither_simulated_node() {
    let node = peers::node(Arc::new(SimEngine::new(sim())), Role::Prefill, peers::KEY).await;
    let decoder = SimEngine::with_puller(sim(), Some(puller()));
    ephemeral_prompts_are_not_cached(&decoder, &peers::tokens(300), &node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_measurement_gives_way_on_the_prefill_node() {
    let Some(model) = models::smollm2() else { return };
    let config = EngineOptions { n_threads: Some(1), n_ctx: Some(1_024), n_slots: Some(2), ..models::of_llama(model) };
    let prefill = models::start(config.clone(), None).await;
    let node = peers::node(Arc::clone(&prefill) as Arc<dyn Engine>, Role::Prefill, peers::KEY).await;
    let decoder = models::start(config, Some(puller())).await;
    // A request that is not read to its end keeps its slot.
    let unread = SequenceRequest { ignore_eos: true, ..peers::request(&[100, 101, 102], 900, None) };
    let mut unread = prefill.generate(unread).await.unwrap();
    assert!(unread.next().await.unwrap().is_ok());
    let prompt: Vec<Token> = (1_000..1_200).collect();
    let request = peers::request(&prompt, 2, Some(&node.url));
    let measurement = SequenceRequest { ephemeral: true, gives_way: true, ..request.clone() };
    let handoff = peers::generate(decoder.as_ref(), measurement).await.handoff.unwrap();
    assert_eq!((handoff.failure, handoff.n_tokens), (Some(HandoffFailure::GaveWay), 0));
    // A request's own handoff goes on beside the other.
    let handoff = peers::generate(decoder.as_ref(), request).await.handoff.unwrap();
    assert_eq!((handoff.failure, handoff.n_tokens), (None, 199));
}

#[tokio::test]
async fn after_a_failed_pull_the_prompt_is_computed_here_and_the_reason_is_reported() {
    let prompt: Vec<Token> = (0..500).map(|i| 1 + i % 250).collect();
    let expected = generate(&SimEngine::new(sim()), &prompt, 10, None).await.tokens;
    let other_model = SimConfig { model: "another".into(), ..sim() };
    let cases = [
        (peers::node(Arc::new(SimEngine::new(sim())), Role::Both, "another key").await, HandoffFailure::KeyRefused),
        (peers::node(Arc::new(SimEngine::new(sim())), Role::Decode, peers::KEY).await, HandoffFailure::PrefillRefused),
        (
            peers::node(Arc::new(SimEngine::new(other_model)), Role::Prefill, peers::KEY).await,
            HandoffFailure::FingerprintMismatch,
        ),
    ];
    let cases = cases.iter().map(|(node, failure)| (node.url.as_str(), *failure));
    for (url, expected_failure) in cases.chain([("http://127.0.0.1:9", HandoffFailure::PrefillDown)]) {
        let decoder = SimEngine::with_puller(sim(), Some(puller()));
        let reply = peers::generate(&decoder, peers::request(&prompt, 10, Some(url))).await;
        assert_eq!(reply.tokens, expected);
        let handoff = reply.handoff.unwrap();
        assert_eq!((handoff.n_tokens, handoff.failure), (0, Some(expected_failure)));
        assert_eq!(reply.timings.prompt_n, 499);
    }
}

#[cfg(feature = "llama")]
mod llama {
    use baton_engines::registry::EngineOptions;
    use baton_link::handoff::KvPuller;
    use baton_schemas::kv::Codec;
    use tiny_gguf::Architecture;

    use super::*;
    use crate::models;

    fn config() -> Option<EngineOptions> {
        let model = models::whole_smollm2()?;
        Some(EngineOptions { n_threads: Some(1), n_ctx: Some(1_536), n_slots: Some(2), ..models::of_llama(model) })
    }

    async fn start(config: EngineOptions, puller: Option<Arc<HttpPuller>>) -> Arc<dyn Engine> {
        models::start(config, puller.map(|puller| puller as Arc<dyn KvPuller>)).await
    }

    async fn prompt(engine: &dyn Engine, n: usize, salt: usize) -> Vec<Token> {
        let text = format!("Story {salt}. ")
            + &"The keeper of the lighthouse counted ships, stars and years. ".repeat(n / 8 + 1);
        let request = baton_schemas::node::TokenizeRequest {
            text: text.into(),
            add_special: true,
            parse_special: false,
            key: Default::default(),
        };
        let mut tokens = engine.tokenize(&request).await.unwrap();
        assert!(tokens.len() >= n);
        tokens.truncate(n);
        tokens
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn ubatches_larger_than_a_frame_are_handed_over_in_several() {
        // One has a sliding window, whose rows the engine forgets with the next ubatch.
        for architecture in [Architecture::Llama, Architecture::GptOss] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("tiny.gguf");
            tiny_gguf::write(&path, architecture, 1);
            let (n_ctx, n_ubatch) = (Some(8_448), Some(8_192));
            let config =
                EngineOptions { n_threads: Some(1), n_slots: Some(1), n_ctx, n_ubatch, ..models::of_llama(&path) };
            let prefill = start(config.clone(), None).await;
            let node = peers::node(prefill.clone(), Role::Prefill, peers::KEY).await;
            // Of these, the first chunk is half, which is more than 4,096.
            let tokens: Vec<Token> = (0..8_300).map(|i| 3 + i % 50).collect();
            let decoder = start(config, Some(puller())).await;
            let reply = generate(&*decoder, &tokens, 4, Some(&node)).await;
            let handoff = reply.handoff.unwrap();
            assert_eq!((handoff.n_tokens, handoff.failure), (8_299, None), "{architecture:?}: {handoff:?}");
            // The prefill node goes on from its own KV, which it has cached: computing takes longer than all else here.
            let expected = generate(&*prefill, &tokens, 4, None).await;
            assert_eq!(expected.timings.prompt_n, 1);
            let expected = expected.tokens;
            assert_eq!(reply.tokens, expected, "{architecture:?}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn lossy_codecs_shrink_a_prompt_and_keep_its_continuation() {
        let Some(config) = config() else { return };
        let prefill = start(config.clone(), None).await;
        let node = peers::node(prefill.clone(), Role::Prefill, peers::KEY).await;
        let tokens = prompt(&*prefill, 700, 4).await;
        let expected = generate(&*prefill, &tokens, 6, None).await.tokens;
        let identity = prefill.info().await.unwrap().kv.unwrap();
        let rotation = identity.rotation.expect("K's rotation is known").sections.remove(0).unwrap();
        assert_eq!((rotation.head_size, rotation.frequencies.len(), rotation.frequencies[0]), (64, 32, 1.0));
        let plain = 699 * identity.layout.bytes_per_position() as u64;
        for (codec, ratio) in [(Codec::Q8_0, 1.8), (Codec::Kvq, 3.0), (Codec::KvqFast, 3.5)] {
            let policy = PullPolicy { codecs: vec![codec], ..PullPolicy::default() };
            let decoder = start(config.clone(), Some(peers::puller(policy))).await;
            let reply = generate(&*decoder, &tokens, 6, Some(&node)).await;
            let handoff = reply.handoff.unwrap();
            assert_eq!((handoff.n_tokens, handoff.failure), (699, None), "{codec:?}");
            let found = plain as f64 / handoff.n_bytes as f64;
            assert!(found > ratio, "{codec:?}: {found:.2} times smaller");
            // The text repeats itself, so its continuation is certain.
            assert_eq!(reply.tokens, expected, "{codec:?}");
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn greedy_output_is_the_same_with_and_without_a_handoff() {
        let Some(config) = config() else { return };
        for n_ubatch in [64, 100, 512] {
            let config = EngineOptions { n_ubatch: Some(n_ubatch), ..config.clone() };
            let prefill = start(config.clone(), None).await;
            let node = peers::node(prefill.clone(), Role::Prefill, peers::KEY).await;
            let lengths: &[usize] = if n_ubatch == 512 { &[2, 65, 1_300] } else { &[3, 300] };
            for (salt, &n) in lengths.iter().enumerate() {
                // With a puller, this engine computes in the same chunks.
                let alone = start(config.clone(), Some(puller())).await;
                let decoder = start(config.clone(), Some(puller())).await;
                let prompt = prompt(alone.as_ref(), n, salt).await;
                let expected = generate(alone.as_ref(), &prompt, 24, None).await.tokens;
                let reply = generate(decoder.as_ref(), &prompt, 24, Some(&node)).await;
                let handoff = reply.handoff.unwrap();
                println!("ubatch {n_ubatch}, {n} tokens: {handoff:?}");
                assert_eq!((handoff.n_tokens as usize, handoff.failure), (n - 1, None));
                assert_eq!(reply.tokens, expected, "ubatch {n_ubatch}, {n} tokens");
            }
        }
    }

    /// From 64 rows on, llama.cpp's rounding depends on the position of cells, so a calibration's prompts must not
    /// change the position of others' cells.
    #[tokio::test(flavor = "multi_thread")]
    async fn ephemeral_prompts_do_not_change_later_replies() {
        let Some(config) = config() else { return };
        let node = peers::node(start(config.clone(), None).await, Role::Prefill, peers::KEY).await;
        let alone = start(config.clone(), Some(puller())).await;
        let decoder = start(config, Some(puller())).await;
        let made_up: Vec<Token> = (0..150).map(|i| 1_000 + 7 * i).collect();
        ephemeral_prompts_are_not_cached(decoder.as_ref(), &made_up, &node).await;
        let prompt = prompt(alone.as_ref(), 300, 9).await;
        let expected = generate(alone.as_ref(), &prompt, 24, None).await.tokens;
        let reply = generate(decoder.as_ref(), &prompt, 24, Some(&node)).await;
        assert_eq!((reply.handoff.unwrap().n_tokens, reply.tokens), (299, expected));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_second_turn_moves_only_what_is_new() {
        let Some(config) = config() else { return };
        let prefill = start(config.clone(), None).await;
        let node = peers::node(prefill.clone(), Role::Prefill, peers::KEY).await;
        let decoder = start(config.clone(), Some(puller())).await;
        let whole = prompt(decoder.as_ref(), 500, 0).await;
        let first = generate(decoder.as_ref(), &whole[..300], 10, Some(&node)).await;
        assert_eq!(first.handoff.unwrap().n_tokens, 299);
        let second_turn = [&whole[..300], &first.tokens, &whole[300..]].concat();
        let second = generate(decoder.as_ref(), &second_turn, 10, Some(&node)).await;
        let handoff = second.handoff.unwrap();
        // The decode node has cached the first turn and its reply except for the last token; the prefill node has
        // cached the first turn.
        assert_eq!(handoff.n_tokens as usize, second_turn.len() - 1 - 309);
        assert!(handoff.n_cached >= 299, "{handoff:?}");
        // For another decode node, everything is transferred but nothing is computed twice.
        let other = start(config, Some(puller())).await;
        let third = generate(other.as_ref(), &second_turn, 10, Some(&node)).await;
        let handoff = third.handoff.unwrap();
        assert_eq!(
            (handoff.n_tokens as usize, handoff.n_cached as usize),
            (second_turn.len() - 1, second_turn.len() - 1)
        );
    }
}

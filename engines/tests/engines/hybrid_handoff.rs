//! Models with states, with KV handed over by TCP: the reply equals that of a single engine, and a later turn starts where the
//! states are.

use std::sync::Arc;

use baton_engines::registry::EngineOptions;
use baton_link::Engine;
use baton_link::handoff::PullPolicy;
use baton_schemas::Token;
use baton_schemas::handoff::KvSource;
use baton_schemas::kv::Codec;
use baton_schemas::node::Role;
use tiny_gguf::Architecture;

use crate::peers::Reply;
use crate::{models, peers};

/// The tokens of a prompt that the decode node computes itself: the head of the reply, where no control token shows it, and the
/// last one.
const N_HEAD: u32 = 5;

async fn check(architecture: Architecture) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny_gguf::write(&path, architecture, 1);
    let options = EngineOptions { n_threads: Some(1), n_ctx: Some(2_048), n_slots: Some(2), ..models::of_llama(path) };
    let puller = || Some(peers::puller(PullPolicy::default()) as Arc<_>);
    let prefill = models::start(options.clone(), None).await;
    assert!(prefill.info().await.unwrap().kv.is_some(), "{architecture:?}");
    let node = peers::node(Arc::clone(&prefill), Role::Prefill, peers::KEY).await;
    let alone = models::start(options.clone(), None).await;
    let text = |seed: u32, n: u32| (0..n).map(|i| 3 + (i * (2 * seed + 7) + seed) % 240).collect::<Vec<Token>>();
    let ask = async |engine: &Arc<dyn Engine>, prompt: &[Token], pulls: bool| -> Reply {
        peers::generate(&**engine, peers::request(prompt, 24, pulls.then_some(node.url.as_str()))).await
    };
    let first = text(1, 700);
    let n = first.len() as u32 - N_HEAD;
    let expected = ask(&alone, &first, false).await.tokens;
    let second = [&first[..], &expected, &text(2, 200)].concat();
    let expected_second = ask(&alone, &second, false).await.tokens;
    // The second node finds all of it cached on the prefill node, with the states of its end.
    for n_cached in [0, n] {
        let decoder = models::start(options.clone(), puller()).await;
        let reply = ask(&decoder, &first, true).await;
        let handoff = reply.handoff.unwrap();
        let numbers = (handoff.failure, handoff.n_tokens, handoff.n_cached, reply.timings.prompt_n);
        assert_eq!(numbers, (None, n, n_cached, N_HEAD), "{architecture:?}");
        assert_eq!(reply.tokens, expected, "{architecture:?}");
        // The next turn pulls what follows its own reply, of which it never computed the last token.
        let reply = ask(&decoder, &second, true).await;
        let (handoff, n_known) = (reply.handoff.unwrap(), (first.len() + expected.len()) as u32 - 1);
        assert_eq!((handoff.failure, handoff.n_tokens), (None, second.len() as u32 - N_HEAD - n_known));
        assert_eq!(reply.tokens, expected_second, "{architecture:?}");
        assert_eq!(reply.timings.prompt_n, N_HEAD, "{architecture:?}");
        // Asked for the first turn again, it computes one token.
        let reply = ask(&decoder, &first, true).await;
        assert_eq!((reply.handoff, reply.timings.prompt_n, reply.tokens), (None, 1, expected.clone()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_of_a_gated_delta_net_is_handed_over_with_its_states() {
    check(Architecture::Qwen35).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn so_is_one_of_mamba_beside_attention() {
    check(Architecture::NemotronH).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn so_is_one_of_short_convolutions() {
    check(Architecture::Lfm2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn so_is_one_of_a_model_that_only_has_states() {
    check(Architecture::Mamba2).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn narrowed_states_come_in_fewer_bytes_and_the_reply_goes_on_from_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny_gguf::write(&path, Architecture::Qwen35, 1);
    let options = EngineOptions { n_threads: Some(1), n_ctx: Some(2_048), n_slots: Some(2), ..models::of_llama(path) };
    let prefill = models::start(options.clone(), None).await;
    let plain_bytes = prefill.info().await.unwrap().kv.unwrap().state_bytes();
    let node = peers::node(Arc::clone(&prefill), Role::Prefill, peers::KEY).await;
    let prompt: Vec<Token> = (0..700).map(|i| 3 + (i * 9 + 1) % 240).collect();
    // Those of int8 have scales, too.
    for (codec, at_most) in [(Codec::StateF16, plain_bytes * 6 / 10), (Codec::StateInt8, plain_bytes * 4 / 10)] {
        let policy = PullPolicy { codecs: vec![codec], ..PullPolicy::default() };
        let decoder = models::start(options.clone(), Some(peers::puller(policy) as Arc<_>)).await;
        // So that the last chunk is sized for them.
        decoder.measure_link(&KvSource::at(node.url.as_str())).await.unwrap();
        let reply = peers::generate(&*decoder, peers::request(&prompt, 24, Some(node.url.as_str()))).await;
        let handoff = reply.handoff.unwrap();
        let numbers = (handoff.failure, handoff.n_tokens, reply.timings.prompt_n, reply.tokens.len());
        assert_eq!(numbers, (None, 700 - N_HEAD, N_HEAD, 24), "{codec:?}");
        let state_bytes = handoff.state_bytes - handoff.checkpoint_bytes;
        assert!(state_bytes > 0 && state_bytes <= at_most, "{codec:?}: {state_bytes} of {plain_bytes}");
    }
}

/// A control token of the tiny models.
const END: Token = 258;

/// Three conversations begin with the same 1,200 tokens. A control token may follow these; without one, only
/// comparing the conversations shows where they end.
async fn check_branches(architecture: Architecture, separator: &[Token], known: [u32; 3]) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    tiny_gguf::write(&path, architecture, 1);
    let options = EngineOptions { n_threads: Some(1), n_ctx: Some(2_048), n_slots: Some(4), ..models::of_llama(path) };
    let prefill = models::start(options.clone(), None).await;
    let layout = prefill.info().await.unwrap().kv.unwrap().layout;
    let node = peers::node(Arc::clone(&prefill), Role::Prefill, peers::KEY).await;
    let alone = models::start(options.clone(), None).await;
    let decoder = models::start(options, Some(peers::puller(PullPolicy::default()) as Arc<_>)).await;
    let text = |seed: u32, n: u32| (0..n).map(|i| 3 + (i * (2 * seed + 7) + seed) % 240).collect::<Vec<Token>>();
    for (seed, n_known) in (2..).zip(known) {
        let prompt = [&text(1, 1_200)[..], separator, &text(seed, 400)].concat();
        let n = prompt.len() as u32 - N_HEAD;
        let expected = peers::generate(&*alone, peers::request(&prompt, 24, None)).await.tokens;
        let reply = peers::generate(&*decoder, peers::request(&prompt, 24, Some(node.url.as_str()))).await;
        let handoff = reply.handoff.unwrap();
        let what = format!("{architecture:?}, {separator:?}, conversation {seed}");
        assert_eq!((handoff.failure, reply.tokens), (None, expected), "{what}");
        assert_eq!((handoff.n_tokens, reply.timings.prompt_n), (n - n_known, N_HEAD), "{what}");
        println!("{what}: {} states", handoff.state_bytes as usize / layout.state_bytes());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn conversations_with_one_system_prompt_pull_it_once() {
    for architecture in [Architecture::Qwen35, Architecture::NemotronH, Architecture::Lfm2] {
        check_branches(architecture, &[END], [0, 1_200, 1_200]).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn where_a_conversation_was_left_before_the_next_one_goes_on() {
    check_branches(Architecture::Lfm2, &[], [0, 0, 1_200]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn so_is_one_of_compressed_rows() {
    check(Architecture::DeepSeek4).await;
}

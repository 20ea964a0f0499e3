//! Pairs of nodes with different files: the canary accepts a node only if it computes nearly the same rows and states.

use std::path::Path;
use std::sync::Arc;

use baton_engines::registry::EngineOptions;
use baton_link::handoff::canary::{self, ComputedKv, Farthest};
use baton_link::handoff::{KvPuller, PullPolicy};
use baton_link::{Engine, KvEvent};
use baton_schemas::handoff::{HandoffFailure, PrefillRequest};
use baton_schemas::kv::{Chunk, Codec, HandoffId};
use baton_schemas::node::{Role, TokenizeRequest};
use baton_schemas::{CacheScope, SequenceRequest, Token};
use futures::StreamExt;
use tiny_gguf::Architecture;
use tiny_gguf::file::{Gguf, Tensor};

use crate::models;
use crate::peers;

/// Writes a copy of `model` with every quantized tensor as f16, after `change` was applied to each tensor. Norms and
/// biases stay f32, as llama.cpp wants them.
fn as_f16(model: &Path, to: &Path, change: impl Fn(&str, &mut Tensor)) {
    let mut file = Gguf::read(model);
    file.tensors.iter_mut().for_each(|(name, tensor)| change(name, tensor));
    file.write(to);
}

/// Reorders the rows of each Q and K head from interleaved to half-split order, like a converter that confuses the two.
fn other_rope_order(name: &str, tensor: &mut Tensor) {
    const HEAD: usize = 64;
    if !name.ends_with("attn_q.weight") && !name.ends_with("attn_k.weight") {
        return;
    }
    let row = tensor.dims[0];
    let order = (0..tensor.dims[1]).map(|r| r / HEAD * HEAD + (r % HEAD % 32) * 2 + r % HEAD / 32);
    tensor.values = order.flat_map(|r| tensor.values[r * row..(r + 1) * row].to_vec()).collect();
}

async fn start(model: &Path, puller: Option<Arc<dyn KvPuller>>) -> Arc<dyn Engine> {
    let config = EngineOptions { n_threads: Some(1), n_ctx: Some(1_024), n_slots: Some(2), ..models::of_llama(model) };
    models::start(config, puller).await
}

/// Between equal weights of 4 and of 16 bits: 0.04 on a processor, 0.11 on an H200, whose kernels multiply activations of 8 bits.
fn max_distance() -> f64 {
    if models::has_gpu() { 0.2 } else { 0.1 }
}

/// Pulls a prompt of 200 tokens and decodes 8. Returns the handoff's failure, its number of tokens, and the reply.
async fn pull(decode_model: &Path, prefill_url: &str, limit: Option<f64>) -> (Option<HandoffFailure>, u32, Vec<Token>) {
    let policy = PullPolicy { max_canary_distance: limit, ..PullPolicy::default() };
    let engine = start(decode_model, Some(peers::puller(policy))).await;
    let text = "The lighthouse keeper wrote down every ship that passed, its flag and its cargo. ".repeat(20);
    let text = TokenizeRequest { text: text.into(), add_special: true, parse_special: false, key: Default::default() };
    let mut prompt = engine.tokenize(&text).await.unwrap();
    prompt.truncate(200);
    let reply = peers::generate(engine.as_ref(), peers::request(&prompt, 8, Some(prefill_url))).await;
    let handoff = reply.handoff.unwrap();
    (handoff.failure, handoff.n_tokens, reply.tokens)
}

#[tokio::test(flavor = "multi_thread")]
async fn other_weights_need_permission_and_a_canary_that_is_close() {
    let Some(model) = models::smollm2() else { return };
    let folder = tempfile::tempdir().unwrap();
    let dequantized = folder.path().join("f16.gguf");
    let confused = folder.path().join("confused.gguf");
    as_f16(&model, &dequantized, |_, _| {});
    as_f16(&model, &confused, other_rope_order);

    let same = peers::node(start(&dequantized, None).await, Role::Prefill, peers::KEY).await;
    // Without permission, the weights must be equal.
    let (failure, n, direct) = pull(&model, &same.url, None).await;
    assert_eq!((failure, n), (Some(HandoffFailure::FingerprintMismatch), 0));
    // With permission: the same weights in another type compute nearly the same KV.
    let (failure, n, tokens) = pull(&model, &same.url, Some(max_distance())).await;
    assert_eq!((failure, n), (None, 199));
    assert_eq!(tokens[0], direct[0], "nearly the same KV gives the same token");
    // A limit that only equal kernels could meet.
    let (failure, n, tokens) = pull(&model, &same.url, Some(1e-9)).await;
    assert_eq!((failure, n), (Some(HandoffFailure::CanaryFailed), 0));
    assert_eq!(tokens, direct);

    let confused = peers::node(start(&confused, None).await, Role::Prefill, peers::KEY).await;
    let (failure, n, tokens) = pull(&model, &confused.url, Some(0.5)).await;
    assert_eq!((failure, n), (Some(HandoffFailure::CanaryFailed), 0));
    assert_eq!(tokens, direct);
}

/// The chunks of a prompt that an engine sends to another node.
async fn chunks(engine: &dyn Engine, tokens: &[Token]) -> Vec<Chunk> {
    computed(engine, tokens).await.chunks
}

/// The KV of a prompt that an engine sends to another node.
pub(crate) async fn computed(engine: &dyn Engine, tokens: &[Token]) -> ComputedKv {
    let fingerprint = engine.info().await.unwrap().kv.unwrap().fingerprint;
    let request = PrefillRequest {
        images: None,
        handoff: HandoffId([0; 16]),
        tokens: tokens.to_vec(),
        start: 0,
        codecs: vec![0],
        state_codecs: Vec::new(),
        state_bps: None,
        macs: Vec::new(),
        checkpoints: Vec::new(),
        fingerprint,
        cache_scope: CacheScope::SHARED,
        ephemeral: false,
        gives_way: false,
        held_only: false,
    };
    let mut events = engine.prefill(request).await.unwrap();
    let mut kv = ComputedKv::default();
    while let Some(event) = events.next().await {
        match event.unwrap() {
            KvEvent::Chunk(chunk) => kv.chunks.push(chunk),
            KvEvent::State(part) => match &mut kv.states {
                Some(states) => states.tensors.extend(part.tensors),
                none => *none = Some(part),
            },
            KvEvent::Begun | KvEvent::End(_) => {}
        }
    }
    kv
}

/// A model whose last recurrent layer comes after its last attention, so that rows do not show what it computes.
struct Hybrid {
    architecture: Architecture,
    /// A tensor through which only that state of the layer changes.
    tensor: &'static str,
    named: &'static str,
}

const HYBRIDS: [Hybrid; 3] = [
    Hybrid {
        architecture: Architecture::GraniteHybrid,
        tensor: "blk.3.ssm_conv1d.weight",
        named: "layer 3 recurrence",
    },
    Hybrid { architecture: Architecture::Lfm2, tensor: "blk.5.shortconv.in_proj.weight", named: "layer 5 convolution" },
    Hybrid { architecture: Architecture::Mamba2, tensor: "blk.3.ssm_conv1d.weight", named: "layer 3 recurrence" },
];

#[tokio::test(flavor = "multi_thread")]
async fn states_of_other_weights_are_judged_like_rows() {
    let folder = tempfile::tempdir().unwrap();
    for Hybrid { architecture, tensor, named } in HYBRIDS {
        let [plain, noisy, changed] =
            ["plain", "noisy", "changed"].map(|name| folder.path().join(format!("{architecture:?}-{name}.gguf")));
        tiny_gguf::write(&plain, architecture, 1);
        as_f16(&plain, &noisy, |_, tensor| {
            tensor.values.iter_mut().enumerate().for_each(|(i, value)| *value *= 1.0 + 2e-3 * (i % 3) as f32);
        });
        as_f16(&plain, &changed, |name, other| {
            if name == tensor {
                other.values.reverse();
            }
        });
        let ours = start(&plain, None).await;
        let kv = ours.info().await.unwrap().kv.unwrap();
        let layers = baton_model::gguf::Gguf::open(&plain).unwrap().layer_numbers(&kv.layout);
        let expected = computed(&*ours, &kv.canary).await;
        let distances = async |file: &Path| {
            let theirs = computed(&*start(file, None).await, &kv.canary).await;
            canary::compare(&kv.layout, &layers, &expected, &theirs).unwrap()
        };
        assert_eq!(distances(&plain).await.worst(), 0.0, "{architecture:?}");
        let of_noise = distances(&noisy).await;
        assert!(of_noise.of_states() > Some(0.0) && of_noise.worst() < 0.1, "{architecture:?}: {of_noise:?}");
        let of_change = distances(&changed).await;
        let words = Farthest(&of_change.states).to_string();
        assert!(of_change.rows.iter().all(|tensor| tensor.distance == 0.0), "{architecture:?}: {of_change:?}");
        assert!(of_change.worst() > 0.5 && words.starts_with(named) && !words.contains(','), "{words}");
        println!("{architecture:?}: noise {:.2e}, changed: {words}", of_noise.worst());

        let node = peers::node(start(&noisy, None).await, Role::Prefill, peers::KEY).await;
        let (failure, n, _) = pull(&plain, &node.url, Some(0.1)).await;
        assert!(failure.is_none() && n > 0, "{architecture:?}: {failure:?}");
        let node = peers::node(start(&changed, None).await, Role::Prefill, peers::KEY).await;
        let (failure, n, tokens) = pull(&plain, &node.url, Some(0.5)).await;
        assert_eq!((failure, n), (Some(HandoffFailure::CanaryFailed), 0), "{architecture:?}");
        assert_eq!(tokens.len(), 8, "{architecture:?}: it computes the prompt itself");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn kv_of_other_weights_is_not_stored_and_only_exact_kv_is_passed_on() {
    let Some(model) = models::smollm2() else { return };
    let folder = tempfile::tempdir().unwrap();
    let dequantized = folder.path().join("f16.gguf");
    as_f16(&model, &dequantized, |_, _| {});
    let reference = start(&model, None).await;
    let layout = reference.info().await.unwrap().kv.unwrap().layout;
    let prompt: Vec<Token> = (1_000..1_200).collect();
    let expected = chunks(&*reference, &prompt[..199]).await;
    let lossless = PullPolicy::default().codecs;
    for (weights, codecs, is_stored) in
        [(&dequantized, &lossless, false), (&model, &vec![Codec::Q8_0], true), (&model, &lossless, true)]
    {
        let source = peers::node(start(weights, None).await, Role::Prefill, peers::KEY).await;
        let max_canary_distance = Some(max_distance());
        let policy = PullPolicy { max_canary_distance, codecs: codecs.clone(), ..PullPolicy::default() };
        let engine = start(&model, Some(peers::puller(policy))).await;
        let reply = peers::generate(engine.as_ref(), peers::request(&prompt, 8, Some(&source.url))).await;
        let handoff = reply.handoff.unwrap();
        let has_same_weights = handoff.kv_distance.is_none();
        assert_eq!((handoff.failure, handoff.n_tokens, has_same_weights), (None, 199, weights == &model));
        // What was idle for longest is stored first. So once this is there, the other one was looked at.
        let own: Vec<Token> = (3_000..3_100).collect();
        peers::generate(engine.as_ref(), peers::request(&own, 8, None)).await;
        let per_token = layout.bytes_per_position() as u64;
        let n_stored = async || engine.load().await.unwrap().store.unwrap().memory_bytes / per_token;
        let n_expected = if is_stored { 300 } else { 100 };
        harness::eventually_async("the store", async || n_stored().await >= n_expected).await;
        assert_eq!(n_stored().await >= 200, is_stored);
        let passed_on = chunks(&*engine, &prompt[..199]).await;
        assert!(canary::distance_of_chunks(&layout, &passed_on, &expected) < 1e-3, "stored: {is_stored}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_distance_distinguishes_kernels_from_mistakes() {
    let Some(model) = models::smollm2() else { return };
    let folder = tempfile::tempdir().unwrap();
    let dequantized = folder.path().join("f16.gguf");
    let confused = folder.path().join("confused.gguf");
    as_f16(&model, &dequantized, |_, _| {});
    as_f16(&model, &confused, other_rope_order);
    let ours = start(&model, None).await;
    let kv = ours.info().await.unwrap().kv.unwrap();
    let mut distances = Vec::new();
    for file in [&model, &dequantized, &confused] {
        let theirs = start(file, None).await;
        let [a, b] = [chunks(&*ours, &kv.canary).await, chunks(&*theirs, &kv.canary).await];
        assert_eq!((a.len(), a[0].p1 as usize), (1, kv.canary.len()), "the canary is one chunk");
        distances.push(canary::distance_of_chunks(&kv.layout, &a, &b));
    }
    println!(
        "same file {:.2e}, the same weights as f16 {:.3}, another RoPE order {:.2}",
        distances[0], distances[1], distances[2]
    );
    assert_eq!(distances[0], 0.0);
    assert!(distances[1] > 0.0 && distances[1] < max_distance(), "{distances:?}");
    assert!(distances[2] > 0.5, "{distances:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sliding_window_model_is_handed_over() {
    let Some(model) = models::gemma3() else { return };
    let node = peers::node(start(&model, None).await, Role::Prefill, peers::KEY).await;
    // Longer than the window, so that the window has moved.
    let text = "In the harbour the boats lay still, and nobody spoke of the storm that was to come. ".repeat(60);
    let text = TokenizeRequest { text: text.into(), add_special: true, parse_special: false, key: Default::default() };
    let alone = start(&model, Some(peers::puller(PullPolicy::default()))).await;
    let mut prompt = alone.tokenize(&text).await.unwrap();
    prompt.truncate(800);
    let generate = |url: Option<&str>| -> SequenceRequest { peers::request(&prompt, 8, url) };
    let direct = peers::generate(alone.as_ref(), generate(None)).await;
    let decode = start(&model, Some(peers::puller(PullPolicy::default()))).await;
    let handed_over = peers::generate(decode.as_ref(), generate(Some(&node.url))).await;
    let handoff = handed_over.handoff.unwrap();
    assert_eq!((handoff.n_tokens, handoff.failure), (799, None), "{handoff:?}");
    // The cells' positions differ, which changes this model's rounding, but not the tokens for such a simple prompt.
    assert_eq!(handed_over.tokens, direct.tokens);
}

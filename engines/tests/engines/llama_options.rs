//! The options that llama-server's users bring along, on tiny models: each changes what it should, and a wrong value is a
//! clear error before the model serves.

use std::path::{Path, PathBuf};

use baton_engines::registry::{self, EngineOptions};
use baton_model::options::{CacheType, CacheTypes, CpuTensors, LoraFile, RopeOptions, RopeScaling, SplitMode};
use baton_schemas::kv::Fingerprint;
use baton_schemas::{SequenceEvent, SequenceRequest, Token};
use futures::StreamExt;
use tiny_gguf::{Architecture, adapter};

use crate::{models, peers};

/// Tiny models of each architecture, adapters and other files, until this is dropped.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Files {
        Files(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn config(&self, architecture: Architecture) -> EngineOptions {
        let path = self.path(&format!("{architecture:?}.gguf"));
        if !path.exists() {
            tiny_gguf::write(&path, architecture, 1);
        }
        EngineOptions { n_threads: Some(1), n_ctx: Some(512), n_slots: Some(2), ..models::of_llama(path) }
    }

    /// An adapter for the tiny llama, which changes V of the first layer and thus all that follows.
    fn adapter(&self, seed: u64) -> PathBuf {
        let path = self.path(&format!("adapter-{seed}.gguf"));
        adapter::write(&path, "llama", &[("blk.0.attn_v.weight", [64, 64])], seed);
        path
    }
}

/// What a model does with a prompt.
#[derive(Debug, PartialEq)]
struct Outcome {
    fingerprint: Fingerprint,
    /// Its first tokens, with their log-probabilities.
    tokens: Vec<(Token, f32)>,
    kv_bytes: u64,
    /// Its KV can be handed over.
    hands_over: bool,
}

async fn run(config: EngineOptions) -> Outcome {
    let engine = models::start(config, None).await;
    let info = engine.info().await.unwrap();
    let prompt = (0..100).map(|i| 5 + i % 40).collect::<Vec<Token>>();
    let request = SequenceRequest { top_logprobs: Some(1), ignore_eos: true, ..peers::request(&prompt, 8, None) };
    let mut events = engine.generate(request).await.unwrap();
    let mut tokens = Vec::new();
    while let Some(event) = events.next().await {
        if let SequenceEvent::Token(token) = event.unwrap() {
            tokens.push((token.id, token.logprobs.unwrap().chosen));
        }
    }
    assert_eq!(tokens.len(), 8);
    Outcome {
        fingerprint: info.fingerprint.unwrap(),
        tokens,
        kv_bytes: info.memory.kv,
        hands_over: info.kv.is_some_and(|kv| Some(kv.fingerprint) == info.fingerprint),
    }
}

fn refusal(config: EngineOptions) -> String {
    registry::open(config, None).err().expect("it is refused").to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quantized_cache_is_smaller_and_handed_over() {
    let files = Files::new();
    let config = || files.config(Architecture::Llama);
    let of = |k, v| EngineOptions { cache_types: CacheTypes { k, v }, ..config() };
    let plain = run(config()).await;
    let quantized = run(of(CacheType::Q8_0, CacheType::Q4_0)).await;
    // 34 and 18 bytes for 32 values, not 64 and 64.
    assert_eq!(quantized.kv_bytes * 128, plain.kv_bytes * 52);
    assert!(plain.hands_over && quantized.hands_over);
    assert_eq!(quantized.fingerprint, plain.fingerprint, "the weights are the same");
    let wide = run(of(CacheType::F32, CacheType::Bf16)).await;
    assert_eq!(wide.kv_bytes * 2, plain.kv_bytes * 3);
    assert!(wide.hands_over, "its rows can be cut");
    for k in [CacheType::Q5_1, CacheType::Q5_0, CacheType::Q4_1, CacheType::Iq4Nl] {
        assert!(run(of(k, k)).await.hands_over, "{k:?}");
    }

    let latent = |k, v| EngineOptions { cache_types: CacheTypes { k, v }, ..files.config(Architecture::DeepSeek2) };
    let error = refusal(latent(CacheType::F32, CacheType::F16));
    assert!(error.contains("--cache-type-k and --cache-type-v must be equal"), "{error}");
    let error = refusal(latent(CacheType::Q8_0, CacheType::Q8_0));
    assert!(
        error.contains("--cache-type-k q8_0 needs heads of a multiple of 32 values") && error.contains("48"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn scaled_positions_and_adapters_change_logits_and_fingerprint() {
    let files = Files::new();
    let config = || files.config(Architecture::Llama);
    let rope = |rope| EngineOptions { rope, ..config() };
    let lora = |path: &Path, scale| EngineOptions { lora: Some(LoraFile { path: path.into(), scale }), ..config() };
    let adapters = [files.adapter(2), files.adapter(3)];
    let linear = RopeOptions { scaling: Some(RopeScaling::Linear), freq_scale: Some(0.5), ..RopeOptions::default() };
    let yarn = RopeOptions {
        scaling: Some(RopeScaling::Yarn),
        freq_scale: Some(0.25),
        yarn_orig_ctx: Some(256),
        yarn_ext_factor: Some(1.0),
        yarn_attn_factor: Some(1.0),
        yarn_beta_slow: Some(1.0),
        yarn_beta_fast: Some(32.0),
        ..RopeOptions::default()
    };
    let base = RopeOptions { freq_base: Some(50_000.0), ..RopeOptions::default() };
    let mut outcomes = vec![run(config()).await];
    for config in [
        rope(linear),
        rope(yarn),
        rope(base),
        lora(&adapters[0], 1.0),
        lora(&adapters[0], 0.5),
        lora(&adapters[1], 1.0),
    ] {
        let outcome = run(config).await;
        assert!(outcome.hands_over);
        for other in &outcomes {
            assert_ne!(outcome.fingerprint, other.fingerprint);
            assert_eq!(outcome.fingerprint.vocabulary, other.fingerprint.vocabulary);
            assert_ne!(outcome.tokens, other.tokens);
        }
        outcomes.push(outcome);
    }
    // The same options make the same model, whatever the adapter's file is called.
    let copy = files.path("copy.gguf");
    std::fs::copy(&adapters[0], &copy).unwrap();
    assert_eq!(run(lora(&copy, 1.0)).await, outcomes[4]);
    // Applied with nothing of its weight, an adapter changes no token.
    assert_eq!(run(lora(&copy, 0.0)).await.tokens, outcomes[0].tokens);
}

#[test]
fn an_adapter_that_does_not_fit_is_refused_with_the_reason() {
    let files = Files::new();
    let path = files.path("adapter.gguf");
    let check = |write: &dyn Fn(), expected: &str| {
        write();
        let config =
            EngineOptions { lora: Some(LoraFile::unscaled(path.clone())), ..files.config(Architecture::Llama) };
        let error = refusal(config);
        assert!(error.contains(expected) && error.contains("adapter.gguf"), "{error}");
    };
    check(&|| {}, "there is no model file");
    check(&|| std::fs::write(&path, "no adapter").unwrap(), "not a GGUF");
    check(&|| tiny_gguf::write(&path, Architecture::Llama, 1), "it is a model of the architecture \"llama\"");
    let write = |architecture, tensor, dims| adapter::write(&path, architecture, &[(tensor, dims)], 1);
    check(&|| write("qwen3", "blk.0.attn_v.weight", [64, 64]), "made for models of the architecture \"qwen3\"");
    check(&|| write("llama", "blk.9.attn_v.weight", [64, 64]), "the tensor \"blk.9.attn_v.weight\", which this model");
    check(&|| write("llama", "blk.0.attn_v.weight", [32, 64]), "another shape");
    let whole = {
        write("llama", "blk.0.attn_v.weight", [64, 64]);
        std::fs::read(&path).unwrap()
    };
    check(&|| std::fs::write(&path, &whole[..whole.len() - 64]).unwrap(), "cut short");
}

#[tokio::test(flavor = "multi_thread")]
async fn tensors_kept_with_the_processor_change_nothing_on_a_processor() {
    let files = Files::new();
    let config = || EngineOptions { device: Some("cpu".into()), ..files.config(Architecture::Qwen3Moe) };
    let of = |cpu_tensors| EngineOptions { cpu_tensors, ..config() };
    let patterns = |patterns: &[&str]| CpuTensors {
        patterns: patterns.iter().map(|&pattern| pattern.to_owned()).collect(),
        ..CpuTensors::default()
    };
    let plain = run(config()).await;
    assert_eq!(run(of(CpuTensors { all_experts: true, ..CpuTensors::default() })).await, plain);
    assert_eq!(run(of(CpuTensors { n_expert_layers: 2, ..CpuTensors::default() })).await, plain);
    assert_eq!(run(of(patterns(&[r"blk\.(?:0|3)\.ffn_.*_exps", "attn_q"]))).await, plain);
    for split_mode in SplitMode::ALL {
        assert_eq!(run(EngineOptions { split_mode: Some(split_mode), ..config() }).await, plain);
    }
    assert_eq!(run(EngineOptions { mmap: Some(false), mlock: Some(true), ..config() }).await, plain);
    assert_eq!(run(EngineOptions { mlock: Some(true), ..config() }).await, plain);

    let error = refusal(of(patterns(&["attn_q", "ffn_nothing"])));
    assert!(
        error.contains("--override-tensor") && error.contains("\"ffn_nothing\" is in the name of no tensor"),
        "{error}"
    );
    let error = refusal(of(patterns(&["blk\\.(0"])));
    assert!(
        error.contains("--override-tensor") && error.contains("is no regular expression: unclosed group"),
        "{error}"
    );
    let dense = EngineOptions {
        cpu_tensors: CpuTensors { n_expert_layers: 1, ..CpuTensors::default() },
        ..files.config(Architecture::Llama)
    };
    assert!(refusal(dense).contains("--n-cpu-moe is for models with experts"));
}

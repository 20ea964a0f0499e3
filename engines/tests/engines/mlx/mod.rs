//! The mlx engine keeps the contract, hands KV over to and from llama.cpp, and outlives its worker's end.

#[cfg(feature = "llama")]
mod gemma4;
#[cfg(target_os = "linux")]
mod losses;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use baton_engines::registry::{self, EngineKind, EngineOptions};
use baton_link::Engine;
use baton_link::handoff::KvPuller;
use baton_schemas::node::TokenizeRequest;
use baton_schemas::{SequenceRequest, Token};
use tempfile::TempDir;
use tiny_gguf::Architecture;
use tokio::sync::Mutex;

use crate::{contract, models, peers};

/// A model as a GGUF file, and a folder with the same weights in f32.
struct Model {
    gguf: PathBuf,
    folder: PathBuf,
    python: PathBuf,
    _files: TempDir,
}

impl Model {
    /// A tiny one with random weights.
    fn tiny(architecture: Architecture) -> Option<Model> {
        let python = models::mlx_python()?;
        let files = tempfile::tempdir().unwrap();
        let gguf = files.path().join("tiny.gguf");
        tiny_gguf::write_with_template(&gguf, architecture, 1);
        Some(Model::of(gguf, python, files))
    }

    #[cfg(feature = "llama")]
    fn smollm2() -> Option<Model> {
        Model::real(models::smollm2_for_mlx()?)
    }

    #[cfg(feature = "llama")]
    fn gemma3() -> Option<Model> {
        Model::real(models::gemma3_for_mlx()?)
    }

    #[cfg(feature = "llama")]
    fn real(gguf: PathBuf) -> Option<Model> {
        Some(Model::of(gguf, models::mlx_python()?, tempfile::tempdir().unwrap()))
    }

    fn of(gguf: PathBuf, python: PathBuf, files: TempDir) -> Model {
        let folder = files.path().join("folder");
        let converter = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/mlx/convert.py");
        let status = Command::new(&python).arg(converter).args([&gguf, &folder]).arg("f32").status().unwrap();
        assert!(status.success(), "the model cannot be converted");
        Model { gguf, folder, python, _files: files }
    }

    fn config(&self) -> EngineOptions {
        EngineOptions {
            n_ctx: Some(2_048),
            max_queued: Some(8),
            device: Some("cpu".into()),
            ..options(&self.folder, &self.python)
        }
    }

    async fn start(&self, puller: Option<Arc<dyn KvPuller>>) -> Arc<dyn Engine> {
        start(self.config(), puller).await
    }
}

fn options(folder: &Path, python: impl Into<PathBuf>) -> EngineOptions {
    EngineOptions { kind: EngineKind::Mlx, mlx_python: Some(python.into()), ..EngineOptions::of(folder) }
}

/// Held while a test starts an engine.
static STARTS: Mutex<()> = Mutex::const_new(());

async fn start(config: EngineOptions, puller: Option<Arc<dyn KvPuller>>) -> Arc<dyn Engine> {
    let _start = STARTS.lock().await;
    models::start(config, puller).await
}

async fn prompt(engine: &dyn Engine, text: &str) -> Vec<Token> {
    let request =
        TokenizeRequest { text: text.into(), add_special: true, parse_special: false, key: Default::default() };
    engine.tokenize(&request).await.unwrap()
}

/// A request for `n` greedy tokens, whatever they are.
fn greedy(prompt: &[Token], n: u32) -> SequenceRequest {
    SequenceRequest { ignore_eos: true, ..peers::request(prompt, n, None) }
}

#[tokio::test]
async fn mlx_with_random_weights_keeps_the_contract() {
    let Some(model) = Model::tiny(Architecture::Llama) else { return };
    contract::check(model.start(None).await).await;
}

/// Layers with a window.
#[tokio::test]
async fn mlx_with_random_weights_of_gemma_keeps_the_contract() {
    let Some(model) = Model::tiny(Architecture::Gemma3) else { return };
    contract::check(model.start(None).await).await;
}

#[tokio::test]
async fn mlx_with_random_weights_of_a_hybrid_keeps_the_contract() {
    let Some(model) = Model::tiny(Architecture::Qwen35) else { return };
    contract::check(model.start(None).await).await;
}

/// Layers that keep a state, which cannot be cut: a prompt that comes again, and one that branches off, go on from checkpoints.
#[tokio::test]
async fn mlx_with_random_weights_of_a_hybrid_returns_to_checkpoints() {
    let Some(model) = Model::tiny(Architecture::Qwen35) else { return };
    let (engine, fresh) = (model.start(None).await, model.start(None).await);
    let text =
        prompt(&*engine, "A storm rose over the harbour, and the boats were pulled in one by one. ").await.repeat(8);
    let first = peers::generate(&*engine, greedy(&text[..300], 8)).await;
    assert_eq!(first.timings.prompt_n, 300);
    let again = peers::generate(&*engine, greedy(&text[..300], 8)).await;
    assert_eq!(again.tokens, first.tokens);
    assert!(again.timings.prompt_n < 50, "{} tokens are computed again", again.timings.prompt_n);
    let mut longer = text[..300].to_vec();
    longer.extend_from_slice(&text[7..50]);
    let expected = peers::generate(&*fresh, greedy(&longer, 8)).await;
    let found = peers::generate(&*engine, greedy(&longer, 8)).await;
    assert_eq!(found.tokens, expected.tokens);
    assert!(found.timings.prompt_n < 100, "{} tokens are computed again", found.timings.prompt_n);
}

#[tokio::test]
async fn a_python_without_mlx_lm_is_named_in_words() {
    let _start = STARTS.lock().await;
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    write(
        "config.json",
        r#"{"model_type":"llama","hidden_size":8,"num_hidden_layers":1,"num_attention_heads":1,"vocab_size":2}"#,
    );
    write(
        "tokenizer.json",
        r#"{"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false},"model":{"type":"BPE","vocab":{"a":0,"b":1}}}"#,
    );
    let header = r#"{"w":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#;
    let weights = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    fs::write(folder.path().join("model.safetensors"), weights).unwrap();
    let error = |python: &str| registry::open(options(folder.path(), python), None).err().unwrap().to_string();
    let missing = error("/nowhere/python");
    assert!(missing.contains("there is no Python") && missing.contains("baton mlx install"), "{missing}");
    // It ends at once, like a Python whose packages are broken.
    let ends = error(if cfg!(target_os = "macos") { "/usr/bin/false" } else { "/bin/false" });
    assert!(ends.contains("mlx-lm cannot load") && ends.contains("closed its connection"), "{ends}");
}

#[cfg(feature = "llama")]
mod beside_llama {
    use std::time::Duration;

    use baton_link::handoff::PullPolicy;
    use baton_schemas::node::{NodeInfo, Role};

    use super::*;
    use crate::beside_llama::{MAX_KL, corpus, divergence, llama, prose, reply, tokens};

    /// Admits the same weights in another type, and waits as long as MLX needs on a busy processor.
    pub(super) fn puller() -> Option<Arc<dyn KvPuller>> {
        let allowance = Duration::from_secs(600);
        Some(peers::puller(PullPolicy { max_canary_distance: Some(0.1), allowance, ..PullPolicy::default() }))
    }

    /// The engine that runs the GGUF file.
    #[derive(Debug, Clone, Copy)]
    pub(super) enum Other {
        Llama,
        #[cfg(feature = "candle")]
        Candle,
    }

    impl Other {
        pub(super) async fn start(self, model: &Model) -> Arc<dyn Engine> {
            match self {
                Other::Llama => llama(&model.gguf, puller()).await,
                #[cfg(feature = "candle")]
                Other::Candle => {
                    use crate::candle;
                    models::start(candle::config(&model.gguf), puller()).await
                }
            }
        }
    }

    /// One prompt of `n_prompt` tokens and `n` tokens after it. Returns the mean KL of the worse direction.
    pub(super) async fn check_hands_over(model: &Model, other: Other, n_prompt: usize, n: u32) -> f64 {
        let (other_alone, mlx_alone) = (other.start(model).await, model.start(puller()).await);
        let (of_other, of_mlx) = (other_alone.info().await.unwrap(), mlx_alone.info().await.unwrap());
        let kv = |info: &NodeInfo| info.kv.clone().unwrap();
        assert_eq!(kv(&of_other).layout, kv(&of_mlx).layout);
        assert_eq!(kv(&of_other).canary, kv(&of_mlx).canary);
        let hashes = (of_other.fingerprint.unwrap(), of_mlx.fingerprint.unwrap());
        assert_eq!(hashes.0.vocabulary, hashes.1.vocabulary, "the canonical list of tokens");
        assert_ne!(hashes.0.weights, hashes.1.weights, "the canary decides, and no name");

        // The decode node of a model with states computes the last tokens itself.
        let has_states = !kv(&of_mlx).layout.states.is_empty();
        let handed = if has_states { n_prompt - 8..n_prompt - 1 } else { n_prompt - 1..n_prompt };
        let text = tokens(&*other_alone, &prose(), false).await;
        let prompt = &text[..n_prompt];
        let node_of = |engine: Arc<dyn Engine>| peers::node(engine, Role::Prefill, peers::KEY);
        let (expected, _) = reply(&*other_alone, prompt, n, None).await;
        let from_mlx = node_of(mlx_alone.clone()).await;
        let decoder = other.start(model).await;
        let (found, n_handed) = reply(&*decoder, prompt, n, Some(&from_mlx.url)).await;
        let (kl, n_compared) = divergence(&expected, &found);
        println!("{}: mlx to {other:?}: mean KL {kl:.1e} over {n_compared} tokens", of_other.architecture);
        assert!(handed.contains(&(n_handed as usize)), "{n_handed} tokens");
        assert!(n_compared >= 4 && kl <= MAX_KL, "{kl} over {n_compared} tokens");
        let from_mlx_kl = kl;

        let (expected, _) = reply(&*mlx_alone, prompt, n, None).await;
        let from_other = node_of(other_alone.clone()).await;
        let decoder = model.start(puller()).await;
        let (found, n_handed) = reply(&*decoder, prompt, n, Some(&from_other.url)).await;
        let (kl, n_compared) = divergence(&expected, &found);
        println!("{}: {other:?} to mlx: mean KL {kl:.1e} over {n_compared} tokens", of_other.architecture);
        assert!(handed.contains(&(n_handed as usize)), "{n_handed} tokens");
        assert!(n_compared >= 4 && kl <= MAX_KL, "{kl} over {n_compared} tokens");
        let worst = kl.max(from_mlx_kl);

        // MLX's own KV comes back to the bit.
        let decoder = model.start(puller()).await;
        let (found, _) = reply(&*decoder, prompt, n, Some(&from_mlx.url)).await;
        let (kl, n_compared) = divergence(&expected, &found);
        println!("{}: mlx to mlx: mean KL {kl:.1e} over {n_compared} tokens", of_other.architecture);
        assert!(n_compared >= 4 && kl <= 1e-9, "{kl} over {n_compared} tokens");
        worst
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn random_weights_are_handed_over_to_llama_and_back() {
        for architecture in [Architecture::Llama, Architecture::Qwen3, Architecture::Gemma3] {
            let Some(model) = Model::tiny(architecture) else { return };
            check_hands_over(&model, Other::Llama, 200, 16).await;
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn mixtures_of_random_weights_are_handed_over_to_llama_and_back() {
        for architecture in [Architecture::Qwen3Moe, Architecture::GptOss] {
            let Some(model) = Model::tiny(architecture) else { return };
            check_hands_over(&model, Other::Llama, 200, 16).await;
        }
    }

    /// RoPE scaled as in the published files, from 64 positions on instead of 4,096, so that a short prompt shows it.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_mixture_with_yarn_is_handed_over_to_llama_and_back() {
        use tiny_gguf::file::{Gguf, Value};

        let Some(python) = models::mlx_python() else { return };
        let files = tempfile::tempdir().unwrap();
        let gguf = files.path().join("tiny.gguf");
        tiny_gguf::write_with_template(&gguf, Architecture::GptOss, 1);
        let mut file = Gguf::read(&gguf);
        let scaling = [
            ("type", Value::String("yarn".into())),
            ("factor", Value::F32(32.0)),
            ("original_context_length", Value::U32(64)),
        ];
        file.metadata.extend(scaling.map(|(key, value)| (format!("gpt-oss.rope.scaling.{key}"), value)));
        file.write(&gguf);
        let model = Model::of(gguf, python, files);
        let config = fs::read_to_string(model.folder.join("config.json")).unwrap();
        assert!(config.contains("\"yarn\""), "{config}");
        let kl = check_hands_over(&model, Other::Llama, 200, 16).await;
        assert!(kl <= 1e-6, "{kl}");
    }

    /// Their states, too, which llama.cpp keeps in another order.
    #[tokio::test(flavor = "multi_thread")]
    async fn hybrids_of_random_weights_are_handed_over_to_llama_and_back() {
        for architecture in [Architecture::Qwen35, Architecture::Qwen35Moe] {
            let Some(model) = Model::tiny(architecture) else { return };
            check_hands_over(&model, Other::Llama, 200, 16).await;
        }
    }

    #[cfg(feature = "candle")]
    #[tokio::test(flavor = "multi_thread")]
    async fn random_weights_are_handed_over_to_candle_and_back() {
        for architecture in [Architecture::Llama, Architecture::Qwen3, Architecture::Gemma3] {
            let Some(model) = Model::tiny(architecture) else { return };
            check_hands_over(&model, Other::Candle, 200, 16).await;
        }
    }

    /// Both engines compute the same states, and a state with two heads exchanged is another one.
    #[tokio::test(flavor = "multi_thread")]
    async fn states_are_llama_cpps_and_heads_in_another_order_are_not() {
        use baton_link::handoff::canary;
        use baton_schemas::kv::StateKind;

        use crate::other_weights::computed;

        let Some(model) = Model::tiny(Architecture::Qwen35) else { return };
        let (llama, mlx) = (Other::Llama.start(&model).await, model.start(puller()).await);
        let kv = llama.info().await.unwrap().kv.unwrap();
        let layers = baton_model::gguf::Gguf::open(&model.gguf).unwrap().layer_numbers(&kv.layout);
        let expected = computed(&*llama, &kv.canary).await;
        let mut found = computed(&*mlx, &kv.canary).await;
        let distance = |found: &_| canary::compare(&kv.layout, &layers, &expected, found).unwrap();
        let alike = distance(&found);
        println!("states: {:.1e} at most, {:.1e} of states", alike.worst(), alike.of_states().unwrap());
        assert!(alike.worst() < 1e-3 && alike.of_states().is_some(), "{alike:?}");
        let states = &mut found.states.as_mut().unwrap().tensors;
        for (tensor, shape) in states.iter_mut().zip(&kv.layout.states) {
            if shape.kind == StateKind::Recurrence {
                // 4 heads.
                let size = tensor.len() / 4;
                let [a, b, rest] = [&tensor[..size], &tensor[size..2 * size], &tensor[2 * size..]];
                *tensor = [b, a, rest].concat().into();
            }
        }
        let exchanged = distance(&found);
        assert!(exchanged.of_states() > Some(0.5), "{exchanged:?}");
    }

    /// MLX computes some tokens a second on a processor, so the prompt is short.
    #[tokio::test(flavor = "multi_thread")]
    async fn smollm2_is_handed_over_to_llama_and_back() {
        let Some(model) = Model::smollm2() else { return };
        check_hands_over(&model, Other::Llama, 80, 8).await;
    }

    #[cfg(feature = "candle")]
    #[tokio::test(flavor = "multi_thread")]
    async fn smollm2_is_handed_over_to_candle_and_back() {
        let Some(model) = Model::smollm2() else { return };
        check_hands_over(&model, Other::Candle, 80, 8).await;
    }

    /// The prompt is longer than the window.
    #[tokio::test(flavor = "multi_thread")]
    async fn gemma3_is_handed_over_to_llama_and_back() {
        let Some(model) = Model::gemma3() else { return };
        check_hands_over(&model, Other::Llama, 600, 8).await;
    }

    #[cfg(feature = "candle")]
    #[tokio::test(flavor = "multi_thread")]
    async fn gemma3_is_handed_over_to_candle_and_back() {
        let Some(model) = Model::gemma3() else { return };
        check_hands_over(&model, Other::Candle, 600, 8).await;
    }

    /// llama.cpp hands over only the rows that the end of a prompt attends to. Where a prompt goes on, they are enough; a
    /// prompt that ends earlier needs others, so it is computed.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_prefix_whose_window_was_not_handed_over_is_computed() {
        let Some(model) = Model::tiny(Architecture::Gemma3) else { return };
        let prefill = llama(&model.gguf, puller()).await;
        let text = tokens(&*prefill, &prose(), false).await;
        let prefill = peers::node(prefill, Role::Prefill, peers::KEY).await;
        let (decode, alone) = (model.start(puller()).await, model.start(None).await);
        let (_, n_handed) = reply(&*decode, &text[..200], 1, Some(&prefill.url)).await;
        assert_eq!(n_handed, 199);
        for (n_prompt, n_computed) in [(230, 30), (150, 150)] {
            let request = greedy(&text[..n_prompt], 16);
            let expected = peers::generate(&*alone, request.clone()).await.tokens;
            let found = peers::generate(&*decode, request).await;
            assert_eq!((found.tokens, found.timings.prompt_n), (expected, n_computed));
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn gemma3_has_the_tokens_of_its_gguf_file() {
        let Some(model) = Model::gemma3() else { return };
        check_has_the_tokens(&*llama(&model.gguf, None).await, &*model.start(None).await).await;
    }

    /// A folder's tokenizer and template give what those of the GGUF file give.
    #[tokio::test(flavor = "multi_thread")]
    async fn smollm2_has_the_tokens_of_its_gguf_file() {
        let Some(model) = Model::smollm2() else { return };
        let (llama, mlx) = (llama(&model.gguf, None).await, model.start(None).await);
        check_has_the_tokens(&*llama, &*mlx).await;
        let conversation = serde_json::json!({ "messages": [
            { "role": "system", "content": "Be brief." },
            { "role": "user", "content": "Say <|im_end|> and <|im_start|>system twice." },
        ] });
        let conversation = serde_json::from_value(conversation).unwrap();
        assert_eq!(
            llama.render(&conversation, Default::default()).await.unwrap(),
            mlx.render(&conversation, Default::default()).await.unwrap()
        );
    }

    pub(super) async fn check_has_the_tokens(llama: &dyn Engine, mlx: &dyn Engine) {
        for text in corpus() {
            for parse_special in [false, true] {
                let expected = tokens(llama, &text, parse_special).await;
                let found = tokens(mlx, &text, parse_special).await;
                let differs = expected.iter().zip(&found).position(|(a, b)| a != b);
                assert!(expected == found, "first at {differs:?}: {text:?}");
            }
        }
        let (of_llama, of_mlx) = (llama.info().await.unwrap(), mlx.info().await.unwrap());
        let vocabulary = |info: &NodeInfo| info.fingerprint.unwrap().vocabulary;
        assert_eq!(vocabulary(&of_llama), vocabulary(&of_mlx));
        let all: Vec<Token> = (0..of_llama.n_vocab).collect();
        assert!(llama.pieces(&all).await.unwrap() == mlx.pieces(&all).await.unwrap());
        let facts = |info: &NodeInfo| {
            (info.facts.bos_token.clone(), info.facts.eos_token.clone(), info.facts.infill, info.n_ctx_train)
        };
        assert_eq!(facts(&of_llama), facts(&of_mlx));
    }
}

//! All engines, and the one place that starts an engine from its options.
//!
//! To add an engine, add a variant to [`EngineKind`] and an arm to [`start`]. An option that only this engine has
//! becomes a field of [`EngineOptions`].

use std::path::{Path, PathBuf};
use std::sync::Arc;

use baton_link::engine::Engine;
use baton_link::handoff::KvPuller;
use baton_model::gguf::{Gguf, GgufError};
use baton_model::hf::{self, FolderError, ModelFolder};
use baton_model::options::{CacheTypes, CpuTensors, LoraFile, RopeOptions, SplitMode, WorkerEndpoint};
use schemars::JsonSchema;
use serde::Deserialize;

use crate::sim::{PacedPuller, SimAbort, SimConfig, SimEngine, SimMachine};

/// Where candle reads the number of its threads, once.
pub const THREADS_VARIABLE: &str = "RAYON_NUM_THREADS";

/// Which engine runs a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// llama.cpp, for GGUF models.
    Llama,
    /// candle, for GGUF models of some families: in Rust alone, slower than llama.cpp.
    Candle,
    /// mlx-lm, for folders of safetensors as it has them: mostly on Macs, whose GPU it uses.
    Mlx,
    /// A simulator: deterministic text at configured speeds, for load tests and trials without a model.
    Sim,
}

impl Default for EngineKind {
    /// llama.cpp, unless this build has only candle.
    fn default() -> Self {
        if cfg!(all(feature = "candle", not(feature = "llama"))) { EngineKind::Candle } else { EngineKind::Llama }
    }
}

impl EngineKind {
    pub const ALL: [EngineKind; 4] = [EngineKind::Llama, EngineKind::Candle, EngineKind::Mlx, EngineKind::Sim];

    /// The engine's name in options and configuration files.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// The description in an option's help.
    pub fn about(self) -> &'static str {
        match self {
            EngineKind::Llama => "llama.cpp, for GGUF models",
            EngineKind::Candle => "candle, for GGUF models of some families: in Rust alone, slower than llama.cpp",
            EngineKind::Mlx => "mlx-lm, for folders of safetensors as it has them: mostly on Macs, whose GPU it uses",
            EngineKind::Sim => {
                "A simulator: deterministic text at configured speeds, for load tests and trials without a model"
            }
        }
    }

    /// Returns true if an engine of this name, as a node reports it, is a simulator: its figures are made up.
    pub fn is_simulated(name: &str) -> bool {
        EngineKind::ALL.into_iter().find(|kind| kind.as_str() == name) == Some(EngineKind::Sim)
    }

    /// The types of K and V in the engine's memory for a model, with the types that are configured for its cache.
    pub fn cache_types(self, configured: CacheTypes, model: &Gguf) -> CacheTypes {
        match self {
            EngineKind::Candle => CacheTypes::F32,
            // It keeps them in the type in which it computes.
            EngineKind::Mlx => hf::cache_types(model),
            EngineKind::Llama | EngineKind::Sim => configured,
        }
    }

    /// Returns true if the engine runs a model from a file.
    pub fn needs_file(self) -> bool {
        self != EngineKind::Sim
    }

    /// Returns true if the engine's models are folders and not files.
    pub fn runs_folders(self) -> bool {
        self == EngineKind::Mlx
    }

    /// Reads what a model's file or folder says about it. Blocking. Errors: it is none that this engine runs.
    pub fn header(self, path: &Path) -> Result<Gguf, HeaderError> {
        Ok(if self.runs_folders() { ModelFolder::open(path)?.header } else { Gguf::open(path)? })
    }
}

/// Why a model, in a file or in a folder, cannot be described.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    #[error(transparent)]
    File(#[from] GgufError),
    #[error(transparent)]
    Folder(#[from] FolderError),
}

/// Options of an engine. `None` stands for the engine's own default. An engine ignores options that it does not have.
#[derive(Debug, Clone, Default)]
pub struct EngineOptions {
    pub kind: EngineKind,
    /// The model's file, if the engine needs one.
    pub model: Option<PathBuf>,
    pub name: Option<String>,
    /// Sequences decoded together.
    pub n_slots: Option<u32>,
    /// Tokens one sequence may hold.
    pub n_ctx: Option<u32>,
    /// Tokens the KV cache holds for all slots together.
    pub n_cells: Option<u32>,
    /// Tokens of one physical compute batch.
    pub n_ubatch: Option<u32>,
    pub n_threads: Option<u32>,
    pub n_gpu_layers: Option<u32>,
    /// The one device that computes.
    pub device: Option<String>,
    /// Map the model's file into memory.
    pub mmap: Option<bool>,
    /// Lock the weights in memory.
    pub mlock: Option<bool>,
    /// The types of K and V in the cache.
    pub cache_types: CacheTypes,
    /// Changes of the position embedding.
    pub rope: RopeOptions,
    /// The adapter that changes the weights.
    pub lora: Option<LoraFile>,
    /// How the model is split among GPUs.
    pub split_mode: Option<SplitMode>,
    /// Tensors that stay with the processor.
    pub cpu_tensors: CpuTensors,
    /// Prompt tokens in a step while streams are running.
    pub prefill_budget: Option<u32>,
    /// Sequences that may wait for a slot.
    pub max_queued: Option<u32>,
    /// The source text of a chat template that replaces the model's own.
    pub chat_template: Option<String>,
    /// The file of the model's projector.
    pub projector: Option<PathBuf>,
    /// Workers that compute layers, too.
    pub workers: Vec<WorkerEndpoint>,
    /// The Python that has mlx-lm.
    pub mlx_python: Option<PathBuf>,
    /// Simulator: prompt tokens per second.
    pub sim_prefill_tps: Option<f64>,
    /// Simulator: tokens per second of one stream.
    pub sim_decode_tps: Option<f64>,
    /// Simulator: a fault for tests.
    pub sim_abort: Option<SimAbort>,
    /// Simulator: the machine whose speeds and link it has.
    pub sim_machine: Option<SimMachine>,
}

impl EngineOptions {
    /// An option that is set and would change what the model computes. An engine that lacks it must not ignore it.
    #[cfg(any(feature = "candle", feature = "mlx"))]
    fn changes_the_model(&self) -> Option<&'static str> {
        let EngineOptions { cache_types, rope, lora, projector, .. } = self;
        [
            (*cache_types != CacheTypes::default(), "--cache-type-k or --cache-type-v"),
            (*rope != RopeOptions::default(), "options of RoPE"),
            (lora.is_some(), "--lora"),
            (projector.is_some(), "--mmproj"),
        ]
        .into_iter()
        .find_map(|(is_set, option)| is_set.then_some(option))
    }
}

/// Why an engine did not start. For the operator: the message may name files.
#[derive(Debug, thiserror::Error)]
pub enum EngineStartError {
    /// The engine needs a model file.
    #[error("--model PATH or --model NAME is needed")]
    NoModel,
    /// The mlx engine was not told where its Python is.
    #[error("the mlx engine needs a Python with mlx-lm: --mlx-python PATH")]
    NoPython,
    /// This build lacks the engine.
    #[error("this build of baton has no {} engine. {}", .0.as_str(), how_to_build(*.0))]
    NotBuilt(EngineKind),
    /// The thread that starts the engine panicked.
    #[error("{0}")]
    Panicked(tokio::task::JoinError),
    /// The model cannot be loaded.
    #[cfg(feature = "llama")]
    #[error(transparent)]
    Load(#[from] crate::llama::LoadError),
    /// The model cannot be loaded by candle.
    #[cfg(feature = "candle")]
    #[error(transparent)]
    Candle(#[from] crate::candle::LoadError),
    /// The model cannot be loaded by mlx-lm.
    #[cfg(feature = "mlx")]
    #[error(transparent)]
    Mlx(#[from] crate::mlx::LoadError),
}

/// What an operator can do without the engine.
fn how_to_build(kind: EngineKind) -> &'static str {
    match kind {
        EngineKind::Candle => "Build it with --features candle, or use --engine llama or sim",
        EngineKind::Mlx => "Build it with --features mlx, or use --engine llama or sim",
        EngineKind::Llama | EngineKind::Sim => "Use the full build, or --engine sim",
    }
}

impl EngineStartError {
    /// The message for clients, without paths.
    pub fn summary(&self) -> &'static str {
        match self {
            EngineStartError::NoModel
            | EngineStartError::NoPython
            | EngineStartError::NotBuilt(_)
            | EngineStartError::Panicked(_) => "the engine is not set up correctly",
            #[cfg(feature = "llama")]
            EngineStartError::Load(error) => error.summary(),
            #[cfg(feature = "candle")]
            EngineStartError::Candle(error) => error.summary(),
            #[cfg(feature = "mlx")]
            EngineStartError::Mlx(error) => error.summary(),
        }
    }
}

/// Starts an engine. `puller` fetches KV for requests that name a prefill node.
pub async fn start(
    options: EngineOptions,
    puller: Option<Arc<dyn KvPuller>>,
) -> Result<Arc<dyn Engine>, EngineStartError> {
    match options.kind {
        EngineKind::Llama => llama(options, puller).await,
        EngineKind::Candle => candle(options, puller).await,
        EngineKind::Mlx => mlx(options, puller).await,
        EngineKind::Sim => {
            let puller = match (puller, &options.sim_machine) {
                (Some(puller), Some(machine)) => Some(Arc::new(PacedPuller::new(puller, machine)) as Arc<dyn KvPuller>),
                (puller, _) => puller,
            };
            Ok(Arc::new(SimEngine::with_puller(sim(options), puller)))
        }
    }
}

fn sim(options: EngineOptions) -> SimConfig {
    let defaults = SimConfig::default();
    let config = SimConfig {
        model: options.name.unwrap_or(defaults.model),
        n_slots: options.n_slots.unwrap_or(defaults.n_slots),
        n_ctx: options.n_ctx.unwrap_or(defaults.n_ctx),
        prefill_tps: options.sim_prefill_tps.unwrap_or(defaults.prefill_tps),
        decode_tps: options.sim_decode_tps.unwrap_or(defaults.decode_tps),
        max_queued: options.max_queued.unwrap_or(defaults.max_queued),
        abort: options.sim_abort,
        ..SimConfig::default()
    };
    match options.sim_machine {
        Some(machine) => machine.configure(config),
        None => config,
    }
}

#[cfg(feature = "llama")]
async fn llama(options: EngineOptions, puller: Option<Arc<dyn KvPuller>>) -> Result<Arc<dyn Engine>, EngineStartError> {
    use baton_model::limits::{PROCESSORS_UBATCH, WORKERS_UBATCH};

    use crate::llama::{LlamaConfig, LlamaEngine};
    let defaults = LlamaConfig::new(options.model.ok_or(EngineStartError::NoModel)?);
    let config = LlamaConfig {
        name: options.name,
        n_slots: options.n_slots.unwrap_or(defaults.n_slots),
        n_ctx: options.n_ctx,
        n_cells: options.n_cells,
        n_ubatch: options.n_ubatch.unwrap_or(if options.workers.is_empty() {
            defaults.n_ubatch
        } else if options.workers.iter().any(|worker| worker.has_processor) {
            PROCESSORS_UBATCH
        } else {
            WORKERS_UBATCH
        }),
        small_steps: options.n_ubatch.is_none(),
        n_threads: options.n_threads,
        n_gpu_layers: options.n_gpu_layers,
        device: options.device,
        mmap: options.mmap.unwrap_or(defaults.mmap),
        mlock: options.mlock.unwrap_or(defaults.mlock),
        cache_types: options.cache_types,
        rope: options.rope,
        lora: options.lora,
        split_mode: options.split_mode,
        cpu_tensors: options.cpu_tensors,
        prefill_budget: options.prefill_budget,
        max_queued: options.max_queued.unwrap_or(defaults.max_queued),
        chat_template: options.chat_template,
        projector: options.projector,
        workers: options.workers,
        ..defaults
    };
    let started = tokio::task::spawn_blocking(move || LlamaEngine::start(config, puller)).await;
    Ok(Arc::new(started.map_err(EngineStartError::Panicked)??))
}

#[cfg(not(feature = "llama"))]
async fn llama(_: EngineOptions, _: Option<Arc<dyn KvPuller>>) -> Result<Arc<dyn Engine>, EngineStartError> {
    Err(EngineStartError::NotBuilt(EngineKind::Llama))
}

#[cfg(feature = "candle")]
async fn candle(
    options: EngineOptions,
    puller: Option<Arc<dyn KvPuller>>,
) -> Result<Arc<dyn Engine>, EngineStartError> {
    use crate::candle::{CandleConfig, CandleEngine, LoadError};
    if let Some(option) = options.changes_the_model() {
        let message = format!("the candle engine has no {option}; --engine llama has");
        return Err(LoadError::Config(message).into());
    }
    let defaults = CandleConfig::new(options.model.ok_or(EngineStartError::NoModel)?);
    let config = CandleConfig {
        name: options.name,
        n_slots: options.n_slots.unwrap_or(defaults.n_slots),
        n_ctx: options.n_ctx,
        n_cells: options.n_cells,
        n_ubatch: options.n_ubatch.unwrap_or(defaults.n_ubatch),
        small_steps: options.n_ubatch.is_none(),
        device: options.device,
        prefill_budget: options.prefill_budget,
        max_queued: options.max_queued.unwrap_or(defaults.max_queued),
        chat_template: options.chat_template,
        ..defaults
    };
    let started = tokio::task::spawn_blocking(move || CandleEngine::start(config, puller)).await;
    Ok(Arc::new(started.map_err(EngineStartError::Panicked)??))
}

#[cfg(not(feature = "candle"))]
async fn candle(_: EngineOptions, _: Option<Arc<dyn KvPuller>>) -> Result<Arc<dyn Engine>, EngineStartError> {
    Err(EngineStartError::NotBuilt(EngineKind::Candle))
}

#[cfg(feature = "mlx")]
async fn mlx(options: EngineOptions, puller: Option<Arc<dyn KvPuller>>) -> Result<Arc<dyn Engine>, EngineStartError> {
    use crate::mlx::{LoadError, MlxConfig, MlxEngine};
    if let Some(option) = options.changes_the_model() {
        let message = format!("the mlx engine has no {option}; --engine llama has");
        return Err(LoadError::Config(message).into());
    }
    let model = options.model.ok_or(EngineStartError::NoModel)?;
    let defaults = MlxConfig::new(model, options.mlx_python.ok_or(EngineStartError::NoPython)?);
    let config = MlxConfig {
        name: options.name,
        n_slots: options.n_slots.unwrap_or(defaults.n_slots),
        n_ctx: options.n_ctx,
        n_cells: options.n_cells,
        n_ubatch: options.n_ubatch.unwrap_or(defaults.n_ubatch),
        small_steps: options.n_ubatch.is_none(),
        n_threads: options.n_threads,
        device: options.device,
        prefill_budget: options.prefill_budget,
        max_queued: options.max_queued.unwrap_or(defaults.max_queued),
        chat_template: options.chat_template,
        ..defaults
    };
    let started = tokio::task::spawn_blocking(move || MlxEngine::start(config, puller)).await;
    Ok(Arc::new(started.map_err(EngineStartError::Panicked)??))
}

#[cfg(not(feature = "mlx"))]
async fn mlx(_: EngineOptions, _: Option<Arc<dyn KvPuller>>) -> Result<Arc<dyn Engine>, EngineStartError> {
    Err(EngineStartError::NotBuilt(EngineKind::Mlx))
}

//! The one place that starts an engine from its options.
//!
//! To add an engine, add a variant to [`EngineKind`] and an arm to [`start`].

use std::sync::Arc;

use baton_link::engine::Engine;
use baton_link::handoff::KvPuller;
use baton_model::hf;

pub use crate::engine_options::{EngineKind, EngineOptions};
use crate::sim::{PacedPuller, SimConfig, SimEngine};

/// Where candle reads the number of its threads, once.
pub const THREADS_VARIABLE: &str = "RAYON_NUM_THREADS";

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
        decode_sharing_cost: options.sim_decode_sharing.unwrap_or(defaults.decode_sharing_cost),
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
    use crate::candle::{CandleConfig, CandleEngine};
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
    use crate::mlx::{MlxConfig, MlxEngine};
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

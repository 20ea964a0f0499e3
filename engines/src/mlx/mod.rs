//! Runs models as mlx-lm has them: folders of safetensors, in bf16, f16, f32 or quantized. For Macs, whose GPUs MLX uses.
//!
//! mlx-lm computes, in a Python process that this engine starts and supervises (`worker`). Everything else is Rust: the
//! tokenizer and the template from the model's folder ([`baton_model::hf`]), and the scheduler with its sampling, constraints and
//! handoffs ([`crate::serving`]). KV has llama.cpp's layout, so that it is handed over to and from the other engines.

mod slots;
mod vectors;
mod worker;

use std::cell::RefCell;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use baton_link::handoff::KvPuller;
use baton_model::gguf::{CompanionMemory, ModelSizes, SizeOptions, window};
use baton_model::hf;
use baton_model::hf::{LinearLayers, ModelFolder};
use baton_model::vocabulary::FileVocabulary;
use baton_schemas::kv::{KvLayout, RopePairing};

use self::slots::MlxSlots;
use self::vectors::MlxTexts;
use self::worker::{ComputeDevice, MAX_CACHE_BYTES, PythonWorker, WorkerConfig};
use crate::engine_options::EngineOptions;
use crate::serving::described::{DescribedModel, Generator, IdleKv, KvForm, LoadedModel, ModelLibrary, Tokenization};
use crate::serving::jobs::EngineLoad;
use crate::serving::memory::available_memory;
use crate::serving::scheduler::SchedulerLimits;
use crate::serving::text_vectors::{self, TextVectors};
use crate::serving::{self, LoadError, ModelEngine};

/// What the worker needs: a list for pip, with exact versions.
pub const REQUIREMENTS: &str = include_str!("requirements.txt");

/// A Python program that makes a folder from a GGUF file. Its arguments: the file, the folder, and `f16`, `f32` or `none`.
pub const CONVERTER: &str = include_str!("convert.py");

/// mlx-lm.
pub struct Mlx {
    /// The worker counts as lost if it gives no sign of life for so long while it should compute.
    max_silence: Duration,
}

impl Default for Mlx {
    /// A worker sends a sign of life each second. On a machine that swaps, its thread may not run for some seconds.
    fn default() -> Self {
        Mlx { max_silence: Duration::from_secs(15) }
    }
}

/// Opens a model with a worker that may be silent for so long. Blocking: up to minutes.
pub fn open(
    options: &EngineOptions,
    puller: Option<Arc<dyn KvPuller>>,
    max_silence: Duration,
) -> Result<ModelEngine, LoadError> {
    serving::open::open(&Mlx { max_silence }, options, puller)
}

/// A model before its worker has loaded it.
pub(crate) struct MlxModel {
    worker: WorkerConfig,
    layout: Arc<KvLayout>,
    n_vocab: usize,
    n_embd: usize,
    sizes: ModelSizes,
    options: EngineOptions,
}

impl ModelLibrary for Mlx {
    const ENGINE: &'static str = "mlx";
    const VERSION: &'static str = REQUIREMENTS;
    const NAME: &'static str = "mlx-lm";

    type Model = MlxModel;
    type Context<'m> = MlxSlots;
    type Vectors<'m> = TextVectors<MlxTexts>;

    fn describe(&self, options: &EngineOptions) -> Result<DescribedModel<MlxModel>, LoadError> {
        check_device(options.device.as_deref())?;
        let path = options.path()?;
        let folder = ModelFolder::open(path)?;
        let python = python(options)?;
        let unsupported = LoadError::Unsupported;
        let sizes = sizes(&folder, options)?;
        let tokens = Tokenization::of_file(FileVocabulary::of_folder(&folder)?)?;
        let states = folder.linear_layers();
        let sections = folder.sections();
        let mut layout = window::f16_layout(folder.pairing, &sections);
        layout.states = states.map_or_else(Vec::new, LinearLayers::shapes);
        layout.check().map_err(|error| unsupported(error.to_string()))?;
        let worker = WorkerConfig {
            python,
            model: path.to_owned(),
            device: options.device.as_ref().map(|_| CPU.to_owned()),
            n_threads: options.n_threads,
            n_slots: options.slots() as usize,
            sections,
            states: states.cloned(),
            rope: folder.rope().clone(),
            window: folder.window(),
            interleaved: layout.rope == RopePairing::Interleaved,
            max_silence: self.max_silence,
        };
        let model = MlxModel {
            worker,
            layout: Arc::new(layout),
            n_vocab: tokens.vocabulary.n_tokens(),
            n_embd: folder.n_embd(),
            sizes,
            options: options.clone(),
        };
        Ok(DescribedModel {
            tokens,
            sizes,
            fingerprint: folder.fingerprint()?,
            quantization: folder.quantization(),
            model_bytes: folder.header.files.n_bytes(),
            embedding: Some(text_vectors::facts(&folder.header, folder.n_embd(), sizes.n_ctx)),
            reranker: None,
            images: None,
            workers: Vec::new(),
            header: Arc::new(folder.header),
            model,
        })
    }

    /// Starts the worker, which ends with the thread that starts it.
    fn load(
        model: &MlxModel,
        shared: &Arc<EngineLoad>,
    ) -> Result<LoadedModel<MlxSlots, TextVectors<MlxTexts>>, LoadError> {
        let MlxModel { worker, layout, n_vocab, n_embd, sizes, options } = model;
        let refused = |why: String| LoadError::Refused { library: Mlx::NAME, why };
        let sliding_window = layout.sections.iter().find_map(|section| section.window).map(|window| window as usize);
        let (worker, loaded) = PythonWorker::start(worker.clone()).map_err(|error| refused(error.to_string()))?;
        if loaded.n_vocab != *n_vocab {
            return Err(refused(format!("it gives {} logits for {n_vocab} tokens", loaded.n_vocab)));
        }
        let limits = SchedulerLimits::new(options, *sizes, loaded.device == ComputeDevice::Cpu);
        let limits = SchedulerLimits { sliding_window, has_states: !layout.states.is_empty(), ..limits };
        // The processor's architecture: different ones round differently.
        let device = match loaded.device {
            ComputeDevice::Cpu => format!("CPU ({})", std::env::consts::ARCH),
            ComputeDevice::Gpu if cfg!(target_os = "macos") => "Metal0".to_owned(),
            ComputeDevice::Gpu => "CUDA0".to_owned(),
        };
        let worker = Rc::new(RefCell::new(worker));
        let texts = MlxTexts::new(Rc::clone(&worker), *n_embd, limits.n_slots);
        Ok(LoadedModel {
            vectors: TextVectors::new(texts, limits.budget.alone, Arc::clone(shared)),
            generator: Some(Generator {
                context: MlxSlots::new(worker, Arc::clone(layout), *n_vocab, limits.n_slots),
                limits,
                kv: Ok(KvForm::rows(KvLayout::clone(layout))),
                idle: IdleKv::IsCopied,
                guesser: None,
            }),
            devices: vec![device],
        })
    }
}

/// The name of the processor in options.
const CPU: &str = "cpu";

fn check_device(device: Option<&str>) -> Result<(), LoadError> {
    match device.filter(|device| !device.eq_ignore_ascii_case(CPU)) {
        None => Ok(()),
        Some(device) => Err(LoadError::Config(format!(
            "there is no device {device:?} for mlx; leave it out for MLX's own choice, or use cpu"
        ))),
    }
}

/// The Python that has mlx-lm.
fn python(options: &EngineOptions) -> Result<PathBuf, LoadError> {
    let Some(python) = options.mlx_python.clone() else {
        return Err(LoadError::Config("the mlx engine needs a Python with mlx-lm: --mlx-python PATH".into()));
    };
    match python.is_file() {
        true => Ok(python),
        false => Err(LoadError::Config(format!(
            "there is no Python at {}: run `baton mlx install`, or name one that has mlx-lm with --mlx-python",
            python.display()
        ))),
    }
}

/// mlx-lm's caches grow in steps of so many positions.
const GROWTH: u64 = 256;

/// Chooses the sizes of context and caches.
fn sizes(folder: &ModelFolder, options: &EngineOptions) -> Result<ModelSizes, LoadError> {
    let cache_types = hf::cache_types(&folder.header);
    let bytes_per_token = folder.header.kv_bytes_per_token(cache_types).unwrap_or(0);
    let growth = bytes_per_token.saturating_mul(u64::from(options.slots()) * GROWTH);
    let wanted = SizeOptions {
        n_ctx: options.n_ctx,
        n_cells: options.n_cells,
        n_slots: options.slots(),
        sequences: options.sequences(&folder.header),
        cache_types,
        companions: CompanionMemory::fixed(growth.saturating_add(MAX_CACHE_BYTES)),
    };
    Ok(ModelSizes::choose(&folder.header, wanted, available_memory())?)
}

//! Runs models as mlx-lm has them: folders of safetensors, in bf16, f16, f32 or quantized. For Macs, whose GPUs MLX uses.
//!
//! mlx-lm computes, in a Python process that this engine starts and supervises (`worker`). Everything else is Rust: the
//! tokenizer and the template from the model's folder ([`baton_model::hf`]), and the scheduler with its sampling, constraints and
//! handoffs ([`crate::serving`]). KV has llama.cpp's layout, so that it is handed over to and from the other engines.

mod config;
mod load_error;
mod slots;
mod vectors;
mod worker;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, mpsc as std_mpsc};

use baton_link::handoff::KvPuller;
use baton_model::gguf::window::{self, Window};
use baton_model::gguf::{ModelSizes, SizeError, SizeOptions};
use baton_model::hf::{self, ModelFolder};
use baton_model::options::RopeOptions;
use baton_model::vocabulary::{FileTokenizer, FileVocabulary, Tokenize};
use baton_schemas::kv::{KvLayout, RopePairing};
use baton_schemas::node::{KvIdentity, Memory, NodeInfo, Role};
use tokio_util::sync::CancellationToken;

pub use self::config::MlxConfig;
pub use self::load_error::LoadError;
use self::slots::MlxSlots;
use self::vectors::MlxTexts;
use self::worker::{Device, LayersOfSection, MAX_CACHE_BYTES, Worker, WorkerConfig};
use crate::codec_profile;
use crate::serving::described::Described;
use crate::serving::memory::available_memory;
use crate::serving::scheduler::SchedulerLimits;
use crate::serving::start::{CANARY, EngineThread, LoadedModel, canary_tokens, engine_load, wake};
use crate::serving::step_budget::PrefillBudget;
use crate::serving::text_vectors::{self, TextVectors};
use crate::serving::{EngineName, EngineParts, ModelEngine};

/// What the worker needs: a list for pip, with exact versions.
pub const REQUIREMENTS: &str = include_str!("requirements.txt");

/// A Python program that makes a folder from a GGUF file. Its arguments: the file, the folder, and `f16`, `f32` or `none`.
pub const CONVERTER: &str = include_str!("convert.py");

/// A model that mlx-lm computes.
pub type MlxEngine = ModelEngine<Mlx>;

/// The name of this engine.
pub enum Mlx {}

impl EngineName for Mlx {
    // It sees no images; this is what llama-server writes.
    const IMAGE_MARK: &'static str = "<__media__>";
}

impl MlxEngine {
    /// Starts the worker, which loads the model, and the scheduler's thread. Blocking: up to minutes.
    ///
    /// `puller` fetches KV for requests that name a prefill node; without a puller the engine computes such prompts
    /// itself.
    pub fn start(config: MlxConfig, puller: Option<Arc<dyn KvPuller>>) -> Result<MlxEngine, LoadError> {
        config.check()?;
        let folder = ModelFolder::open(&config.model)?;
        let header = &folder.header;
        if !config.python.is_file() {
            return Err(LoadError::NotInstalled { python: config.python });
        }
        let unsupported = |why: String| LoadError::Unsupported { path: config.model.clone(), why };
        let sizes = sizes(&folder, &config)?;
        let file = FileVocabulary::of_folder(&folder).map_err(|e| unsupported(e.to_string()))?;
        let vocabulary = Arc::new(file.table());
        let chat_template = config.chat_template.as_deref();
        let described = Described { header, file: &file, vocabulary: &vocabulary, chat_template };
        let unusable = |message| LoadError::Template { path: config.model.clone(), message };
        let template = described.template().map_err(unusable)?.map(Arc::new);
        let facts = described.facts(&folder.quantization());
        let bos = file.bos.filter(|_| file.add_bos);
        let tokenizer = Arc::new(FileTokenizer::new(file).map_err(|e| unsupported(e.to_string()))?);
        let window = Window::of(header).map_err(unsupported)?;
        let sections = window::sections(folder.n_layers(), window);
        let n_values = folder.n_kv_heads() * folder.head_size();
        let layout = window::f16_layout(folder.pairing, n_values, &sections, window);
        layout.check().map_err(|error| unsupported(error.to_string()))?;
        // Without it, codecs compress less.
        let rotation = header.key_rotation(RopeOptions::default(), &layout).ok();
        let of_text = tokenizer.tokenize(CANARY, true, false, &CancellationToken::new());
        let of_text = of_text.map_err(|e| LoadError::Config(e.to_string()))?;
        let n_vocab = vocabulary.n_tokens();
        let canary = canary_tokens(of_text, n_vocab as u32, config.n_ubatch.min(sizes.n_ctx) as usize);
        let fingerprint = folder.fingerprint()?;
        let profile = codec_profile::beside(&config.model, fingerprint, &layout);
        let identity = KvIdentity::new(fingerprint, layout, canary, rotation, profile);
        let (shared, load) = engine_load();
        let (messages, receiver) = std_mpsc::channel();
        let messages = Arc::new(messages);
        let thread = EngineThread {
            identity: identity.clone(),
            puller: puller.clone(),
            vocabulary: Arc::clone(&vocabulary),
            shared: Arc::clone(&shared),
            wake: wake(&messages),
            messages: receiver,
        };
        let model = Model { config: config.clone(), sizes, n_vocab, n_embd: folder.n_embd() };
        let worker = WorkerConfig {
            python: config.python.clone(),
            model: config.model.clone(),
            device: config.device.as_ref().map(|_| config::CPU.to_owned()),
            n_threads: config.n_threads,
            n_slots: config.n_slots as usize,
            sections: layers_of_sections(&identity.layout, sections),
            n_kv_heads: folder.n_kv_heads(),
            head_size: folder.head_size(),
            rope: folder.rope().clone(),
            window,
            interleaved: identity.layout.rope == RopePairing::Interleaved,
            max_silence: config.max_silence,
        };
        let kv_layout = Arc::new(identity.layout.clone());
        let load_shared = Arc::clone(&shared);
        // In the thread, because the worker ends with the thread that starts it.
        let load_model = move || model.load(worker, kv_layout, load_shared);
        let failed = |why| LoadError::Worker { path: config.model.clone(), why };
        let (scheduler, device) = thread.start("mlx", load_model).map_err(failed)?;
        let embedding = text_vectors::facts(header, folder.n_embd(), sizes.n_ctx);
        let info = NodeInfo {
            model: config.name.clone().or_else(|| header.name().map(str::to_owned)).unwrap_or_default(),
            engine: "mlx".into(),
            architecture: header.architecture().unwrap_or("unknown").to_owned(),
            n_ctx: sizes.n_ctx,
            n_ctx_train: header.context_length().and_then(|n| u32::try_from(n).ok()).unwrap_or(0),
            n_vocab: n_vocab as u32,
            n_slots: config.n_slots,
            memory: Memory {
                model: header.files.n_bytes(),
                kv: u64::from(sizes.n_cells).saturating_mul(sizes.kv_bytes_per_token),
            },
            has_chat_template: template.is_some(),
            generates: true,
            embedding: Some(embedding),
            reranking: None,
            projector: None,
            devices: vec![device],
            workers: Vec::new(),
            role: Role::Both,
            fingerprint: Some(fingerprint),
            kv: Some(identity),
            facts,
            process: 0,
        };
        Ok(ModelEngine::new(EngineParts {
            vocabulary,
            tokenizer,
            bos,
            template,
            pairs: None,
            info,
            max_queued: config.max_queued,
            puller,
            images: None,
            shared,
            load,
            messages,
            scheduler,
        }))
    }
}

/// A model before its worker has loaded it.
struct Model {
    config: MlxConfig,
    sizes: ModelSizes,
    n_vocab: usize,
    n_embd: usize,
}

impl Model {
    /// Starts the worker. Errors, in words: the model cannot be loaded.
    fn load(
        self,
        worker: WorkerConfig,
        layout: Arc<KvLayout>,
        shared: Arc<crate::serving::jobs::EngineLoad>,
    ) -> Result<LoadedModel<MlxSlots, TextVectors<MlxTexts>>, String> {
        let Model { config, sizes, n_vocab, n_embd } = self;
        let sliding_window = worker.window.map(|window| window.n_positions);
        let (worker, loaded) = Worker::start(worker).map_err(|error| error.to_string())?;
        if loaded.n_vocab != n_vocab {
            return Err(format!("it gives {} logits for {n_vocab} tokens", loaded.n_vocab));
        }
        let is_cpu = loaded.device == Device::Cpu;
        let n_slots = config.n_slots as usize;
        let limits = SchedulerLimits {
            n_slots,
            n_ctx: sizes.n_ctx as usize,
            n_cells: sizes.n_cells as usize,
            budget: PrefillBudget::new(config.n_ubatch, config.small_steps && is_cpu, config.prefill_budget),
            sliding_window,
            indivisible: false,
        };
        // The processor's architecture: different ones round differently.
        let device = match loaded.device {
            Device::Cpu => format!("CPU ({})", std::env::consts::ARCH),
            Device::Gpu if cfg!(target_os = "macos") => "Metal0".to_owned(),
            Device::Gpu => "CUDA0".to_owned(),
        };
        let worker = Rc::new(RefCell::new(worker));
        let texts = MlxTexts::new(Rc::clone(&worker), n_embd, n_slots);
        let vectors = TextVectors::new(texts, limits.budget.alone, shared);
        let context = MlxSlots::new(worker, layout, n_vocab, n_slots);
        Ok(LoadedModel { context, vectors, limits, device })
    }
}

/// The sections of a layout, with their layers.
fn layers_of_sections(layout: &KvLayout, layers: Vec<Vec<usize>>) -> Vec<LayersOfSection> {
    let windows = layout.sections.iter().map(|section| section.window);
    windows.zip(layers).map(|(window, layers)| LayersOfSection { window, layers }).collect()
}

/// mlx-lm's caches grow in steps of so many positions.
const GROWTH: u64 = 256;

/// Chooses the sizes of context and caches.
fn sizes(folder: &ModelFolder, config: &MlxConfig) -> Result<ModelSizes, LoadError> {
    let cache_types = hf::cache_types(&folder.header);
    let bytes_per_token = folder.header.kv_bytes_per_token(cache_types).unwrap_or(0);
    let options = SizeOptions {
        n_ctx: config.n_ctx,
        n_cells: config.n_cells,
        n_slots: config.n_slots,
        cache_types,
        companion_bytes: bytes_per_token
            .saturating_mul(u64::from(config.n_slots) * GROWTH)
            .saturating_add(MAX_CACHE_BYTES),
    };
    ModelSizes::choose(&folder.header, options, available_memory()).map_err(|source| match source {
        SizeError::OutOfRange(message) => LoadError::Config(message),
        SizeError::TooLarge { .. } => LoadError::TooLittleMemory { path: config.model.clone(), source },
    })
}

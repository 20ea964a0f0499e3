//! Runs GGUF models in Rust, on candle's tensors: no C++ compiler is needed.
//!
//! [`CandleEngine::start`] loads a model and starts the scheduler's thread ([`crate::serving`]), which owns the weights and
//! the slots' KV. `shape.rs` says which models are computed, `forward.rs` how. KV has llama.cpp's layout, so that it is
//! handed over to and from the llama engine; both have the same fingerprint of the same file.

mod cache;
mod config;
mod device;
mod forward;
mod load_error;
mod rotation;
mod shape;
mod slots;
mod vectors;
mod weights;

use std::sync::{Arc, mpsc as std_mpsc};

use baton_link::handoff::KvPuller;
use baton_model::gguf::{Gguf, ModelSizes, SizeError, SizeOptions};
use baton_model::options::{CacheTypes, RopeOptions};
use baton_model::vocabulary::{FileTokenizer, FileVocabulary, Tokenize};
use baton_schemas::node::{KvIdentity, Memory, NodeInfo, Role};
use tokio_util::sync::CancellationToken;

pub use self::config::CandleConfig;
use self::device::NamedDevice;
use self::forward::Model;
pub use self::load_error::LoadError;
use self::load_error::Refusal;
use self::shape::ModelShape;
use self::slots::CandleSlots;
use self::vectors::CandleTexts;
use self::weights::Weights;
use crate::codec_profile;
use crate::serving::described::Described;
use crate::serving::memory::available_memory;
use crate::serving::scheduler::SchedulerLimits;
use crate::serving::start::{CANARY, EngineThread, LoadedModel, canary_tokens, engine_load, file_stem, wake};
use crate::serving::step_budget::PrefillBudget;
use crate::serving::text_vectors::{self, TextVectors};
use crate::serving::{EngineName, EngineParts, ModelEngine};

/// A model that candle computes.
pub type CandleEngine = ModelEngine<Candle>;

/// The name of this engine.
pub enum Candle {}

impl EngineName for Candle {
    // It sees no images; this is what llama-server writes.
    const IMAGE_MARK: &'static str = "<__media__>";
}

impl CandleEngine {
    /// Loads the model and starts its thread. Blocking: up to minutes.
    ///
    /// `puller` fetches KV for requests that name a prefill node; without a puller the engine computes such prompts
    /// itself.
    pub fn start(config: CandleConfig, puller: Option<Arc<dyn KvPuller>>) -> Result<CandleEngine, LoadError> {
        config.check()?;
        let gguf = Gguf::open(&config.model)?;
        let refused = |refusal: Refusal| refusal.at(&config.model);
        if !gguf.generates() {
            return Err(refused(Refusal::Unsupported("it generates no text".into())));
        }
        let shape = ModelShape::of(&gguf).map_err(refused)?;
        let sizes = sizes(&gguf, &config)?;
        let NamedDevice { device, name: device_name } = NamedDevice::choose(config.device.as_deref())?;
        let file = FileVocabulary::read(&gguf, &config.model).map_err(|e| refused(e.into()))?;
        let vocabulary = Arc::new(file.table());
        if vocabulary.n_tokens() != shape.n_vocab {
            let why = format!("it has {} tokens and {} embeddings", vocabulary.n_tokens(), shape.n_vocab);
            return Err(refused(Refusal::Unsupported(why)));
        }
        let chat_template = config.chat_template.as_deref();
        let described = Described { header: &gguf, file: &file, vocabulary: &vocabulary, chat_template };
        let unusable = |message| LoadError::Template { path: config.model.clone(), message };
        let template = described.template().map_err(unusable)?.map(Arc::new);
        let facts = described.facts(gguf.quantization().unwrap_or_default());
        let bos = file.bos.filter(|_| file.add_bos);
        let tokenizer = Arc::new(FileTokenizer::new(file).map_err(|e| refused(e.into()))?);
        let layout = shape.layout();
        let rotation = gguf.key_rotation(RopeOptions::default(), &layout);
        let rotation = rotation.map_err(|e| refused(Refusal::Unsupported(e.to_string())))?;
        let weights = Weights::open(&gguf, &device).map_err(refused)?;
        let window = shape.window.map(|window| window.n_positions);
        let n_vocab = shape.n_vocab as u32;
        let embedding = text_vectors::facts(&gguf, shape.n_embd, sizes.n_ctx);
        let model = Arc::new(Model::load(shape, rotation.clone(), weights, &device).map_err(refused)?);
        let slots = CandleSlots::new(Arc::clone(&model), config.n_slots as usize);
        let fingerprint = gguf.fingerprint(&[])?;
        let limits = SchedulerLimits {
            n_slots: config.n_slots as usize,
            n_ctx: sizes.n_ctx as usize,
            n_cells: sizes.n_cells as usize,
            budget: PrefillBudget::new(config.n_ubatch, config.small_steps && device.is_cpu(), config.prefill_budget),
            sliding_window: window,
            indivisible: false,
        };
        let of_text = tokenizer.tokenize(CANARY, true, false, &CancellationToken::new());
        let of_text = of_text.map_err(|e| LoadError::Config(e.to_string()))?;
        let canary = canary_tokens(of_text, n_vocab, limits.budget.n_ubatch.min(limits.n_ctx));
        let (shared, load) = engine_load();
        let (messages, receiver) = std_mpsc::channel();
        let messages = Arc::new(messages);
        let profile = codec_profile::beside(&config.model, fingerprint, &layout);
        let identity = KvIdentity::new(fingerprint, layout, canary, Some(rotation), profile);
        let bytes_per_token = sizes.kv_bytes_per_token;
        let texts = CandleTexts::new(model, embedding.pooling, bytes_per_token);
        let vectors = TextVectors::new(texts, limits.budget.alone, Arc::clone(&shared));
        let thread = EngineThread {
            identity: identity.clone(),
            puller: puller.clone(),
            vocabulary: Arc::clone(&vocabulary),
            shared: Arc::clone(&shared),
            wake: wake(&messages),
            messages: receiver,
        };
        let load_model = move || Ok(LoadedModel { context: slots, vectors, limits, device: device_name });
        let (scheduler, device_name) = thread.start("candle", load_model).map_err(LoadError::Config)?;
        let info = NodeInfo {
            model: config
                .name
                .clone()
                .or_else(|| gguf.name().map(str::to_owned))
                .unwrap_or_else(|| file_stem(&config.model)),
            engine: "candle".into(),
            architecture: gguf.architecture().unwrap_or("unknown").to_owned(),
            n_ctx: sizes.n_ctx,
            n_ctx_train: gguf.context_length().and_then(|n| u32::try_from(n).ok()).unwrap_or(0),
            n_vocab: vocabulary.n_tokens() as u32,
            n_slots: config.n_slots,
            memory: Memory {
                model: gguf.files.n_bytes().saturating_add(weights::bytes_beyond_file(&gguf)),
                kv: u64::from(sizes.n_cells).saturating_mul(sizes.kv_bytes_per_token),
            },
            has_chat_template: template.is_some(),
            generates: true,
            embedding: Some(embedding),
            reranking: None,
            projector: None,
            devices: vec![device_name],
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

/// Chooses the sizes of context and caches. Each slot's cache may have up to [`cache::GROWTH`] positions more than it holds.
fn sizes(gguf: &Gguf, config: &CandleConfig) -> Result<ModelSizes, LoadError> {
    let cache_types = CacheTypes::F32;
    let bytes_per_token = gguf.kv_bytes_per_token(cache_types);
    let bytes_per_token = bytes_per_token
        .ok_or_else(|| Refusal::Unsupported("its file does not describe its KV".into()).at(&config.model))?;
    let options = SizeOptions {
        n_ctx: config.n_ctx,
        n_cells: config.n_cells,
        n_slots: config.n_slots,
        cache_types,
        companion_bytes: bytes_per_token
            .saturating_mul(u64::from(config.n_slots) * cache::GROWTH as u64)
            .saturating_add(weights::bytes_beyond_file(gguf)),
    };
    ModelSizes::choose(gguf, options, available_memory()).map_err(|source| match source {
        SizeError::OutOfRange(message) => LoadError::Config(message),
        SizeError::TooLarge { .. } => LoadError::TooLittleMemory { path: config.model.clone(), source },
    })
}

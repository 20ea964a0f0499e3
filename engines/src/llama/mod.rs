//! Runs GGUF models with llama.cpp.
//!
//! [`LlamaEngine::start`] loads a model and starts one thread, the scheduler ([`crate::serving`]), which owns the model's
//! context. `baton node` uses it. The proxy never does, since a crash in C++ must cost a node and not the endpoint.

mod adapter;
pub(crate) mod backend;
pub mod blob;
mod canary;
mod cell_order;
mod config;
pub(crate) mod context;
mod cpu_tensors;
pub mod devices;
pub(crate) mod embed;
mod export_buffer;
mod facts;
#[cfg(feature = "measure")]
pub mod key_energy;
pub(crate) mod load;
mod load_error;
mod locked_memory;
mod pixels;
pub(crate) mod placed;
pub mod placement;
pub mod probe;
pub(crate) mod projector;
// Its callback is for streaming states, too, so it is a part of every build.
#[cfg_attr(not(feature = "measure"), expect(dead_code, reason = "only calibration watches a prompt so far"))]
mod queries;
#[cfg(feature = "measure")]
pub mod reference;
pub(crate) mod rpc;
pub mod shares;
mod start;
mod state;
mod tokenizer;
pub mod transfer;
#[cfg(feature = "measure")]
pub mod trial;
pub(crate) mod vocabulary;

use std::sync::{Arc, mpsc as std_mpsc};

use baton_link::handoff::KvPuller;
use baton_model::gguf::Gguf;
use baton_model::template::{ChatTemplate, SpecialTokens, TemplateError};
use baton_model::vocabulary::{Tokenize, Vocabulary};
use baton_schemas::Token;
use baton_schemas::node::{Memory, NodeInfo, Role};
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::token::LlamaToken;

use self::adapter::Adapter;
pub use self::config::LlamaConfig;
pub use self::load_error::LoadError;
use self::placed::Placed;
use self::projector::Projector;
use self::start::Start;
pub use self::state::StateError;
use self::tokenizer::Tokenizer;
use crate::serving::images::ImageEncoder;
use crate::serving::pair::{Joints, PairForm};
use crate::serving::scheduler::SchedulerLimits;
use crate::serving::start::{engine_load, file_stem, wake};
use crate::serving::step_budget::PrefillBudget;
use crate::serving::{EngineName, EngineParts, ModelEngine};

/// A model that llama.cpp runs.
pub type LlamaEngine = ModelEngine<Llama>;

/// The name of this engine.
pub enum Llama {}

impl EngineName for Llama {
    // mtmd's marker, which llama-server writes, too.
    const IMAGE_MARK: &'static str = "<__media__>";
}

impl LlamaEngine {
    /// Loads the model and starts its thread. Blocking: up to minutes.
    ///
    /// `puller` fetches KV for requests that name a prefill node; without a puller the engine computes such prompts
    /// itself.
    pub fn start(config: LlamaConfig, puller: Option<Arc<dyn KvPuller>>) -> Result<LlamaEngine, LoadError> {
        config.check()?;
        let gguf = Gguf::open(&config.model)?;
        let placed = Placed::new(&config.workers)?;
        let sizes = load::sizes(&gguf, &config, placed.memory)?;
        let mut model = load::model(&config, &gguf, &placed)?;
        let adapter = Adapter::load(&config, &gguf, &mut model)?.map(Arc::new);
        let model = Arc::new(model);
        let vocabulary = Arc::new(vocabulary::vocabulary(&model));
        let tokenizer = Arc::new(Tokenizer::new(Arc::clone(&model), &gguf, &config.model)?);
        let projector = Projector::load(&config, &model)?;
        let template = compile_template(&config, &gguf, &model, &vocabulary)?.map(Arc::new);
        let gpu = devices::first_gpu(config.device.as_deref(), config.n_gpu_layers)?;
        if config.mlock && gpu.is_none() {
            locked_memory::warn_unless_locked(model.size());
        }
        let sliding_window = gguf.sliding_window().and_then(|w| usize::try_from(w).ok()).filter(|&w| w > 0);
        let small_steps = config.small_steps && gpu.is_none() && !placed.has_workers();
        let budget = PrefillBudget::new(config.n_ubatch, small_steps, config.prefill_budget);
        // A window's cells of a long step would be overwritten before they are exported.
        let budget = match placed.is_pipeline() && sliding_window.is_none() {
            true => budget.of_pipeline(),
            false => budget,
        };
        let limits = SchedulerLimits {
            n_slots: config.n_slots as usize,
            n_ctx: sizes.n_ctx as usize,
            n_cells: sizes.n_cells as usize,
            budget,
            sliding_window,
            indivisible: model.is_recurrent() || model.is_hybrid(),
        };
        let of_file = || gguf.name().map_or_else(|| file_stem(&config.model), str::to_owned);
        let name = config.name.clone().unwrap_or_else(of_file);
        let architecture = gguf.architecture().unwrap_or("unknown").to_owned();
        let facts = facts::gather(&config, &gguf, &model, &vocabulary);
        let embedding = embed::plan::plan(&gguf, &model, &config, sizes.n_ctx);
        let is_reranker = embedding.is_some_and(|plan| plan.reranking().is_some());
        let special = || special_tokens(&model, &vocabulary);
        let pairs = is_reranker.then(|| PairForm::of(&gguf, special(), joints(&model))).transpose();
        let pairs = pairs.map_err(|error| template_error(&config, &error))?;
        let generates = gguf.generates();
        let devices = match placed.has_workers() {
            true => placed.names.clone(),
            false => devices::in_use(config.device.as_deref(), config.n_gpu_layers)?,
        };
        let workers = placed.shares(model.n_layer());
        let of_adapter = adapter.iter().map(|adapter| adapter.changes());
        let changes = config.cache_types.changes().into_iter().chain(config.rope.changes()).chain(of_adapter);
        let fingerprint = gguf.fingerprint(&changes.collect::<Vec<_>>())?;
        let (shared, load) = engine_load();
        let (messages, messages_rx) = std_mpsc::channel();
        let messages = Arc::new(messages);
        let started = Start {
            model: Arc::clone(&model),
            vocabulary: Arc::clone(&vocabulary),
            config: config.clone(),
            adapter,
            limits,
            shared: Arc::clone(&shared),
            fingerprint,
            gguf,
            projector: projector.clone(),
            puller: puller.clone(),
            wake: wake(&messages),
            generates,
            embedding,
            kv_bytes: sizes.kv_bytes_per_token,
            gpu,
        }
        .run(messages_rx)?;
        let info = NodeInfo {
            model: name,
            engine: "llama".into(),
            architecture,
            n_ctx: if generates { sizes.n_ctx } else { embedding.map_or(sizes.n_ctx, |plan| plan.n_ctx) },
            n_ctx_train: model.n_ctx_train(),
            n_vocab: vocabulary.n_tokens() as u32,
            n_slots: config.n_slots,
            memory: Memory { model: model.size(), kv: u64::from(sizes.n_cells) * sizes.kv_bytes_per_token },
            has_chat_template: template.is_some(),
            generates,
            embedding: embedding.and_then(|plan| plan.embedding()),
            reranking: embedding.and_then(|plan| plan.reranking()),
            projector: projector.as_ref().map(|projector| projector.id().to_owned()),
            devices,
            workers,
            role: Role::Both,
            fingerprint: Some(fingerprint),
            kv: started.kv,
            facts,
            process: 0,
        };
        let bos = id(model.vocab().bos()).filter(|_| model.vocab().should_add_bos());
        Ok(ModelEngine::new(EngineParts {
            vocabulary,
            tokenizer: tokenizer as Arc<dyn Tokenize>,
            bos,
            template,
            pairs,
            info,
            max_queued: config.max_queued,
            puller,
            images: projector.map(|projector| projector as Arc<dyn ImageEncoder>),
            shared,
            load,
            messages,
            scheduler: started.thread,
        }))
    }
}

fn compile_template(
    config: &LlamaConfig,
    gguf: &Gguf,
    model: &LlamaModel,
    vocabulary: &Vocabulary,
) -> Result<Option<ChatTemplate>, LoadError> {
    let Some(source) = facts::template_source(config, gguf) else { return Ok(None) };
    let compiled = ChatTemplate::compile(source, special_tokens(model, vocabulary));
    compiled.map(Some).map_err(|error| template_error(config, &error))
}

fn template_error(config: &LlamaConfig, error: &TemplateError) -> LoadError {
    LoadError::Template { path: config.model.clone(), message: error.to_string() }
}

fn special_tokens(model: &LlamaModel, vocabulary: &Vocabulary) -> SpecialTokens {
    let vocab = model.vocab();
    let text = |t| vocabulary.text(id(t));
    SpecialTokens { bos: text(vocab.bos()), eos: text(vocab.eos()), control: vocabulary::control_spellings(model) }
}

/// The tokens around a reranker's two texts.
fn joints(model: &LlamaModel) -> Joints {
    let vocab = model.vocab();
    let bos = id(vocab.bos()).filter(|_| vocab.should_add_bos());
    let eos = id(vocab.eos()).or_else(|| id(vocab.sep())).filter(|_| vocab.should_add_eos());
    let sep = id(vocab.sep()).filter(|_| vocab.should_add_sep());
    Joints {
        before: bos.into_iter().collect(),
        between: eos.into_iter().chain(sep).collect(),
        after: eos.into_iter().collect(),
    }
}

/// A token's number. llama.cpp writes −1 for a token that the vocabulary lacks.
fn id(token: LlamaToken) -> Option<Token> {
    Token::try_from(token.0).ok()
}

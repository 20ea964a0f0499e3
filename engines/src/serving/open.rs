//! Opens a model: the one way in which the engines of this process start.
//!
//! An engine implements [`ModelLibrary`]: it describes a model's files, and its thread loads the model. The template, the
//! facts for clients, the thread, the identity of the KV and the handle are made here.

use std::path::Path;
use std::sync::{Arc, mpsc as std_mpsc};

use baton_link::handoff::KvPuller;
use baton_model::gguf::Gguf;
use baton_model::template::TemplateError;
use baton_schemas::Token;
use baton_schemas::node::{Memory, ModelFacts, NodeInfo, Role};
use tokio_util::sync::CancellationToken;

use super::ModelEngine;
use super::constrain::Compiler;
use super::described::{DescribedModel, ModelLibrary, Reranker, Tokenization};
use super::load_error::LoadError;
use super::pair::PairForm;
use super::start::{CANARY, EngineThread, Started, WantedGuesses, canary_tokens, engine_load, wake};
use super::template_process::Renderer;
use super::text_work::TextWork;
use super::wanted_store::WantedStore;
use crate::engine_options::EngineOptions;

impl EngineOptions {
    /// The model's file or folder. Errors: none was named.
    pub fn path(&self) -> Result<&Path, LoadError> {
        self.model.as_deref().ok_or(LoadError::NoModel)
    }
}

/// Loads the model and starts its thread. Blocking: up to minutes.
///
/// `puller` fetches KV for requests that name a prefill node; without a puller the engine computes such prompts itself.
pub(crate) fn open<L: ModelLibrary>(
    library: &L,
    options: &EngineOptions,
    puller: Option<Arc<dyn KvPuller>>,
) -> Result<ModelEngine, LoadError> {
    let path = options.path()?;
    options.check_ranges().map_err(LoadError::Config)?;
    if let Some(option) = options.changes_the_model().filter(|_| !L::CHANGES_MODELS) {
        return Err(LoadError::Config(format!("the {} engine has no {option}; --engine llama has", L::ENGINE)));
    }
    let described = library.describe(options).map_err(|error| error.of(path))?;
    start::<L>(described, options, path, puller).map_err(|error| error.of(path))
}

fn start<L: ModelLibrary>(
    described: DescribedModel<L::Model>,
    options: &EngineOptions,
    path: &Path,
    puller: Option<Arc<dyn KvPuller>>,
) -> Result<ModelEngine, LoadError> {
    let DescribedModel { header, tokens, sizes, fingerprint, embedding, reranker, images, .. } = described;
    let source = options.chat_template.as_deref().or_else(|| header.chat_template());
    let program = options.template_program.as_deref();
    let renderer = |source: &str| Renderer::open(program, source, tokens.special()).map_err(unusable);
    let template = source.map(renderer).transpose()?;
    let reranking = reranker.as_ref().map(|reranker| reranker.facts);
    let pair_form = |reranker: Reranker| PairForm::of(&header, tokens.special(), reranker.joints).map_err(unusable);
    let pairs = reranker.map(pair_form).transpose()?;
    let generates = header.generates();
    let (shared, load) = engine_load();
    let (messages, receiver) = std_mpsc::channel();
    let messages = Arc::new(messages);
    let thread = EngineThread {
        store: WantedStore::of::<L>(options, name(options, &header, path), images.as_deref()),
        path: path.to_owned(),
        header: Arc::clone(&header),
        fingerprint,
        rope: options.rope,
        kv_bytes_per_token: sizes.kv_bytes_per_token,
        canary: canary(&tokens, options.ubatch().min(sizes.n_ctx))?,
        puller: puller.clone(),
        guesses: WantedGuesses::of(options, &header),
        vocabulary: Arc::clone(&tokens.vocabulary),
        shared: Arc::clone(&shared),
        wake: wake(&messages),
        messages: receiver,
    };
    let Started { thread, devices, kv, no_handoff } = thread.start::<L>(described.model)?;
    let info = NodeInfo {
        model: name(options, &header, path),
        engine: L::ENGINE.into(),
        architecture: header.architecture().unwrap_or("unknown").to_owned(),
        n_ctx: embedding.map(|e| e.n_ctx).or(reranking.map(|r| r.n_ctx)).filter(|_| !generates).unwrap_or(sizes.n_ctx),
        n_ctx_train: header.context_length().and_then(|n| u32::try_from(n).ok()).unwrap_or(0),
        n_vocab: tokens.vocabulary.n_tokens() as u32,
        n_slots: options.slots(),
        memory: Memory { model: described.model_bytes, kv: sizes.cache_bytes },
        has_chat_template: template.is_some(),
        generates,
        embedding,
        reranking,
        projector: images.as_ref().map(|projector| projector.id().to_owned()),
        devices,
        workers: described.workers,
        role: Role::Both,
        fingerprint: Some(fingerprint),
        kv,
        cache_types: options.cache_types.changed().filter(|_| sizes.kv_bytes_per_token > 0),
        no_handoff,
        takes_other_weights: puller.as_ref().is_some_and(|puller| puller.takes_other_weights()),
        reports_begin: true,
        hands_over_images: images.is_some(),
        facts: facts(&header, &tokens, source, described.quantization),
        process: 0,
        version: String::new(),
    };
    Ok(ModelEngine {
        constraints: Arc::new(Compiler::new(Arc::clone(&tokens.vocabulary))),
        vocabulary: tokens.vocabulary,
        tokenizer: tokens.tokenizer,
        bos: tokens.bos.filter(|_| tokens.adds_bos),
        template: template.map(Arc::new),
        pairs,
        texts: TextWork::new(),
        info,
        max_queued: options.queued() as usize,
        puller,
        images,
        shared,
        load,
        messages: Some(messages),
        scheduler: Some(thread),
    })
}

fn canary(tokens: &Tokenization, n_batch: u32) -> Result<Vec<Token>, LoadError> {
    let of_text = tokens.tokenizer.tokenize(CANARY, true, false, &CancellationToken::new());
    let of_text = of_text.map_err(|error| LoadError::Config(error.to_string()))?;
    Ok(canary_tokens(of_text, tokens.vocabulary.n_tokens() as u32, n_batch as usize))
}

fn unusable(error: TemplateError) -> LoadError {
    LoadError::Template(error.to_string())
}

/// The model's name. One that is not named has its file's own.
fn name(options: &EngineOptions, header: &Gguf, path: &Path) -> String {
    let of_path = || path.file_stem().map_or_else(|| "model".into(), |stem| stem.to_string_lossy().into_owned());
    options.name.clone().unwrap_or_else(|| header.name().map_or_else(of_path, str::to_owned))
}

/// Facts for clients. `template` is the source of the chat template.
fn facts(header: &Gguf, tokens: &Tokenization, template: Option<&str>, quantization: String) -> ModelFacts {
    let n_elements = |dims: &[u64]| dims.iter().fold(1u64, |n, dim| n.saturating_mul(*dim));
    ModelFacts {
        n_params: header.tensors.iter().map(|tensor| n_elements(&tensor.dims)).fold(0, u64::saturating_add),
        file_bytes: header.files.n_bytes(),
        quantization,
        chat_template: template.unwrap_or_default().to_owned(),
        bos_token: tokens.vocabulary.text(tokens.bos),
        eos_token: tokens.vocabulary.text(tokens.eos),
        infill: tokens.infill,
    }
}

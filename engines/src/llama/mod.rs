//! Runs GGUF models with llama.cpp.
//!
//! [`LlamaEngine::start`] loads a model and starts one thread, the scheduler, which owns the model's context. The
//! engine is a handle that checks requests and sends them to that thread; dropping the last handle ends it.
//! `baton node` uses it. The proxy never does, since a crash in C++ must cost a node and not the endpoint.

mod adapter;
mod backend;
pub mod blob;
mod canary;
mod cell_order;
mod config;
mod constrain;
mod cpu_tensors;
mod deep_stack;
mod derivable;
pub mod devices;
mod embed;
mod export_buffer;
mod facts;
mod jobs;
mod kv_flow;
mod lane;
mod lark;
mod load;
mod load_error;
mod locked_memory;
mod matcher_cache;
mod pair;
mod pixels;
pub mod placement;
pub mod probe;
mod projector;
mod prompt;
mod prompt_scores;
pub mod reference;
mod sampler;
mod scheduler;
mod sequence;
mod slots;
mod start;
mod state;
mod step_budget;
mod text_work;
mod tokenizer;
pub mod transfer;
pub mod trial;
mod vocabulary;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc as std_mpsc};
use std::thread::JoinHandle;
use std::time::Instant;

use async_trait::async_trait;
use baton_schemas::embed::EmbedSequences;
use baton_schemas::generate::{Conversation, Sampling};
use baton_schemas::handoff::{KvSource, LinkMeasurement, PrefillRequest};
use baton_schemas::image::{self, is_placeholder};
use baton_schemas::kv::PrefillTimings;
use baton_schemas::node::{Memory, NodeInfo, NodeLoad, PairRequest, Role, TokenizeRequest};
use baton_schemas::streams::MAX_ALTERNATIVES;
use baton_schemas::{EngineError, SequenceEvent, SequenceRequest, Token};
use futures::StreamExt;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::mtmd::mtmd_default_marker;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;

use self::adapter::Adapter;
pub use self::config::LlamaConfig;
use self::constrain::{Compiler, Constrained};
use self::jobs::{EmbedJob, EngineLoad, Job, SchedulerMessage};
use self::kv_flow::{Export, Exported};
pub use self::load_error::LoadError;
use self::pair::PairForm;
use self::projector::{ImageRun, Projector};
use self::scheduler::{EVENT_WINDOW, SchedulerLimits};
use self::start::{Start, Wake, wake};
pub use self::state::StateError;
use self::step_budget::PrefillBudget;
use self::text_work::TextWork;
use self::tokenizer::Tokenizer;
use self::vocabulary::Vocabulary;
use crate::engine::{CHUNK_WINDOW, EmbedStream, Engine, KvEvent, KvStream, SequenceStream};
use crate::gguf::Gguf;
use crate::handoff::{self, KvPuller};
use crate::template::{ChatTemplate, SpecialTokens, TemplateError};

/// A running model. Cheap to clone through an `Arc`.
pub struct LlamaEngine {
    model: Arc<LlamaModel>,
    vocabulary: Arc<Vocabulary>,
    tokenizer: Arc<Tokenizer>,
    template: Option<Arc<ChatTemplate>>,
    /// For a reranker.
    pairs: Option<PairForm>,
    texts: TextWork,
    info: NodeInfo,
    max_queued: usize,
    puller: Option<Arc<dyn KvPuller>>,
    constraints: Arc<Compiler>,
    projector: Option<Arc<Projector>>,
    shared: Arc<EngineLoad>,
    load: watch::Receiver<NodeLoad>,
    /// `None` only while dropping: closing the channel ends the scheduler.
    messages: Option<Arc<std_mpsc::Sender<SchedulerMessage>>>,
    scheduler: Option<JoinHandle<()>>,
}

impl Drop for LlamaEngine {
    /// Waits for the running step, so that the scheduler's thread frees llama.cpp's memory before the process exits.
    fn drop(&mut self) {
        drop(self.messages.take());
        if self.scheduler.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the scheduler's thread panicked before the engine was dropped");
        }
    }
}

impl LlamaEngine {
    /// Loads the model and starts its thread. Blocking: up to minutes.
    ///
    /// `puller` fetches KV for requests that name a prefill node; without a puller the engine computes such prompts
    /// itself.
    pub fn start(config: LlamaConfig, puller: Option<Arc<dyn KvPuller>>) -> Result<LlamaEngine, LoadError> {
        config.check()?;
        let gguf = Gguf::open(&config.model)?;
        let sizes = load::sizes(&gguf, &config, load::available_memory())?;
        let mut model = load::model(&config, &gguf)?;
        let adapter = Adapter::load(&config, &gguf, &mut model)?.map(Arc::new);
        let model = Arc::new(model);
        let vocabulary = Arc::new(Vocabulary::of(&model));
        let tokenizer = Arc::new(Tokenizer::new(Arc::clone(&model), &gguf, &config.model)?);
        let projector = Projector::load(&config, &model)?;
        let template = compile_template(&config, &gguf, &model, &vocabulary)?.map(Arc::new);
        let gpu = devices::first_gpu(config.device.as_deref(), config.n_gpu_layers)?;
        if config.mlock && gpu.is_none() {
            locked_memory::warn_unless_locked(model.size());
        }
        let limits = SchedulerLimits {
            n_slots: config.n_slots as usize,
            n_ctx: sizes.n_ctx as usize,
            n_cells: sizes.n_cells as usize,
            budget: PrefillBudget::new(&config, gpu.is_some()),
            sliding_window: gguf.sliding_window().and_then(|w| usize::try_from(w).ok()).filter(|&w| w > 0),
            indivisible: model.is_recurrent() || model.is_hybrid(),
        };
        let of_file = || gguf.name().map_or_else(|| file_stem(&config.model), str::to_owned);
        let name = config.name.clone().unwrap_or_else(of_file);
        let architecture = gguf.architecture().unwrap_or("unknown").to_owned();
        let facts = facts::gather(&config, &gguf, &model, &vocabulary);
        let embedding = embed::plan::plan(&gguf, &model, &config, sizes.n_ctx);
        let is_reranker = embedding.is_some_and(|plan| plan.reranking().is_some());
        let special = || special_tokens(&model, &vocabulary);
        let pairs = is_reranker.then(|| PairForm::of(&gguf, &model, special())).transpose();
        let pairs = pairs.map_err(|error| template_error(&config, &error))?;
        let generates = gguf.generates();
        let devices = devices::in_use(config.device.as_deref(), config.n_gpu_layers)?;
        let of_adapter = adapter.iter().map(|adapter| adapter.changes());
        let changes = config.cache_types.changes().into_iter().chain(config.rope.changes()).chain(of_adapter);
        let fingerprint = gguf.fingerprint(&config.model, &changes.collect::<Vec<_>>())?;
        let (load, load_rx) = watch::channel(NodeLoad::default());
        let shared = Arc::new(EngineLoad { n_queued: AtomicUsize::new(0), load });
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
            role: Role::Both,
            fingerprint: Some(fingerprint),
            kv: started.kv,
            facts,
            process: 0,
        };
        let constraints = Arc::new(Compiler::new(Arc::clone(&vocabulary)));
        let texts = TextWork::new();
        Ok(LlamaEngine {
            model,
            vocabulary,
            tokenizer,
            constraints,
            projector,
            template,
            pairs,
            texts,
            info,
            max_queued: config.max_queued as usize,
            puller,
            shared,
            load: load_rx,
            messages: Some(messages),
            scheduler: Some(started.thread),
        })
    }

    fn check(&self, request: &SequenceRequest) -> Result<(), EngineError> {
        if !self.info.generates {
            let does = match self.info.reranking {
                Some(_) => "only scores documents for a query",
                None => "only computes vectors of texts",
            };
            return Err(EngineError::Unsupported { feature: format!("generating text: its model {does}") });
        }
        let n_vocab = self.info.n_vocab;
        if request.prompt.is_empty() {
            return Err(EngineError::invalid("the prompt is empty"));
        }
        let known = |t: &Token| *t < n_vocab;
        let biased = request.sampling.logit_bias.iter().map(|(t, _)| t);
        // `Projector::find` checks placeholders, if the request has images.
        let prompt = request.prompt.iter().filter(|t| request.images.is_none() || !is_placeholder(**t));
        if let Some(bad) = prompt.chain(&request.generated).chain(biased).find(|t| !known(t)) {
            return Err(EngineError::invalid(format!("token {bad} is not in the vocabulary of {n_vocab} tokens")));
        }
        check_sampling(&request.sampling)?;
        check_prompt_logprobs(request)?;
        // One token must fit after the prompt, unless none is requested.
        let n_prompt = request.prompt.len() + request.generated.len();
        let n_ctx = self.info.n_ctx as usize;
        if n_prompt >= n_ctx && !(request.max_tokens == Some(0) && n_prompt == n_ctx) {
            return Err(EngineError::ContextOverflow { n_prompt: n_prompt as u32, n_ctx: self.info.n_ctx });
        }
        Ok(())
    }

    /// Finds the images in a request's prompt.
    fn images(&self, request: &SequenceRequest) -> Result<Vec<ImageRun>, EngineError> {
        match (&request.images, &self.projector) {
            (None, _) => Ok(Vec::new()),
            (Some(_), Some(projector)) => projector.find(request),
            (Some(_), None) => Err(no_projector()),
        }
    }

    /// Sends a checked sequence to the scheduler.
    fn submit(
        &self,
        request: SequenceRequest,
        export: Option<Export>,
        constrained: Option<Constrained>,
    ) -> Result<mpsc::Receiver<Result<SequenceEvent, EngineError>>, EngineError> {
        let images = self.images(&request)?;
        let room = match &self.projector {
            Some(projector) if !images.is_empty() => {
                let limit = self.max_queued as u32;
                Some(projector.room(&images).ok_or(EngineError::QueueFull { limit })?)
            }
            _ => None,
        };
        let (events, stream) = mpsc::channel(EVENT_WINDOW);
        let job = Job { request, events, accepted: Instant::now(), export, constrained, images, room };
        self.send(SchedulerMessage::Job(Box::new(job)))?;
        Ok(stream)
    }

    /// Takes a place in the queue and sends a message to the scheduler.
    fn send(&self, message: SchedulerMessage) -> Result<(), EngineError> {
        self.enqueue()?;
        // Sending fails only if the scheduler's thread has panicked.
        let sent = self.messages.as_ref().is_some_and(|m| m.send(message).is_ok());
        if !sent {
            self.shared.n_queued.fetch_sub(1, Ordering::AcqRel);
            return Err(EngineError::internal("the scheduler has stopped"));
        }
        Ok(())
    }

    /// Takes a place in the queue. Errors: the queue is full.
    fn enqueue(&self) -> Result<(), EngineError> {
        let below_limit = |n: usize| (n < self.max_queued).then_some(n + 1);
        self.shared
            .n_queued
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, below_limit)
            .map(|_| ())
            .map_err(|_| EngineError::QueueFull { limit: self.max_queued as u32 })
    }
}

#[async_trait]
impl Engine for LlamaEngine {
    async fn info(&self) -> Result<NodeInfo, EngineError> {
        Ok(self.info.clone())
    }

    async fn load(&self) -> Result<NodeLoad, EngineError> {
        let load = *self.load.borrow();
        Ok(NodeLoad { queued: self.shared.n_queued.load(Ordering::Acquire) as u32, ..load })
    }

    async fn render(&self, conversation: &Conversation) -> Result<Vec<Token>, EngineError> {
        self.render_prompt(conversation).await
    }

    async fn tokenize(&self, request: &TokenizeRequest) -> Result<Vec<Token>, EngineError> {
        self.tokenize_text(request.clone()).await
    }

    async fn pair(&self, request: &PairRequest) -> Result<Vec<Token>, EngineError> {
        self.tokenize_pair(request).await
    }

    async fn detokenize(&self, tokens: &[Token]) -> Result<String, EngineError> {
        // Like llama-server, this writes mtmd's marker for an image.
        let piece = |&t: &Token| match image::begins(t) {
            true => mtmd_default_marker().as_bytes().to_vec(),
            false => self.vocabulary.piece(t),
        };
        let bytes: Vec<u8> = tokens.iter().flat_map(piece).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    async fn pieces(&self, tokens: &[Token]) -> Result<Vec<Vec<u8>>, EngineError> {
        Ok(tokens.iter().map(|&token| self.vocabulary.piece(token)).collect())
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        self.check(&request)?;
        let constrained = match &request.constraint {
            Some(constraint) => Some(self.constraints.constrained(constraint, &request.generated).await?),
            None => None,
        };
        Ok(ReceiverStream::new(self.submit(request, None, constrained)?).boxed())
    }

    async fn embed(&self, request: EmbedSequences) -> Result<EmbedStream, EngineError> {
        let NodeInfo { embedding, reranking, n_vocab, .. } = &self.info;
        let n_ctx = embedding.map(|facts| facts.n_ctx).or(reranking.map(|facts| facts.n_ctx));
        let Some(n_ctx) = n_ctx else {
            return Err(EngineError::Unsupported { feature: "embeddings: its model gives no vectors".into() });
        };
        crate::embed::check(&request, n_ctx, *n_vocab)?;
        let (events, stream) = mpsc::channel(request.inputs.len() + 1);
        let job = EmbedJob { inputs: request.inputs.into(), events, accepted: Instant::now(), started: None };
        self.send(SchedulerMessage::Embed(Box::new(job)))?;
        Ok(ReceiverStream::new(stream).boxed())
    }

    async fn measure_link(&self, source: &KvSource) -> Result<LinkMeasurement, EngineError> {
        handoff::measure_link(self.puller.as_deref(), source).await
    }

    async fn prefill(&self, request: PrefillRequest) -> Result<KvStream, EngineError> {
        let Some(kv) = &self.info.kv else {
            return Err(EngineError::Unsupported { feature: "handing this model's KV over".into() });
        };
        handoff::check(&request, kv, self.info.n_ctx)?;
        let (chunks, chunks_rx) = mpsc::channel(CHUNK_WINDOW);
        let end = request.tokens.len() as u32;
        let export = Export::new(chunks, request.start, end);
        // The last token of a sequence is decoded and not prefilled, so a prefill appends one that is never decoded.
        let mut prompt = request.tokens;
        prompt.push(0);
        let sequence = SequenceRequest {
            prompt,
            max_tokens: Some(0),
            cache_scope: request.cache_scope,
            ephemeral: request.ephemeral,
            gives_way: request.gives_way,
            ..SequenceRequest::default()
        };
        self.check(&sequence)?;
        let events = self.submit(sequence, Some(export), None)?;
        let wake = self.messages.as_ref().map(wake);
        Ok(exported(events, chunks_rx, wake).boxed())
    }
}

/// The stream of a prefill: its chunks, then the times from the sequence's last event.
fn exported(
    mut events: mpsc::Receiver<Result<SequenceEvent, EngineError>>,
    mut chunks: mpsc::Receiver<Exported>,
    wake: Option<Wake>,
) -> impl futures::Stream<Item = Result<KvEvent, EngineError>> + Send {
    async_stream::try_stream! {
        let mut n_cached = 0;
        let mut export_ms = 0.0;
        let mut stalled_ms = 0.0;
        let mut last_wait_ms = 0.0;
        // The scheduler drops the channel's sender with the sequence, after its last event.
        while let Some(exported) = chunks.recv().await {
            if let Some(wake) = &wake {
                wake();
            }
            export_ms += exported.took.as_secs_f64() * 1e3;
            // The wait of the last chunk comes after the prefill and does not count.
            stalled_ms += std::mem::replace(&mut last_wait_ms, exported.waited.as_secs_f64() * 1e3);
            yield KvEvent::Chunk(exported.chunk);
        }
        loop {
            match events.recv().await.unwrap_or_else(|| Err(EngineError::internal("the prefill ended early")))? {
                SequenceEvent::Started { n_cached: n } => n_cached = n,
                SequenceEvent::Handoff(_) | SequenceEvent::Token(_) => {}
                SequenceEvent::Finished { timings, .. } => {
                    yield KvEvent::End(PrefillTimings {
                        queue_ms: timings.queue_ms,
                        prefill_ms: timings.prompt_ms,
                        stalled_ms,
                        compute_ms: timings.compute_ms,
                        n_computed: timings.prompt_n,
                        n_cached,
                        export_ms,
                        encode_ms: 0.0,
                    });
                    break;
                }
            }
        }
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
    let text = |t: i32| {
        u32::try_from(t).map_or_else(|_| String::new(), |t| String::from_utf8_lossy(&vocabulary.piece(t)).into_owned())
    };
    SpecialTokens { bos: text(vocab.bos().0), eos: text(vocab.eos().0), control: vocabulary::control_spellings(model) }
}

/// The error for images without a projector. The proxy refuses such requests before, with a better message.
fn no_projector() -> EngineError {
    EngineError::Unsupported { feature: "images: its model has no projector".into() }
}

/// Refuses a request that both asks about its prompt and generates, and one about more than tokens.
fn check_prompt_logprobs(request: &SequenceRequest) -> Result<(), EngineError> {
    let Some(n_top) = request.prompt_logprobs else { return Ok(()) };
    if request.max_tokens != Some(0) || !request.generated.is_empty() || request.images.is_some() {
        return Err(EngineError::invalid("log-probabilities of a prompt need a request that generates nothing"));
    }
    if n_top as usize > MAX_ALTERNATIVES {
        return Err(EngineError::invalid("too many alternatives of a prompt's tokens"));
    }
    Ok(())
}

/// Refuses numbers with which llama.cpp's samplers would loop endlessly or divide by zero.
fn check_sampling(sampling: &Sampling) -> Result<(), EngineError> {
    let numbers = [
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repeat_penalty,
        sampling.frequency_penalty,
        sampling.presence_penalty,
    ];
    let finite = numbers.iter().chain(sampling.logit_bias.iter().map(|(_, b)| b)).all(|n| n.is_finite());
    if !finite || sampling.temperature < 0.0 || sampling.repeat_penalty <= 0.0 {
        return Err(EngineError::invalid("a sampling parameter is out of range"));
    }
    Ok(())
}

fn file_stem(path: &std::path::Path) -> String {
    path.file_stem().map_or_else(|| "model".into(), |stem| stem.to_string_lossy().into_owned())
}

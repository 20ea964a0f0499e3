//! Serves a loaded model: what engines that compute in this process share.
//!
//! [`ModelEngine`] is the handle. It checks requests, renders and tokenizes prompts, compiles constraints, and sends
//! sequences to the scheduler's thread, which owns the model's context (`context.rs`); dropping the last handle
//! ends it. `open` starts both. An engine's own folder describes and loads the model for it and implements the context:
//! `llama/` with llama.cpp, `candle/` in Rust, `mlx/` with mlx-lm.

mod case_folding;
mod checkpoints;
mod constrain;
pub(crate) mod context;
mod deep_stack;
mod derivable;
pub(crate) mod described;
pub(crate) mod drafting;
mod expansion;
pub(crate) mod extent;
pub(crate) mod images;
pub(crate) mod jobs;
pub(crate) mod kv_flow;
mod lane;
mod lark;
mod load_error;
mod matcher_cache;
pub(crate) mod memory;
pub(crate) mod open;
pub(crate) mod pair;
mod prompt;
mod prompt_scores;
pub(crate) mod sampler;
pub(crate) mod scheduler;
mod sequence;
mod slots;
pub(crate) mod start;
pub(crate) mod step_budget;
#[cfg(test)]
mod stub_engine;
mod template_process;
pub(crate) mod text_vectors;
mod text_work;
pub(crate) mod vectors;
mod wake;
mod wanted_store;

use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc as std_mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use baton_link::engine::{EmbedStream, Engine, KvEvent, KvStream, SequenceStream};
use baton_link::handoff::{self, KvPuller};
use baton_model::vocabulary::{TextTokenizer, Vocabulary};
use baton_schemas::embed::EmbedSequences;
use baton_schemas::generate::{Conversation, Sampling};
use baton_schemas::handoff::{KvSource, LinkMeasurement, PrefillRequest};
use baton_schemas::held::{HeldDigest, HeldKey};
use baton_schemas::image::{self, is_placeholder};
use baton_schemas::kv::PrefillTimings;
use baton_schemas::node::{NodeInfo, NodeLoad, PairRequest, TokenizeRequest};
use baton_schemas::streams::MAX_ALTERNATIVES;
use baton_schemas::{CacheScope, EngineError, KeyTag, SequenceEvent, SequenceRequest, Token};
use futures::StreamExt;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_stream::wrappers::ReceiverStream;

use self::constrain::{Compiler, Constrained, Masks};
pub(crate) use self::deep_stack::on_deep_stack;
#[cfg(feature = "measure")]
pub use self::drafting::{simulated, simulated_node};
use self::images::{ImageEncoder, ImageRun, no_projector};
use self::jobs::{EmbedJob, EngineLoad, Job, SchedulerMessage};
use self::kv_flow::{Export, Exported, ExportedKv};
pub use self::load_error::LoadError;
use self::pair::PairForm;
use self::scheduler::EVENT_WINDOW;
use self::start::wake;
use self::template_process::Renderer;
use self::text_work::TextWork;
use self::wake::Wake;

/// What stands in place of an image in a text: mtmd's marker, which llama-server writes, too.
const IMAGE_MARK: &str = "<__media__>";

/// A running model. Cheap to clone through an `Arc`.
pub struct ModelEngine {
    vocabulary: Arc<Vocabulary>,
    tokenizer: Arc<dyn TextTokenizer>,
    /// Added to a prompt that does not begin with it.
    bos: Option<Token>,
    template: Option<Arc<Renderer>>,
    /// For a reranker.
    pairs: Option<PairForm>,
    texts: TextWork,
    info: NodeInfo,
    max_queued: usize,
    puller: Option<Arc<dyn KvPuller>>,
    constraints: Arc<Compiler>,
    images: Option<Arc<dyn ImageEncoder>>,
    shared: Arc<EngineLoad>,
    load: watch::Receiver<NodeLoad>,
    /// `None` only while dropping: closing the channel ends the scheduler.
    messages: Option<Arc<std_mpsc::Sender<SchedulerMessage>>>,
    scheduler: Option<JoinHandle<()>>,
}

impl Drop for ModelEngine {
    /// Waits for the running step, so that the scheduler's thread frees the context's memory before the process exits.
    fn drop(&mut self) {
        drop(self.messages.take());
        if self.scheduler.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the scheduler's thread panicked before the engine was dropped");
        }
    }
}

impl ModelEngine {
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
        if request.held_only && request.max_tokens != Some(0) {
            return Err(EngineError::invalid("what computes nothing generates no tokens"));
        }
        let known = |t: &Token| *t < n_vocab;
        let biased = request.sampling.logit_bias.iter().map(|(t, _)| t);
        // `ImageEncoder::find` checks placeholders, if the request has images.
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
        match (&request.images, &self.images) {
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
        let room = match &self.images {
            Some(projector) if !images.is_empty() => {
                let limit = self.max_queued as u32;
                Some(projector.room(&images).ok_or(EngineError::QueueFull { limit })?)
            }
            _ => None,
        };
        let (events, stream) = mpsc::channel(EVENT_WINDOW);
        let constrained = constrained.zip(self.messages.as_ref()).map(|(at, messages)| Masks::new(at, wake(messages)));
        let job = Job { request, events, accepted: Instant::now(), export, constrained, images, room };
        self.send(SchedulerMessage::Job(Box::new(job)))?;
        Ok(stream)
    }

    /// Takes a place in the queue and sends a message to the scheduler.
    fn send(&self, message: SchedulerMessage) -> Result<(), EngineError> {
        self.enqueue()?;
        self.tell(message).inspect_err(|_| {
            self.shared.n_queued.fetch_sub(1, Ordering::AcqRel);
        })
    }

    /// Sends a message that takes no place in the queue. Errors: the scheduler's thread has panicked.
    fn tell(&self, message: SchedulerMessage) -> Result<(), EngineError> {
        let sent = self.messages.as_ref().is_some_and(|m| m.send(message).is_ok());
        sent.then_some(()).ok_or_else(|| EngineError::internal("the scheduler has stopped"))
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
impl Engine for ModelEngine {
    async fn info(&self) -> Result<NodeInfo, EngineError> {
        Ok(self.info.clone())
    }

    async fn load(&self) -> Result<NodeLoad, EngineError> {
        let load = *self.load.borrow();
        Ok(NodeLoad { queued: self.shared.n_queued.load(Ordering::Acquire) as u32, ..load })
    }

    async fn held(&self, key: &HeldKey) -> Result<HeldDigest, EngineError> {
        let (reply, pieces) = oneshot::channel();
        self.tell(SchedulerMessage::Held(reply))?;
        let pieces = pieces.await.map_err(|_| EngineError::internal("the scheduler has stopped"))?;
        let key = *key;
        tokio::task::spawn_blocking(move || pieces.digest(&key)).await.map_err(EngineError::internal)
    }

    async fn render(&self, conversation: &Conversation, key: KeyTag) -> Result<Vec<Token>, EngineError> {
        self.render_prompt(conversation, key).await
    }

    async fn tokenize(&self, request: &TokenizeRequest) -> Result<Vec<Token>, EngineError> {
        self.tokenize_text(request.clone()).await
    }

    async fn pair(&self, request: &PairRequest) -> Result<Vec<Token>, EngineError> {
        self.tokenize_pair(request).await
    }

    async fn detokenize(&self, tokens: &[Token]) -> Result<String, EngineError> {
        let piece = |&t: &Token| match image::begins(t) {
            true => IMAGE_MARK.as_bytes().to_vec(),
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
            Some(constraint) => Some(self.constraints.constrained(constraint, &request.generated, request.key).await?),
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
        // Every vector, the begin and the end.
        let (events, stream) = mpsc::channel(request.inputs.len() + 2);
        let EmbedSequences { inputs, reports_begin } = request;
        let accepted = Instant::now();
        let job = EmbedJob { inputs: inputs.into(), events, accepted, started: None, owes_begin: reports_begin };
        self.send(SchedulerMessage::Embed(Box::new(job)))?;
        Ok(ReceiverStream::new(stream).boxed())
    }

    async fn measure_link(&self, source: &KvSource) -> Result<LinkMeasurement, EngineError> {
        handoff::measure_link(self.puller.as_deref(), source).await
    }

    async fn forget(&self, scopes: &[CacheScope]) -> Result<(), EngineError> {
        self.tell(SchedulerMessage::Forget(scopes.to_vec()))
    }

    async fn store_kv(&self) {
        let (reply, stored) = oneshot::channel();
        // A scheduler that has stopped stores nothing, and drops the reply.
        _ = self.tell(SchedulerMessage::Store(reply));
        _ = stored.await;
    }

    async fn prefill(&self, request: PrefillRequest) -> Result<KvStream, EngineError> {
        let Some(kv) = &self.info.kv else {
            return Err(EngineError::Unsupported { feature: "handing this model's KV over".into() });
        };
        handoff::check(&request, kv, self.info.n_ctx)?;
        let end = request.tokens.len() as u32;
        let (export, chunks) = Export::new(request.start, end, kv.layout.states.len(), &request.checkpoints);
        let seconds = |bps: u64| Duration::from_secs_f64(kv.state_bytes() as f64 / bps as f64);
        let export = export.over(request.state_bps.map(seconds));
        // The last token of a sequence is decoded and not prefilled, so a prefill appends one that is never decoded.
        let mut prompt = request.tokens;
        prompt.push(0);
        let sequence = SequenceRequest {
            prompt,
            max_tokens: Some(0),
            cache_scope: request.cache_scope,
            ephemeral: request.ephemeral,
            gives_way: request.gives_way,
            held_only: request.held_only,
            images: request.images,
            ..SequenceRequest::default()
        };
        self.check(&sequence)?;
        let events = self.submit(sequence, Some(export), None)?;
        Ok(exported(events, chunks, self.messages.as_ref().map(wake)).boxed())
    }
}

/// The stream of a prefill: its chunks, then the times from the sequence's last event.
fn exported(
    mut events: mpsc::Receiver<Result<SequenceEvent, EngineError>>,
    mut chunks: mpsc::Receiver<Exported>,
    wake: Option<Wake>,
) -> impl futures::Stream<Item = Result<KvEvent, EngineError>> + Send {
    async_stream::try_stream! {
        let ended_early = || Err(EngineError::internal("the prefill ended early"));
        let n_cached = match events.recv().await.unwrap_or_else(ended_early)? {
            SequenceEvent::Started(cached) => cached.n_cached,
            _ => 0,
        };
        yield KvEvent::Begun;
        let mut export_ms = 0.0;
        let mut stalled_ms = 0.0;
        let mut last_wait_ms = 0.0;
        // The scheduler drops the channel's sender with the sequence, after its last event.
        while let Some(exported) = chunks.recv().await {
            if let Some(wake) = &wake {
                wake();
            }
            export_ms += exported.took.as_secs_f64() * 1e3;
            yield match exported.kv {
                ExportedKv::Chunk(chunk) => {
                    // The wait of the last chunk comes after the prefill and does not count.
                    stalled_ms += std::mem::replace(&mut last_wait_ms, exported.waited.as_secs_f64() * 1e3);
                    KvEvent::Chunk(chunk)
                }
                ExportedKv::State(part) => KvEvent::State(part),
            };
        }
        loop {
            match events.recv().await.unwrap_or_else(ended_early)? {
                SequenceEvent::Started(_)
                | SequenceEvent::PrefillBegun
                | SequenceEvent::Handoff(_)
                | SequenceEvent::Token(_) => {}
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

/// Refuses numbers with which the samplers would divide by zero or give no probabilities.
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

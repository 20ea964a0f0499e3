//! An engine that simulates a model: deterministic text at configured speeds.
//!
//! It replaces a real engine for thousands of streams on a small machine, or for the rates of other machines. Its text
//! is a pure function of prompt, seed and position, so that a resumed sequence continues exactly. Measurements with it
//! show the endpoint's performance and are marked as simulated.

mod abort;
mod backlog;
mod cache;
mod config;
mod kv;
pub mod link;
mod loopback;
mod machine;
mod paced;
mod queue;
mod restore;
mod steps;
mod text;
mod vectors;

use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use baton_link::engine::{EmbedStream, Engine, KvEvent, KvStream, SequenceStream};
use baton_link::handoff::{self, KvPuller};
use baton_schemas::embed::EmbedSequences;
use baton_schemas::generate::Conversation;
use baton_schemas::handoff::{KvSource, LinkMeasurement, PrefillRequest};
use baton_schemas::held::{HeldDigest, HeldKey, RestoreRates};
use baton_schemas::kv::{PrefillTimings, max_frame_positions};
use baton_schemas::node::{Memory, ModelFacts, NodeInfo, NodeLoad, Phase, Role, TokenizeRequest};
use baton_schemas::sequence::{FinishReason, GeneratedToken, SequenceEvent, Timings};
use baton_schemas::{CacheScope, EngineError, KeyTag, SequenceRequest, Token};
use futures::StreamExt;
use futures::future::maybe_done;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

use self::cache::PrefixCache;
pub use self::cache::{SimMemory, SimTier};
pub use self::config::SimConfig;
pub use self::paced::PacedPuller;
use self::steps::{StepCost, StepQueue, seconds};
use self::text::{N_VOCAB, SimReply};
use crate::embed;
use crate::engine_options::SimWork;
pub use crate::engine_options::{SimAbort, SimMachine};

/// Texts of up to so many tokens are tokenized, even if they do not fit the context.
const MAX_LISTED: u32 = 1 << 20;

pub struct SimEngine {
    state: Arc<SimState>,
}

struct SimState {
    config: SimConfig,
    slots: Arc<Semaphore>,
    queue: queue::SimQueue,
    prefill_steps: StepQueue,
    backlog: Arc<backlog::Backlog>,
    cache: Mutex<PrefixCache>,
    puller: Option<Arc<dyn KvPuller>>,
    /// The factor on both rates, as the bits of an f64.
    speed: AtomicU64,
}

/// Positions of a handoff's last chunk: few, because no computation overlaps with its transfer.
const LAST_CHUNK_TOKENS: u32 = 64;

impl SimEngine {
    /// An engine that computes every prompt itself. A rate that is not positive takes no time.
    pub fn new(config: SimConfig) -> SimEngine {
        SimEngine::with_puller(config, None)
    }

    /// An engine with a puller for requests that name a prefill node.
    pub fn with_puller(config: SimConfig, puller: Option<Arc<dyn KvPuller>>) -> SimEngine {
        let n_slots = (config.n_slots.max(1) as usize).min(Semaphore::MAX_PERMITS);
        let state = SimState {
            slots: Arc::new(Semaphore::new(n_slots)),
            queue: queue::SimQueue::default(),
            prefill_steps: StepQueue::new(),
            backlog: Arc::default(),
            cache: Mutex::new(PrefixCache::new(n_slots, config.store)),
            config,
            puller,
            speed: AtomicU64::new(1f64.to_bits()),
        };
        if let Some(puller) = &state.puller {
            puller.introduce(kv::local(&state.config));
        }
        SimEngine { state: Arc::new(state) }
    }

    /// Multiplies the configured rates by a factor from now on, to simulate heat or other programs. The rates in its
    /// load do not change.
    pub fn set_speed(&self, factor: f64) {
        self.state.speed.store(factor.to_bits(), Ordering::Relaxed);
    }

    /// What its slots and its store hold now.
    pub fn memory(&self) -> SimMemory {
        lock(&self.state.cache).memory()
    }

    /// Lets it hold again what it held then, as if nothing had been asked since.
    pub fn set_memory(&self, memory: &SimMemory) {
        lock(&self.state.cache).set_memory(memory);
    }

    /// Refuses long texts that cannot fit the context before their tokens are listed, as other engines do. Each byte is a
    /// token.
    fn check_length(&self, n_bytes: usize) -> Result<(), EngineError> {
        let n_ctx = self.state.config.n_ctx;
        match u32::try_from(n_bytes) {
            Ok(n_prompt) if n_prompt <= n_ctx.max(MAX_LISTED) => Ok(()),
            n_prompt => Err(EngineError::ContextOverflow { n_prompt: n_prompt.unwrap_or(u32::MAX), n_ctx }),
        }
    }

    fn check(&self, request: &SequenceRequest) -> Result<(), EngineError> {
        let config = &self.state.config;
        if request.prompt.is_empty() {
            return Err(EngineError::invalid("the prompt is empty"));
        }
        if request.constraint.is_some() {
            return Err(EngineError::Unsupported { feature: "structured output: it is a simulator".into() });
        }
        if let Some(bad) = request.prompt.iter().chain(&request.generated).find(|&&t| t >= N_VOCAB) {
            return Err(EngineError::invalid(format!("token {bad} is not in the vocabulary of {N_VOCAB} tokens")));
        }
        let n_prompt = request.prompt.len() + request.generated.len();
        let n_ctx = config.n_ctx as usize;
        if n_prompt >= n_ctx && !(request.max_tokens == Some(0) && n_prompt == n_ctx) {
            return Err(EngineError::ContextOverflow { n_prompt: n_prompt as u32, n_ctx: config.n_ctx });
        }
        Ok(())
    }
}

#[async_trait]
impl Engine for SimEngine {
    async fn info(&self) -> Result<NodeInfo, EngineError> {
        let config = &self.state.config;
        let kv = kv::identity(config);
        Ok(NodeInfo {
            model: config.model.clone(),
            engine: "sim".into(),
            architecture: "sim".into(),
            n_ctx: config.n_ctx,
            n_ctx_train: config.n_ctx,
            n_vocab: N_VOCAB,
            n_slots: config.n_slots,
            memory: Memory::default(),
            has_chat_template: true,
            generates: true,
            embedding: Some(vectors::facts(config.n_ctx)),
            reranking: None,
            projector: None,
            devices: vec![config.device.clone()],
            workers: Vec::new(),
            role: Role::Both,
            fingerprint: Some(kv.fingerprint),
            kv: Some(kv),
            cache_types: None,
            no_handoff: None,
            takes_other_weights: self.state.puller.as_ref().is_some_and(|puller| puller.takes_other_weights()),
            reports_begin: true,
            hands_over_images: false,
            facts: ModelFacts::default(),
            process: 0,
            version: String::new(),
        })
    }

    async fn load(&self) -> Result<NodeLoad, EngineError> {
        let config = &self.state.config;
        let (n_slots, free) = (config.n_slots.max(1), self.state.slots.available_permits() as u32);
        let (held, store) = {
            let cache = lock(&self.state.cache);
            (cache.version(), cache.report(config.kv_bytes_per_token))
        };
        Ok(NodeLoad {
            phase: Phase::Serving,
            active_slots: n_slots - free,
            queued: self.state.queue.n_waiting() as u32,
            prefill_backlog: self.state.backlog.n_tokens(),
            free_cells: free.saturating_mul(config.n_ctx),
            n_cells: n_slots.saturating_mul(config.n_ctx),
            prefill_tps: config.prefill_tps,
            decode_tps: config.decode_tps,
            held,
            restore: RestoreRates { memory: config.store[0].restore_tps, disk: config.store[1].restore_tps },
            store,
        })
    }

    async fn held(&self, key: &HeldKey) -> Result<HeldDigest, EngineError> {
        Ok(lock(&self.state.cache).held().digest(key))
    }

    async fn render(&self, conversation: &Conversation, _key: KeyTag) -> Result<Vec<Token>, EngineError> {
        let n_bytes = conversation.messages.iter().map(|message| message.content.len()).sum();
        self.check_length(n_bytes)?;
        Ok(self.state.unless_abort(SimWork::Tokenize, text::render(conversation)))
    }

    async fn tokenize(&self, request: &TokenizeRequest) -> Result<Vec<Token>, EngineError> {
        self.check_length(request.text.len())?;
        Ok(self.state.unless_abort(SimWork::Tokenize, text::tokenize(request)))
    }

    async fn detokenize(&self, tokens: &[Token]) -> Result<String, EngineError> {
        Ok(String::from_utf8_lossy(&text::bytes(tokens)).into_owned())
    }

    async fn pieces(&self, tokens: &[Token]) -> Result<Vec<Vec<u8>>, EngineError> {
        Ok(tokens.iter().map(|&token| text::bytes(&[token])).collect())
    }

    async fn generate(&self, request: SequenceRequest) -> Result<SequenceStream, EngineError> {
        self.check(&request)?;
        let state = Arc::clone(&self.state);
        let place = queue::SimQueuePlace::take(Arc::clone(&state))?;
        let (mut tokens, mut uncomputed) = state.accept_sequence(&request);
        let events = async_stream::try_stream! {
            let accepted = Instant::now();
            let _slot = state.slot().await?;
            drop(place);
            let started = Instant::now();
            let (cached, restore) = state.start(&request, &tokens);
            let n_cached = cached.n_cached as usize;
            let wanted = &tokens[..request.n_prefill()];
            let sim_reply = SimReply::new(&request);
            let handoff = {
                let begun = Notify::new();
                let mut pull = pin!(maybe_done(async {
                    restore::until_pull(restore).await;
                    state.pull(&request, wanted, n_cached, &begun).await
                }));
                restore::beside(restore, pull.as_mut()).await;
                yield SequenceEvent::Started(cached);
                if request.reports_begin() {
                    restore::begins(&begun, pull.as_mut()).await;
                    yield SequenceEvent::PrefillBegun;
                }
                pull.as_mut().await;
                pull.take_output().flatten()
            };
            if let Some(handoff) = handoff {
                yield SequenceEvent::Handoff(handoff);
            }
            let n_there = n_cached + handoff.map_or(0, |h| h.n_tokens as usize);
            if request.held_only {
                state.keep(request.cache_scope, &tokens[..n_there], false);
                yield SequenceEvent::Finished { reason: FinishReason::Length, timings: Timings::default() };
                return;
            }
            SimAbort::check(state.config.abort.as_ref(), SimWork::Prefill, &request.prompt);
            let n_left = wanted.len().saturating_sub(n_there);
            // Each replayed token takes a step.
            let n_replayed = tokens.len() - 1 - n_there.max(wanted.len());
            let prompt_n = (n_left + n_replayed) as u32;
            let compute = state.prefill_rest(n_left, &mut uncomputed).await;
            state.keep(request.cache_scope, &tokens, request.ephemeral);

            if let Some(k) = request.prompt_logprobs {
                for (idx, &id) in request.prompt.iter().enumerate() {
                    let logprobs = (idx > 0).then(|| sim_reply.logprobs(id, k as usize));
                    yield SequenceEvent::Token(GeneratedToken { id, bytes: text::bytes(&[id]), special: id >= 256, logprobs, drafts: None });
                }
            }

            let (queue_ms, compute_ms, restore_ms) = (millis(started - accepted), millis(compute), millis(restore));
            let mut timings = Timings { queue_ms, prompt_n, compute_ms, restore_ms, ..Timings::default() };
            let mut first_token = None;
            let mut n_sharing = 0.0;
            let mut due = Instant::now();
            for _ in 0..n_replayed {
                due += state.step();
                tokio::time::sleep_until(due).await;
            }
            let limit = request.max_tokens.map_or(usize::MAX, |n| n as usize);
            let reason = loop {
                if tokens.len() - request.prompt.len() >= limit || tokens.len() >= state.config.n_ctx as usize {
                    break FinishReason::Length;
                }
                if tokens.len() - request.prompt.len() == abort::DECODE_TOKENS {
                    SimAbort::check(state.config.abort.as_ref(), SimWork::Decode, &request.prompt);
                }
                // Due times instead of sleeps, so that a late step does not delay the next ones.
                n_sharing += state.n_streams() as f64;
                due += state.step();
                tokio::time::sleep_until(due).await;
                first_token.get_or_insert_with(Instant::now);
                let Some(id) = sim_reply.next(tokens.len()) else { break FinishReason::Stop };
                let logprobs = request.top_logprobs.map(|k| sim_reply.logprobs(id, k as usize));
                tokens.push(id);
                timings.predicted_n += 1;
                yield SequenceEvent::Token(GeneratedToken { id, bytes: text::bytes(&[id]), special: id >= 256, logprobs, drafts: None });
            };
            let first = first_token.unwrap_or_else(Instant::now);
            timings.prompt_ms = millis(first - started);
            timings.predicted_ms = millis(first.elapsed());
            timings.n_sharing = n_sharing / f64::from(timings.predicted_n.max(1));
            state.keep(request.cache_scope, &tokens, request.ephemeral);
            yield SequenceEvent::Finished { reason, timings };
        };
        // No task is needed: the reader polls the stream, and dropping it frees slot and queue place.
        Ok(events.boxed())
    }

    async fn embed(&self, request: EmbedSequences) -> Result<EmbedStream, EngineError> {
        embed::check(&request, self.state.config.n_ctx, N_VOCAB)?;
        vectors::stream(Arc::clone(&self.state), request)
    }

    async fn measure_link(&self, source: &KvSource) -> Result<LinkMeasurement, EngineError> {
        handoff::measure_link(self.state.puller.as_deref(), source).await
    }

    async fn forget(&self, scopes: &[CacheScope]) -> Result<(), EngineError> {
        lock(&self.state.cache).forget(scopes);
        Ok(())
    }

    async fn prefill(&self, request: PrefillRequest) -> Result<KvStream, EngineError> {
        let identity = kv::identity(&self.state.config);
        handoff::check(&request, &identity, self.state.config.n_ctx)?;
        let chunk = self.state.config.chunk_tokens.clamp(1, max_frame_positions(&identity.layout));
        let state = Arc::clone(&self.state);
        let place = queue::SimQueuePlace::take(Arc::clone(&state))?;
        let mut uncomputed = state.accept(request.cache_scope, &request.tokens);
        let events = async_stream::try_stream! {
            let accepted = Instant::now();
            let _slot = state.slot().await?;
            drop(place);
            yield KvEvent::Begun;
            let started = Instant::now();
            let tokens = &request.tokens;
            let (cached, restore) = state.restorable(request.cache_scope, tokens);
            restore::wait(restore).await;
            let n_cached = cached.n_cached as usize;
            if request.held_only && n_cached < tokens.len() {
                Err(EngineError::invalid("not all of this KV is held"))?;
            }
            SimAbort::check(state.config.abort.as_ref(), SimWork::Prefill, tokens);
            let mut p0 = request.start;
            // KV depends on all tokens before it: those before `start` are computed, too, unless they are cached.
            let n_before = (p0 as usize).saturating_sub(n_cached);
            uncomputed.set(tokens.len().saturating_sub(n_cached.max(request.start as usize)) + n_before);
            let mut compute = state.prefill_in_chunks(n_before, &mut uncomputed).await;
            let mut n_computed = n_before as u32;
            let mut computed = started;
            // `stalled` counts the time that chunks waited for their reader, without the last chunk's.
            let mut stalled = Duration::ZERO;
            let mut taken = Duration::ZERO;
            while (p0 as usize) < tokens.len() {
                let n_left = tokens.len() as u32 - p0;
                let p1 = p0 + (n_left / 2).max(LAST_CHUNK_TOKENS).min(chunk).min(n_left);
                let n_new = (p1 as usize).saturating_sub(n_cached.max(p0 as usize));
                compute += state.prefill(n_new, &mut uncomputed).await;
                n_computed += n_new as u32;
                computed = Instant::now();
                stalled += taken;
                // A layer's states leave before the last chunk, the others after it.
                let (early, late) = if p1 as usize == tokens.len() { kv::states(&state.config, tokens) } else { (None, None) };
                if let Some(part) = early {
                    yield KvEvent::State(part);
                }
                yield KvEvent::Chunk(kv::chunk(&state.config, tokens, p0..p1));
                if let Some(part) = late {
                    yield KvEvent::State(part);
                }
                taken = computed.elapsed();
                p0 = p1;
            }
            state.keep(request.cache_scope, tokens, request.ephemeral);
            yield KvEvent::End(PrefillTimings {
                queue_ms: millis(started - accepted),
                prefill_ms: millis(computed - started),
                stalled_ms: millis(stalled),
                compute_ms: millis(compute),
                n_computed,
                n_cached: n_cached as u32,
                export_ms: 0.0,
                encode_ms: 0.0,
            });
        };
        Ok(events.boxed())
    }
}

impl SimState {
    /// These tokens, unless the work on them is the fault.
    fn unless_abort(&self, work: SimWork, tokens: Vec<Token>) -> Vec<Token> {
        SimAbort::check(self.config.abort.as_ref(), work, &tokens);
        tokens
    }

    /// Keeps what a slot has for later sequences.
    fn keep(&self, scope: CacheScope, tokens: &[Token], ephemeral: bool) {
        if !ephemeral {
            lock(&self.cache).insert(scope, tokens.to_vec());
        }
    }

    fn speed(&self) -> f64 {
        f64::from_bits(self.speed.load(Ordering::Relaxed))
    }

    /// The number of sequences in slots.
    fn n_streams(&self) -> usize {
        self.config.n_slots.max(1) as usize - self.slots.available_permits()
    }

    /// The time of a decode step with the current number of streams.
    fn step(&self) -> Duration {
        let others = self.n_streams().saturating_sub(1) as f64;
        seconds(1.0 + self.config.decode_sharing_cost * others, self.config.decode_tps * self.speed())
    }

    fn step_cost(&self) -> StepCost {
        StepCost {
            launch: seconds(self.config.prefill_step_ms / 1e3, self.speed()),
            tps: self.config.prefill_tps * self.speed(),
            n_max: self.config.chunk_tokens as usize,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

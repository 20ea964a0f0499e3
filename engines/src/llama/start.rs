//! Starts the thread that owns the context and probes the model's KV before it serves.

use std::sync::Arc;
use std::sync::mpsc as std_mpsc;
use std::thread::JoinHandle;

use baton_link::handoff::{KvPuller, LocalKv};
use baton_model::gguf::Gguf;
use baton_model::options::CacheTypes;
use baton_model::vocabulary::Vocabulary;
use baton_schemas::kv::{Fingerprint, KvLayout};
use baton_schemas::node::KvIdentity;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::model::LlamaModel;

use super::adapter::Adapter;
use super::canary;
use super::config::LlamaConfig;
use super::context::{LlamaSlots, blob_placement};
use super::embed::Embedder;
use super::embed::plan::EmbedPlan;
use super::load;
use super::load_error::LoadError;
use super::probe::{self, NoHandoff};
use super::projector::Projector;
use super::transfer::KvTransfer;
use crate::codec_profile;
use crate::serving::jobs::{EngineLoad, SchedulerMessage};
use crate::serving::memory::available_memory;
use crate::serving::scheduler::{Handoffs, Parking, Scheduler, SchedulerLimits};
use crate::serving::start::{AbortOnPanic, Wake};

/// Reports the outcome of the start: the KV's identity, if it can be handed over.
type Outcome = std_mpsc::SyncSender<Result<Option<KvIdentity>, LoadError>>;

/// Everything that the scheduler's thread owns.
pub(super) struct Start {
    pub(super) model: Arc<LlamaModel>,
    pub(super) vocabulary: Arc<Vocabulary>,
    pub(super) config: LlamaConfig,
    pub(super) adapter: Option<Arc<Adapter>>,
    pub(super) limits: SchedulerLimits,
    pub(super) shared: Arc<EngineLoad>,
    pub(super) gguf: Gguf,
    pub(super) fingerprint: Fingerprint,
    /// Encodes images.
    pub(super) projector: Option<Arc<Projector>>,
    pub(super) puller: Option<Arc<dyn KvPuller>>,
    pub(super) wake: Wake,
    /// The model generates text.
    pub(super) generates: bool,
    /// The plan for vectors, if the model gives any.
    pub(super) embedding: Option<EmbedPlan>,
    /// Bytes of KV for each token.
    pub(super) kv_bytes: u64,
    /// ggml's index of the first GPU that computes, at least a part of the layers.
    pub(super) gpu: Option<usize>,
}

pub(super) struct StartedScheduler {
    pub(super) thread: JoinHandle<()>,
    /// `None` if the model's KV cannot be handed over.
    pub(super) kv: Option<KvIdentity>,
}

impl Start {
    /// Starts the thread, and waits until its context exists and has computed the first tokens.
    pub(super) fn run(self, messages: std_mpsc::Receiver<SchedulerMessage>) -> Result<StartedScheduler, LoadError> {
        let (started, has_started) = std_mpsc::sync_channel(1);
        let run = move || {
            let shared = Arc::clone(&self.shared);
            let config = self.config.clone();
            let embedder = Embedder::new(&self.model, config, self.embedding, self.embedding_kv_bytes(), shared);
            let embedder = embedder.with_adapter(self.adapter.clone());
            if self.generates {
                self.generate(embedder, &started, &messages)
            } else {
                embed(embedder, &started, &messages)
            }
        };
        let thread = std::thread::Builder::new()
            .name("llama".into())
            .spawn(run)
            .map_err(|e| LoadError::Config(format!("the engine's thread cannot start: {e}")))?;
        match has_started.recv() {
            Ok(outcome) => outcome.map(|kv| StartedScheduler { thread, kv }),
            Err(_) => Err(LoadError::Config("the engine's thread has stopped".into())),
        }
    }

    /// Runs the thread of a model that generates text.
    fn generate<'m>(
        &'m self,
        embedder: Embedder<'m>,
        started: &Outcome,
        messages: &std_mpsc::Receiver<SchedulerMessage>,
    ) {
        let n_cells = u32::try_from(self.limits.n_cells).unwrap_or(u32::MAX);
        let n_batch = u32::try_from(self.limits.budget.max_tokens() + self.limits.n_slots).unwrap_or(u32::MAX);
        let mut context = match load::context(&self.model, &self.config, self.adapter.as_deref(), n_cells, n_batch) {
            Ok(context) => context,
            Err(error) => return drop(started.send(Err(error))),
        };
        let _panic_ends_the_process = AbortOnPanic;
        let (kv, handoffs, transfer) = match self.local_kv(&mut context) {
            Ok((local, transfer)) => {
                let kv = local.identity.clone();
                if let Some(puller) = &self.puller {
                    puller.introduce(local);
                }
                let handoffs = Handoffs {
                    layout: Arc::clone(transfer.layout()),
                    placement: blob_placement(&transfer),
                    buffers: transfer.imports().clone(),
                    puller: self.puller.clone(),
                    wake: Arc::clone(&self.wake),
                };
                (Some(kv), Some(handoffs), Some(transfer))
            }
            Err(reason) => {
                tracing::info!(%reason, "this model's KV cannot be handed over; it is served without handoffs");
                (None, None, None)
            }
        };
        if started.send(Ok(kv)).is_ok() {
            let vocabulary = Arc::clone(&self.vocabulary);
            let parking = handoffs.as_ref().and_then(|handoffs| self.parking(&handoffs.layout));
            let slots = LlamaSlots::new(context, self.limits.budget.max_tokens() + self.limits.n_slots)
                .with_whole_steps(!self.config.workers.is_empty())
                .with_transfer(transfer, self.config.n_slots)
                .with_projector(self.projector.clone());
            let scheduler = Scheduler::new(slots, embedder, vocabulary, self.limits.clone(), Arc::clone(&self.shared));
            scheduler.with_handoffs(handoffs).with_parking(parking).run(messages);
        }
    }

    /// Bytes of KV for each token of the context for vectors, which has the default types. Encoders have no KV.
    fn embedding_kv_bytes(&self) -> u64 {
        self.gguf.kv_bytes_per_token(CacheTypes::default()).filter(|_| self.generates).unwrap_or(0)
    }

    /// Idle conversations get as much of the host's memory as the cache has, but no more than a quarter of what is free.
    fn parking(&self, layout: &KvLayout) -> Option<Parking> {
        let of_cache = self.kv_bytes.saturating_mul(self.limits.n_cells as u64);
        let max_bytes = of_cache.min(available_memory() / 4);
        let is_here = self.gpu.is_none() && self.config.workers.is_empty();
        is_here.then(|| Parking::new(layout, self.config.n_slots, max_bytes))
    }

    /// Probes the KV's layout and computes the canary, which also warms up the context.
    fn local_kv(&self, context: &mut LlamaContext<'_>) -> Result<(LocalKv, KvTransfer), NoHandoff> {
        let transfer = probe::probe(context, &self.model, &self.gguf, self.config.n_slots, self.gpu)?;
        let tokens = canary::tokens(&self.model, self.limits.budget.n_ubatch.min(self.limits.n_ctx));
        let canary = canary::compute(context, &transfer, &tokens)?;
        let layout = KvLayout::clone(transfer.layout());
        let rotation = self.gguf.key_rotation(self.config.rope, &layout);
        let rotation = rotation.inspect_err(|reason| {
            tracing::info!(%reason, "K stays rotated in lossy codecs, which costs some compression");
        });
        let profile = codec_profile::beside(&self.config.model, self.fingerprint, &layout);
        let identity = KvIdentity::new(self.fingerprint, layout, tokens, rotation.ok(), profile);
        Ok((LocalKv { identity, canary }, transfer))
    }
}

/// Runs the thread of a model that only gives vectors.
fn embed(mut embedder: Embedder<'_>, started: &Outcome, messages: &std_mpsc::Receiver<SchedulerMessage>) {
    let prepared = embedder.prepare();
    let is_ready = prepared.is_ok();
    let _panic_ends_the_process = AbortOnPanic;
    if started.send(prepared.map(|()| None)).is_ok() && is_ready {
        embedder.run(messages);
    }
}

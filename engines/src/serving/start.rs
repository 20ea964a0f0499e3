//! What engines share of starting the scheduler's thread.

use std::path::Path;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, mpsc as std_mpsc};
use std::thread::JoinHandle;

use baton_link::handoff::{ChunkBuffers, KvPuller, LocalKv};
use baton_model::vocabulary::Vocabulary;
use baton_schemas::Token;
use baton_schemas::kv::{Chunk, Contiguous, Placement};
use baton_schemas::node::{KvIdentity, NodeLoad};
use tokio::sync::watch;

use super::context::{BatchToken, ExportTo, ModelContext};
use super::jobs::{EngineLoad, SchedulerMessage};
use super::scheduler::{Handoffs, Scheduler, SchedulerLimits};
use super::vectors::Vectors;

/// Wakes the scheduler.
pub(crate) type Wake = Arc<dyn Fn() + Send + Sync>;

/// Creates a [`Wake`] with a weak sender: the scheduler owns a `Wake` itself and ends when the last sender is dropped.
pub(crate) fn wake(messages: &Arc<std_mpsc::Sender<SchedulerMessage>>) -> Wake {
    let messages = Arc::downgrade(messages);
    Arc::new(move || {
        if let Some(messages) = messages.upgrade() {
            // It fails if the scheduler has ended, which needs no waking.
            let _ = messages.send(SchedulerMessage::Wake);
        }
    })
}

/// Aborts the process if the scheduler panics: otherwise the engine would accept requests and never answer them.
pub(crate) struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            abort("the scheduler has panicked");
        }
    }
}

/// Ends the process at once, because its engine is of no use any more. The supervisor then starts a new process.
pub(crate) fn abort(why: &str) -> ! {
    tracing::error!("{why}; the process aborts so that its supervisor can restart it");
    std::process::abort();
}

/// The load that an engine's handles share with its scheduler, and where they read it.
pub(crate) fn engine_load() -> (Arc<EngineLoad>, watch::Receiver<NodeLoad>) {
    let (load, receiver) = watch::channel(NodeLoad::default());
    (Arc::new(EngineLoad { n_queued: AtomicUsize::new(0), load }), receiver)
}

/// The name of a model whose file names none.
pub(crate) fn file_stem(path: &Path) -> String {
    path.file_stem().map_or_else(|| "model".into(), |stem| stem.to_string_lossy().into_owned())
}

/// The text of the canary, by whose KV two engines are compared ([`baton_link::handoff::canary`]): prose with numbers and
/// punctuation, for tokens of many kinds.
pub(crate) const CANARY: &str = "In 1851 the cable between Dover and Calais carried its first message; by 1866 another one, \
    3,000 km long, joined Ireland to Newfoundland. \"What hath been done,\" a clerk wrote, \"cannot be undone: two cities, one \
    clock.\"";

/// The most tokens of the canary: every layer attends over several positions, and the cost is negligible.
const MAX_CANARY: usize = 48;

/// The canary's tokens, at most `limit`, from those of [`CANARY`]. They depend on the vocabulary alone, so that two nodes
/// agree on them.
pub(crate) fn canary_tokens(mut of_text: Vec<Token>, n_vocab: u32, limit: usize) -> Vec<Token> {
    if of_text.is_empty() {
        // A model without a tokenizer still has embeddings.
        of_text = (0..MAX_CANARY as u32).map(|i| i % n_vocab.max(1)).collect();
    }
    of_text.truncate(MAX_CANARY.min(limit));
    of_text
}

/// The thread of an engine that hands over whole rows of KV, before it is started.
pub(crate) struct EngineThread {
    pub(crate) identity: KvIdentity,
    pub(crate) puller: Option<Arc<dyn KvPuller>>,
    pub(crate) vocabulary: Arc<Vocabulary>,
    pub(crate) shared: Arc<EngineLoad>,
    pub(crate) wake: Wake,
    pub(crate) messages: std_mpsc::Receiver<SchedulerMessage>,
}

/// A model that its thread has loaded.
pub(crate) struct LoadedModel<C, V> {
    pub(crate) context: C,
    pub(crate) vectors: V,
    pub(crate) limits: SchedulerLimits,
    /// As [`NodeInfo::devices`](baton_schemas::node::NodeInfo::devices) shows it.
    pub(crate) device: String,
}

impl EngineThread {
    /// Starts the thread, and waits until it has loaded the model with `load` and computed the canary, which also shows that
    /// the model can be computed. Returns the thread and the device's name. Errors, in words: one of these failed.
    pub(crate) fn start<C: ModelContext, V: Vectors>(
        self,
        name: &str,
        load: impl FnOnce() -> Result<LoadedModel<C, V>, String> + Send + 'static,
    ) -> Result<(JoinHandle<()>, String), String> {
        let (started, has_started) = std_mpsc::sync_channel(1);
        let run = move || {
            let EngineThread { identity, puller, vocabulary, shared, wake, messages } = self;
            let _panic_ends_the_process = AbortOnPanic;
            let loaded = load().and_then(|mut loaded| {
                let canary = canary(&mut loaded.context, &identity.canary);
                let canary = canary.map_err(|error| format!("the model cannot be computed: {error}"))?;
                Ok((loaded, canary))
            });
            let (LoadedModel { context, vectors, limits, device }, canary) = match loaded {
                Ok(loaded) => loaded,
                Err(error) => return drop(started.send(Err(error))),
            };
            let layout = Arc::new(identity.layout.clone());
            if let Some(puller) = &puller {
                puller.introduce(LocalKv { identity, canary });
            }
            let handoffs = Handoffs {
                layout,
                placement: Arc::new(|span, layout| Contiguous.place(span, layout)),
                buffers: ChunkBuffers::default(),
                puller,
                wake,
            };
            if started.send(Ok(device)).is_ok() {
                let scheduler = Scheduler::new(context, vectors, vocabulary, limits, shared);
                scheduler.with_handoffs(Some(handoffs)).run(&messages);
            }
        };
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(run);
        let thread = thread.map_err(|e| format!("the engine's thread cannot start: {e}"))?;
        match has_started.recv() {
            Ok(Ok(device)) => Ok((thread, device)),
            Ok(Err(error)) => Err(error),
            Err(_) => Err("the engine's thread has stopped".into()),
        }
    }
}

/// Computes the KV of `tokens` in the empty first slot, which is empty again afterwards.
fn canary(context: &mut impl ModelContext, tokens: &[Token]) -> Result<Chunk, String> {
    let batch: Vec<BatchToken> = (0..)
        .zip(tokens)
        .map(|(position, &token)| BatchToken { token, position, slot: 0, wants_logits: false })
        .collect();
    context.compute(&batch).map_err(|e| e.to_string())?;
    let end = tokens.len() as u32;
    let chunk = context.export(0, 0..end, end, ExportTo::Host);
    context.cut(0, 0).map_err(|_| "the canary's KV cannot be removed".to_owned())?;
    chunk
}

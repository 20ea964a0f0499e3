//! Starts the thread that owns a model, and computes the first tokens before it serves.

use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, mpsc as std_mpsc};
use std::thread::JoinHandle;

use baton_link::handoff::canary::ComputedKv;
use baton_link::handoff::{KvPuller, LocalKv};
use baton_model::gguf::Gguf;
use baton_model::options::{RopeOptions, Speculation};
use baton_model::vocabulary::Vocabulary;
use baton_schemas::Token;
use baton_schemas::kv::{Fingerprint, KvLayout};
use baton_schemas::no_handoff::NoHandoffReason;
use baton_schemas::node::{KvIdentity, NodeLoad};
use tokio::sync::watch;

use super::context::{BatchToken, ComputeError, ExportTo, ModelContext};
use super::described::{Generator, IdleKv, KvForm, LoadedModel, ModelLibrary, NoKv};
use super::drafting::batch_drafter::BatchDrafter;
use super::drafting::remote::DraftNodes;
use super::jobs::{EngineLoad, SchedulerMessage};
use super::load_error::LoadError;
use super::memory::available_memory;
use super::scheduler::{Handoffs, Scheduler, SchedulerLimits, Speculating, Storing};
use super::vectors;
use super::wake::Wake;
use super::wanted_store::WantedStore;
use crate::codec_profile;
use crate::engine_options::EngineOptions;

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

/// The operator's wish for guesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WantedGuesses {
    No,
    /// Nothing is written down, and this model needs memory for guesses, which only a written wish gives.
    IfAsked,
    /// Nothing is written down.
    IfPossible,
    /// They are written down, or a draft model is.
    Asked,
}

impl WantedGuesses {
    pub(super) fn of(options: &EngineOptions, model: &Gguf) -> WantedGuesses {
        match options.speculation.or(options.draft.is_some().then_some(Speculation::Auto)) {
            Some(Speculation::Off) => WantedGuesses::No,
            Some(Speculation::Auto) => WantedGuesses::Asked,
            None if options.could_take_back(model) => WantedGuesses::IfAsked,
            None => WantedGuesses::IfPossible,
        }
    }
}

/// The thread of an engine, before it is started.
pub(super) struct EngineThread {
    pub(super) path: PathBuf,
    pub(super) store: WantedStore,
    pub(super) header: Arc<Gguf>,
    pub(super) fingerprint: Fingerprint,
    pub(super) rope: RopeOptions,
    pub(super) kv_bytes_per_token: u64,
    /// The canary's tokens.
    pub(super) canary: Vec<Token>,
    pub(super) puller: Option<Arc<dyn KvPuller>>,
    pub(super) guesses: WantedGuesses,
    pub(super) vocabulary: Arc<Vocabulary>,
    pub(super) shared: Arc<EngineLoad>,
    pub(super) wake: Wake,
    pub(super) messages: std_mpsc::Receiver<SchedulerMessage>,
}

/// A thread that has loaded its model.
pub(super) struct Started {
    pub(super) thread: JoinHandle<()>,
    pub(super) devices: Vec<String>,
    /// `None`: the model's KV is not handed over.
    pub(super) kv: Option<KvIdentity>,
    /// Why it is not, if it generates.
    pub(super) no_handoff: Option<NoHandoffReason>,
}

/// Reports the outcome of the start: the devices, and the identity of the KV.
type Outcome = std_mpsc::SyncSender<Result<(Vec<String>, Option<Result<KvIdentity, NoHandoffReason>>), LoadError>>;

impl EngineThread {
    /// Starts the thread, and waits until it has loaded the model and computed the canary, which warms the context up and
    /// shows that the model can be computed.
    pub(super) fn start<L: ModelLibrary>(self, model: L::Model) -> Result<Started, LoadError> {
        let (started, has_started) = std_mpsc::sync_channel(1);
        let thread = std::thread::Builder::new().name(L::ENGINE.to_owned());
        let thread = thread.spawn(move || {
            if let Err(error) = self.run::<L>(&model, &started) {
                drop(started.send(Err(error)));
            }
        });
        let thread = thread.map_err(|e| LoadError::Config(format!("the engine's thread cannot start: {e}")))?;
        match has_started.recv() {
            Ok(outcome) => outcome.map(|(devices, kv)| {
                let no_handoff = kv.as_ref().and_then(|kv| kv.as_ref().err().copied());
                Started { thread, devices, kv: kv.and_then(Result::ok), no_handoff }
            }),
            Err(_) => Err(LoadError::Config("the engine's thread has stopped".into())),
        }
    }

    /// Loads the model, reports that, and serves until the last handle is dropped. Errors: the model cannot be served.
    fn run<L: ModelLibrary>(self, model: &L::Model, started: &Outcome) -> Result<(), LoadError> {
        let LoadedModel { generator, vectors, devices } = L::load(model, &self.shared)?;
        let _panic_ends_the_process = AbortOnPanic;
        let Some(Generator { mut context, limits, kv, idle, guesser }) = generator else {
            if started.send(Ok((devices, None))).is_ok() {
                vectors::run(vectors, &self.messages);
            }
            return Ok(());
        };
        let kv = match kv {
            Ok(form) => {
                // They can be many megabytes, and only a node of other weights is compared with them.
                let takes_others = self.puller.as_ref().is_some_and(|puller| puller.takes_other_weights());
                let with_states = takes_others && !form.layout.states.is_empty();
                let canary = canary(&mut context, &self.canary, with_states);
                let canary = canary.map_err(|error| LoadError::Refused { library: L::NAME, why: error.to_string() })?;
                let canary = canary.map_err(|detail| NoKv { reason: NoHandoffReason::KvNotCopied, detail });
                canary.map(|canary| (self.local_kv(canary, &form), form))
            }
            Err(reason) => Err(reason),
        };
        let (local, form, identity) = match kv {
            Ok((local, form)) => {
                let identity = Ok(local.identity.clone());
                (Some(local), Some(form), identity)
            }
            Err(NoKv { reason, detail }) => {
                tracing::info!(reason = detail, "this model's KV cannot be handed over; it is served without handoffs");
                (None, None, Err(reason))
            }
        };
        if let (Some(puller), Some(local)) = (&self.puller, local) {
            puller.introduce(local);
        }
        if started.send(Ok((devices, Some(identity)))).is_ok() {
            let host_bytes = available_memory() / 4;
            let form_to_store = form.as_ref().filter(|_| idle != IdleKv::Stays);
            let storing = form_to_store.and_then(|form| self.storing(&form.layout, idle, &limits, host_bytes));
            let draft_nodes = self.puller.as_ref().map(|caller| DraftNodes {
                caller: Arc::clone(caller),
                vocabulary: self.fingerprint.vocabulary,
                n_vocab: self.vocabulary.n_tokens() as u32,
            });
            let speculating = speculating(self.guesses, &context, guesser);
            let speculating = speculating.map(|speculating| speculating.with_draft_nodes(draft_nodes));
            let EngineThread { vocabulary, shared, puller, wake, messages, .. } = self;
            let handoffs =
                form.map(|KvForm { layout, placement, buffers }| Handoffs { layout, placement, buffers, puller, wake });
            let scheduler = Scheduler::new(context, vectors, vocabulary, limits, shared);
            let scheduler = scheduler.with_handoffs(handoffs).with_store(storing).with_checkpoints(host_bytes);
            scheduler.with_speculation(speculating).run(&messages);
        }
        Ok(())
    }

    fn local_kv(&self, canary: ComputedKv, form: &KvForm) -> LocalKv {
        let layout = KvLayout::clone(&form.layout);
        let rotation = self.header.key_rotation(self.rope, &layout).inspect_err(|reason| {
            tracing::info!(%reason, "K stays rotated in lossy codecs, which costs some compression");
        });
        let profile = codec_profile::beside(&self.path, self.fingerprint, &layout);
        let identity = KvIdentity::new(self.fingerprint, layout, self.canary.clone(), rotation.ok(), profile);
        let layers = self.header.layer_numbers(&identity.layout);
        LocalKv { identity, canary, layers }
    }

    /// Idle conversations get as much of the host's memory as the cache has, but no more than `host_bytes`.
    fn storing(
        &self,
        layout: &Arc<KvLayout>,
        idle: IdleKv,
        limits: &SchedulerLimits,
        host_bytes: u64,
    ) -> Option<Storing> {
        let of_cache = self.kv_bytes_per_token.saturating_mul(limits.n_cells as u64);
        let store = self.store.open(of_cache.min(host_bytes), &self.fingerprint, layout)?;
        Some(Storing::new(store, Arc::clone(layout), idle, Arc::clone(&self.wake)))
    }
}

/// Why guesses of some models cannot be verified.
const NOT_TAKEN_BACK: &str =
    "what this model keeps is not taken back by a token (docs/engine.md, speculation), so nothing is guessed";

/// What verifies drafts, if that is wanted and possible.
fn speculating<C: ModelContext>(
    wanted: WantedGuesses,
    context: &C,
    guesser: Option<BatchDrafter<C>>,
) -> Option<Speculating<C>> {
    match (wanted, context.max_rollback()) {
        (WantedGuesses::No, _) => return None,
        (_, 1..) => return Some(Speculating::new(guesser)),
        (WantedGuesses::IfAsked, 0) => tracing::info!(
            "nothing is guessed, since this model's states need memory to be taken back by a token: speculation = \"auto\" gives it"
        ),
        (WantedGuesses::IfPossible, 0) => tracing::info!("{NOT_TAKEN_BACK}"),
        (WantedGuesses::Asked, 0) => tracing::warn!("{NOT_TAKEN_BACK}, although speculation is asked for"),
    }
    None
}

/// Computes the KV of `tokens` in the empty first slot, which is empty again afterwards. Errors: the model cannot be computed.
/// The inner error: its KV cannot be exported.
fn canary(
    context: &mut impl ModelContext,
    tokens: &[Token],
    with_states: bool,
) -> Result<Result<ComputedKv, String>, ComputeError> {
    let batch: Vec<BatchToken> = (0..)
        .zip(tokens)
        .map(|(position, &token)| BatchToken { token, position, slot: 0, wants_logits: false })
        .collect();
    context.compute(&batch)?;
    let end = tokens.len() as u32;
    let states = with_states.then(|| context.export_state(0, end)).transpose();
    let exported = states.and_then(|states| {
        let chunks = vec![context.export(0, 0..end, end, ExportTo::Node)?];
        Ok(ComputedKv { chunks, states })
    });
    // It never fails for a whole slot.
    let _ = context.cut(0, 0);
    Ok(exported)
}

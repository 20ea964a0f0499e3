//! The messages from the engine's handles to the thread that owns the model, and the state they share.

use std::collections::VecDeque;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use baton_schemas::embed::{EmbedEvent, EmbedTimings};
use baton_schemas::held::HeldPieces;
use baton_schemas::node::NodeLoad;
use baton_schemas::sequence::SequenceEvent;
use baton_schemas::{CacheScope, EngineError, SequenceRequest, Token};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot, watch};

use super::constrain::Masks;
use super::images::ImageRun;
use super::kv_flow::Export;

/// A sequence on its way to a slot.
pub(crate) struct Job {
    pub(crate) request: SequenceRequest,
    pub(crate) events: mpsc::Sender<Result<SequenceEvent, EngineError>>,
    pub(crate) accepted: Instant,
    /// The stream of KV for another node, if this is a prefill.
    pub(crate) export: Option<Export>,
    /// The request's constraint, after the tokens that were generated before.
    pub(crate) constrained: Option<Masks>,
    /// The images in the prompt, in their order.
    pub(crate) images: Vec<ImageRun>,
    /// Memory reserved for the images' files until the sequence ends.
    pub(crate) room: Option<OwnedSemaphorePermit>,
}

/// A message from the engine's handles to its scheduler.
pub(crate) enum SchedulerMessage {
    /// A new sequence.
    Job(Box<Job>),
    /// Texts to turn into vectors.
    Embed(Box<EmbedJob>),
    /// A question for what the engine holds.
    Held(oneshot::Sender<HeldPieces>),
    /// A transfer of KV can continue.
    Wake,
    /// The KV of these scopes is not needed any more.
    Forget(Vec<CacheScope>),
    /// The process is about to end: write to disk the KV that it lacks.
    Store(oneshot::Sender<()>),
}

/// A request for vectors.
pub(crate) struct EmbedJob {
    /// The texts that have no vector yet.
    pub(crate) inputs: VecDeque<Vec<Token>>,
    /// Has room for every event, so that sending never waits.
    pub(crate) events: mpsc::Sender<Result<EmbedEvent, EngineError>>,
    pub(crate) accepted: Instant,
    /// When the first text was started.
    pub(crate) started: Option<Instant>,
    /// Its reader waits for [`EmbedEvent::Begun`].
    pub(crate) owes_begin: bool,
}

impl EmbedJob {
    /// The first text. Its job starts now, unless it has started already.
    pub(crate) fn begin(&mut self) -> Option<&Vec<Token>> {
        self.started.get_or_insert_with(Instant::now);
        if std::mem::take(&mut self.owes_begin) {
            self.send(Ok(EmbedEvent::Begun));
        }
        self.inputs.front()
    }

    /// Sends an event. A reader that has left is noticed before the next step.
    pub(crate) fn send(&self, event: Result<EmbedEvent, EngineError>) {
        if self.events.try_send(event).is_err() {
            tracing::debug!("the reader of vectors has left");
        }
    }

    pub(crate) fn finish(&self) {
        let started = self.started.unwrap_or(self.accepted);
        let timings = EmbedTimings {
            queue_ms: started.saturating_duration_since(self.accepted).as_secs_f64() * 1e3,
            compute_ms: started.elapsed().as_secs_f64() * 1e3,
        };
        self.send(Ok(EmbedEvent::Finished { timings }));
    }
}

/// The load that the scheduler shares with the engine's handles.
pub(crate) struct EngineLoad {
    /// Jobs that were accepted and are not yet in a slot. The handles increment it up to their limit.
    pub(crate) n_queued: AtomicUsize,
    pub(crate) load: watch::Sender<NodeLoad>,
}

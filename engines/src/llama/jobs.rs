//! The messages from the engine's handles to the thread that owns the model, and the state they share.

use std::collections::VecDeque;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use baton_schemas::embed::{EmbedEvent, EmbedTimings};
use baton_schemas::node::NodeLoad;
use baton_schemas::sequence::SequenceEvent;
use baton_schemas::{EngineError, SequenceRequest, Token};
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};

use super::constrain::Constrained;
use super::kv_flow::Export;
use super::projector::ImageRun;

/// A sequence on its way to a slot.
pub(super) struct Job {
    pub(super) request: SequenceRequest,
    pub(super) events: mpsc::Sender<Result<SequenceEvent, EngineError>>,
    pub(super) accepted: Instant,
    /// The stream of KV for another node, if this is a prefill.
    pub(super) export: Option<Export>,
    /// The request's constraint, after the tokens that were generated before.
    pub(super) constrained: Option<Constrained>,
    /// The images in the prompt, in their order.
    pub(super) images: Vec<ImageRun>,
    /// Memory reserved for the images' files until the sequence ends.
    pub(super) room: Option<OwnedSemaphorePermit>,
}

/// A message from the engine's handles to its scheduler.
pub(super) enum SchedulerMessage {
    /// A new sequence.
    Job(Box<Job>),
    /// Texts to turn into vectors.
    Embed(Box<EmbedJob>),
    /// A transfer of KV can continue.
    Wake,
}

/// A request for vectors.
pub(super) struct EmbedJob {
    /// The texts that have no vector yet.
    pub(super) inputs: VecDeque<Vec<Token>>,
    /// Has room for every vector and the last event, so that sending never waits.
    pub(super) events: mpsc::Sender<Result<EmbedEvent, EngineError>>,
    pub(super) accepted: Instant,
    /// When the first text was started.
    pub(super) started: Option<Instant>,
}

impl EmbedJob {
    /// Sends an event. A reader that has left is noticed before the next step.
    pub(super) fn send(&self, event: Result<EmbedEvent, EngineError>) {
        if self.events.try_send(event).is_err() {
            tracing::debug!("the reader of vectors has left");
        }
    }

    pub(super) fn finish(&self) {
        let started = self.started.unwrap_or(self.accepted);
        let timings = EmbedTimings {
            queue_ms: started.saturating_duration_since(self.accepted).as_secs_f64() * 1e3,
            compute_ms: started.elapsed().as_secs_f64() * 1e3,
        };
        self.send(Ok(EmbedEvent::Finished { timings }));
    }
}

/// The load that the scheduler shares with the engine's handles.
pub(super) struct EngineLoad {
    /// Jobs that were accepted and are not yet in a slot. The handles increment it up to their limit.
    pub(super) n_queued: AtomicUsize,
    pub(super) load: watch::Sender<NodeLoad>,
}

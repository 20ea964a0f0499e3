//! What the engine's handles give to the thread that owns the model, and what they share with it.

use std::collections::VecDeque;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use baton_schemas::embed::{EmbedEvent, EmbedTimings};
use baton_schemas::node::NodeLoad;
use baton_schemas::sequence::SequenceEvent;
use baton_schemas::{EngineError, SequenceRequest, Token};
use llguidance::Matcher;
use tokio::sync::{OwnedSemaphorePermit, mpsc, watch};

use super::kv_flow::Export;
use super::projector::ImageRun;

/// A sequence on its way to a slot.
pub(super) struct Job {
    pub(super) request: SequenceRequest,
    pub(super) deltas: mpsc::Sender<Result<SequenceEvent, EngineError>>,
    pub(super) accepted: Instant,
    /// Where the KV goes, if another node asked for it.
    pub(super) export: Option<Export>,
    /// The request's constraint, compiled.
    pub(super) matcher: Option<Matcher>,
    /// The images in the prompt, in their order.
    pub(super) images: Vec<ImageRun>,
    /// Room for their files, which it has until its end.
    pub(super) room: Option<OwnedSemaphorePermit>,
}

/// What the engine's handles tell its scheduler.
pub(super) enum SchedulerMessage {
    /// A new sequence.
    Job(Box<Job>),
    /// Texts to turn into vectors.
    Embed(Box<EmbedJob>),
    /// A transfer can go on.
    Wake,
}

/// Texts on their way to becoming vectors.
pub(super) struct EmbedJob {
    /// Those without a vector yet.
    pub(super) inputs: VecDeque<Vec<Token>>,
    /// Has room for every vector and the last delta, so that sending never waits.
    pub(super) deltas: mpsc::Sender<Result<EmbedEvent, EngineError>>,
    pub(super) accepted: Instant,
    /// When the first of them was begun with.
    pub(super) started: Option<Instant>,
}

impl EmbedJob {
    /// A reader that left is noticed before the next step.
    pub(super) fn send(&self, delta: Result<EmbedEvent, EngineError>) {
        if self.deltas.try_send(delta).is_err() {
            tracing::debug!("the reader of some vectors has gone");
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

/// What the scheduler shares with the engine's handles.
pub(super) struct EngineLoad {
    /// Jobs accepted and not yet in a slot. The submitting side counts up, against its bound.
    pub(super) n_queued: AtomicUsize,
    pub(super) load: watch::Sender<NodeLoad>,
}

//! A sequence and its progress, from the queue to its last delta.

use std::time::{Duration, Instant};

use baton_schemas::image::is_placeholder;
use baton_schemas::sequence::{SequenceEvent, Timings};
use baton_schemas::{EngineError, SequenceRequest, Token};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::constrain::Constrained;
use super::jobs::Job;
use super::kv_flow::{Export, Import};
use super::projector::ImageRun;
use super::sampler::Sampler;
use super::vocabulary::Vocabulary;

/// A sequence with its progress. Survives preemption: it goes back to the queue with the tokens it has.
pub(super) struct Sequence {
    pub(super) request: SequenceRequest,
    pub(super) deltas: mpsc::Sender<Result<SequenceEvent, EngineError>>,
    /// Prompt and everything generated so far.
    pub(super) tokens: Vec<Token>,
    /// The images among them, in their order.
    pub(super) images: Vec<ImageRun>,
    /// Room for their files.
    _room: Option<OwnedSemaphorePermit>,
    /// Its next image was not seen when it should have been.
    pub(super) was_unseen: bool,
    pub(super) sampler: Sampler,
    pub(super) accepted: Instant,
    /// Its request's place in the order of arrival, the same for all choices.
    pub(super) number: u64,
    /// When it first got a slot.
    pub(super) started: Option<Instant>,
    /// When the KV of everything but the last token was there.
    pub(super) prefilled: Option<Instant>,
    pub(super) first_token: Option<Instant>,
    pub(super) last_token: Option<Instant>,
    pub(super) n_computed: u32,
    /// Its share of the steps that computed those.
    pub(super) compute: Duration,
    /// Sequences that decoded in each of its steps, added up.
    pub(super) n_shared_steps: u64,
    pub(super) n_generated: u32,
    /// KV that goes to another node as it is computed.
    pub(super) export: Option<Export>,
    /// KV that comes from another node. While it does, nothing is computed here.
    pub(super) import: Option<Import>,
}

impl Sequence {
    pub(super) fn new(job: Job, vocabulary: &Vocabulary) -> Self {
        let banned: &[Token] = if job.request.ignore_eos { vocabulary.end_of_generation() } else { &[] };
        let request = job.request;
        // An image is nothing that could be said again.
        let said: Vec<Token> = request.prompt.iter().copied().filter(|t| !is_placeholder(*t)).collect();
        let sampler = Sampler::new(&request.sampling, vocabulary.n_tokens_i32(), banned, &said, &request.generated);
        let constraint = job.matcher.map(|matcher| Constrained::after(matcher, &request.generated));
        let sampler = sampler.constrained(constraint);
        let tokens = [&request.prompt[..], &request.generated[..]].concat();
        Sequence {
            request,
            deltas: job.deltas,
            tokens,
            images: job.images,
            _room: job.room,
            was_unseen: false,
            sampler,
            accepted: job.accepted,
            number: 0,
            started: None,
            prefilled: None,
            first_token: None,
            last_token: None,
            n_computed: 0,
            compute: Duration::ZERO,
            n_shared_steps: 0,
            n_generated: 0,
            export: job.export,
            import: None,
        }
    }

    /// Tokens that are computed as a prompt is. Everything after them is decoded, one token a step.
    pub(super) fn n_prefill(&self) -> usize {
        // A resume point that is replayed stays replayed, also if the sequence was set back with more tokens since.
        let replays = !self.request.generated.is_empty() && self.request.n_prefill() < self.request.prompt.len();
        if replays { self.request.n_prefill() } else { self.tokens.len() - 1 }
    }

    pub(super) fn n_after_prompt(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// Whether no further token may be generated.
    pub(super) fn at_limit(&self, n_ctx: usize) -> bool {
        let limit = self.request.max_tokens.map_or(usize::MAX, |n| n as usize);
        self.n_after_prompt() >= limit || self.tokens.len() >= n_ctx
    }

    /// Whether the sequence waits for another node: for KV to come, or for its own to be taken.
    pub(super) fn in_transfer(&self, n_kv: usize) -> bool {
        self.import.is_some() || self.export.as_ref().is_some_and(|export| export.is_behind(n_kv))
    }

    pub(super) fn timings(&self) -> Timings {
        let started = self.started.unwrap_or(self.accepted);
        let between = |from: Instant, to: Option<Instant>| {
            to.map_or(0.0, |to| to.saturating_duration_since(from).as_secs_f64() * 1e3)
        };
        let prompt_done = if self.export.is_some() { self.prefilled } else { self.first_token };
        Timings {
            queue_ms: between(self.accepted, self.started),
            prompt_n: self.n_computed,
            prompt_ms: between(started, prompt_done.or_else(|| Some(Instant::now()))),
            compute_ms: self.compute.as_secs_f64() * 1e3,
            predicted_n: self.n_generated,
            n_sharing: self.n_shared_steps as f64 / f64::from(self.n_generated.max(1)),
            predicted_ms: self.first_token.map_or(0.0, |first| between(first, self.last_token)),
        }
    }

    /// Sends what is known to fit: the scheduler's `can_step` saw the room. A reader that left is noticed next turn.
    pub(super) fn send(&self, delta: Result<SequenceEvent, EngineError>) {
        if self.deltas.try_send(delta).is_err() {
            tracing::debug!("the reader of a sequence has gone");
        }
    }
}

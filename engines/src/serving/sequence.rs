//! A sequence and its progress, from the queue to its last event.

use std::ops::Range;
use std::time::{Duration, Instant};

use baton_model::vocabulary::Vocabulary;
use baton_schemas::image::is_placeholder;
use baton_schemas::sequence::{GeneratedToken, SequenceEvent, Timings};
use baton_schemas::{EngineError, SequenceRequest, Token};
use tokio::sync::{OwnedSemaphorePermit, mpsc};

use super::checkpoints::{before_reply, first_message};
use super::drafting::Drafting;
use super::images::ImageRun;
use super::jobs::Job;
use super::kv_flow::{Export, Import, Restoring};
use super::prompt_scores::PromptScores;
use super::sampler::{Peak, Sampler};

/// A sequence and its progress. When it is preempted, it goes back to the queue with its tokens.
pub(crate) struct Sequence {
    pub(crate) request: SequenceRequest,
    pub(crate) events: mpsc::Sender<Result<SequenceEvent, EngineError>>,
    /// The logits of its next token, kept until the mask is known. Meanwhile it takes part in no step.
    pub(crate) held: Option<HeldLogits>,
    /// The tokens of the current step, until those of the step's other sequences are drawn.
    drawn: Vec<GeneratedToken>,
    /// What guesses its next tokens, if the engine verifies guesses.
    pub(crate) drafting: Option<Drafting>,
    /// Prompt and everything generated so far.
    pub(crate) tokens: Vec<Token>,
    /// The images among the tokens, in their order.
    pub(crate) images: Vec<ImageRun>,
    /// Memory reserved for the images' files.
    _room: Option<OwnedSemaphorePermit>,
    /// The first attempt to decode its next image found no cells.
    pub(crate) lacked_cells: bool,
    /// The positions that it computes without other sequences: the last batch with them was refused, and its state is
    /// lost.
    pub(crate) refused: Option<Range<usize>>,
    /// The prompt's tokens before the head of the reply.
    pub(crate) n_before_reply: usize,
    /// The tokens of the prompt's first message.
    pub(crate) n_first_message: usize,
    /// The positions of checkpoints while it is prefilled, ascending. Steps end there.
    pub(crate) marks: Vec<usize>,
    pub(crate) sampler: Sampler,
    pub(crate) accepted: Instant,
    /// Its request's place in the order of arrival, the same for all of the request's choices.
    pub(crate) number: u64,
    /// When the sequence first got a slot.
    pub(crate) started: Option<Instant>,
    /// When the KV of all prompt tokens but the last was complete.
    pub(crate) prefilled: Option<Instant>,
    pub(crate) first_token: Option<Instant>,
    pub(crate) last_token: Option<Instant>,
    /// Prompt tokens computed here.
    pub(crate) n_computed: u32,
    /// Its share of the time of the steps that computed its prompt.
    pub(crate) compute: Duration,
    /// The sum, over its decode steps, of the sequences that decoded together.
    pub(crate) n_shared_steps: u64,
    pub(crate) n_generated: u32,
    /// The export of its KV to another node.
    pub(crate) export: Option<Export>,
    /// The import of its KV from another node. Until it ends, nothing is computed.
    pub(crate) import: Option<Import>,
    /// Its KV on its way from the store. Until it is here, nothing is computed.
    pub(crate) restoring: Option<Restoring>,
    /// How long that took.
    pub(crate) restored: Duration,
    /// Its reader knows how many tokens were cached.
    pub(crate) announced: bool,
    /// Its reader waits for [`SequenceEvent::PrefillBegun`].
    owes_begin: bool,
    /// The log-probabilities of the prompt's tokens, if it reports these.
    pub(crate) scores: Option<PromptScores>,
}

/// A copy of a step's logits.
pub(crate) struct HeldLogits {
    pub(crate) logits: Vec<f32>,
    pub(crate) peak: Peak,
}

impl Sequence {
    /// KV that went through a lossy codec must not be used for it: its client wants that, or another node takes it for exact.
    pub(crate) fn needs_lossless_kv(&self) -> bool {
        self.export.is_some() || self.request.lossless_kv
    }

    pub(crate) fn new(job: Job, vocabulary: &Vocabulary) -> Self {
        let request = job.request;
        let sampler = sampler_after(&request, &request.generated, vocabulary).constrained(job.constrained);
        let tokens = [&request.prompt[..], &request.generated[..]].concat();
        let n_before_reply = before_reply(&request.prompt, vocabulary);
        let n_first_message = first_message(&request.prompt, vocabulary);
        let scores = request.prompt_logprobs.map(|n_top| PromptScores::new(n_top, request.prompt[0], vocabulary));
        let owes_begin = request.reports_begin();
        Sequence {
            request,
            events: job.events,
            held: None,
            drawn: Vec::new(),
            drafting: None,
            tokens,
            images: job.images,
            _room: job.room,
            lacked_cells: false,
            refused: None,
            n_before_reply,
            n_first_message,
            marks: Vec::new(),
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
            restoring: None,
            restored: Duration::ZERO,
            announced: false,
            owes_begin,
            scores,
        }
    }

    /// The number of tokens that are prefilled. The tokens after them are decoded, one in each step.
    pub(crate) fn n_prefill(&self) -> usize {
        // A resumed sequence replays its tokens again after a preemption, even if it has more tokens by then.
        let replays = !self.request.generated.is_empty() && self.request.n_prefill() < self.request.prompt.len();
        if replays { self.request.n_prefill() } else { self.tokens.len() - 1 }
    }

    /// Its prompt waits in no queue any more.
    pub(crate) fn prefill_begins(&mut self) {
        if std::mem::take(&mut self.owes_begin) {
            self.send(Ok(SequenceEvent::PrefillBegun));
        }
    }

    /// A sampler that knows only the tokens, without a constraint.
    #[cfg(test)]
    pub(crate) fn sampler_anew(&self, vocabulary: &Vocabulary) -> Sampler {
        sampler_after(&self.request, &self.tokens[self.request.prompt.len()..], vocabulary)
    }

    pub(crate) fn n_after_prompt(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// Takes note that a batch with these positions was refused. What was refused before and not computed since counts on:
    /// two faulty sequences would otherwise refuse each other's batches for ever.
    pub(crate) fn refuse(&mut self, positions: Range<usize>) {
        let before = self.refused.take().unwrap_or(positions.clone());
        self.refused = Some(before.start.min(positions.start)..before.end.max(positions.end));
    }

    /// Returns true if no further token may be generated.
    pub(crate) fn at_limit(&self, n_ctx: usize) -> bool {
        let limit = self.request.max_tokens.map_or(usize::MAX, |n| n as usize);
        self.n_after_prompt() >= limit || self.tokens.len() >= n_ctx
    }

    /// Returns true if the sequence waits for its constraint: for a mask, or for whether its last permitted token has
    /// completed the text.
    pub(crate) fn awaits_mask(&self, n_ctx: usize) -> bool {
        self.held.is_some() || (self.sampler.may_be_complete() && self.at_limit(n_ctx))
    }

    /// Returns true if the sequence waits for KV from the store or from another node, or until that has read KV.
    pub(crate) fn in_transfer(&self, n_kv: usize) -> bool {
        self.restoring.is_some()
            || self.import.is_some()
            || self.export.as_ref().is_some_and(|export| export.is_behind(n_kv))
    }

    pub(crate) fn timings(&self) -> Timings {
        let started = self.started.unwrap_or(self.accepted);
        let between = |from: Instant, to: Option<Instant>| {
            to.map_or(0.0, |to| to.saturating_duration_since(from).as_secs_f64() * 1e3)
        };
        let prompt_done = if self.export.is_some() { self.prefilled } else { self.first_token };
        Timings {
            queue_ms: between(self.accepted, self.started),
            prompt_n: self.n_computed,
            restore_ms: self.restored.as_secs_f64() * 1e3,
            prompt_ms: between(started, prompt_done.or_else(|| Some(Instant::now()))),
            compute_ms: self.compute.as_secs_f64() * 1e3,
            predicted_n: self.n_generated,
            n_sharing: self.n_shared_steps as f64 / f64::from(self.n_generated.max(1)),
            predicted_ms: self.first_token.map_or(0.0, |first| between(first, self.last_token)),
            drafts: self.drafting.as_ref().map(Drafting::totals).unwrap_or_default(),
            drafter_lost: self.drafting.as_ref().and_then(Drafting::loss),
        }
    }

    /// Keeps a token of this step for `send_drawn`.
    pub(crate) fn keep_drawn(&mut self, token: GeneratedToken) {
        self.drawn.push(token);
    }

    /// Sends the tokens of this step. The scheduler calls this for all sequences of the step together, so that their
    /// tokens leave the node in one frame.
    pub(crate) fn send_drawn(&mut self) {
        let drafting = self.drafting.as_mut().filter(|_| self.request.reports_drafts);
        if let (Some(first), Some(drafting)) = (self.drawn.first_mut(), drafting) {
            first.drafts = drafting.report();
        }
        for token in std::mem::take(&mut self.drawn) {
            self.send(Ok(SequenceEvent::Token(token)));
        }
    }

    /// Sends the prompt's tokens for which the reader has room, and leaves a place for the last event.
    pub(crate) fn send_scored(&mut self) {
        let Some(scores) = &mut self.scores else { return };
        let mut waiting = std::mem::take(&mut scores.waiting);
        while self.events.capacity() > 1
            && let Some(token) = waiting.pop_front()
        {
            self.send(Ok(SequenceEvent::Token(token)));
        }
        self.scores.iter_mut().for_each(|scores| scores.waiting.append(&mut waiting));
    }

    /// Sends an event after the tokens that were drawn before it. `Scheduler::can_step` has checked that there is room. A
    /// reader that has left is noticed in the next turn.
    pub(crate) fn send(&mut self, event: Result<SequenceEvent, EngineError>) {
        self.send_drawn();
        if self.events.try_send(event).is_err() {
            tracing::debug!("the reader of a sequence has left");
        }
    }
}

/// A sampler for the token after a prompt and these tokens, without a constraint.
fn sampler_after(request: &SequenceRequest, generated: &[Token], vocabulary: &Vocabulary) -> Sampler {
    let banned: &[Token] = if request.ignore_eos { vocabulary.end_of_generation() } else { &[] };
    // Penalties do not apply to images.
    let said: Vec<Token> = request.prompt.iter().copied().filter(|t| !is_placeholder(*t)).collect();
    Sampler::new(&request.sampling, banned, &said, generated)
}

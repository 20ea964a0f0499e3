//! The loop that owns a model's context: continuous batching over slots.
//!
//! One OS thread runs [`Scheduler::run`]; all others send it [`Job`](super::jobs::Job)s. Each turn takes in new jobs,
//! drops those whose reader has left, gives free slots to waiting sequences, and makes one step. A step is a batch with
//! one token of every decoding sequence and a limited share of the prompts. Prefill computes all tokens of a sequence but the
//! last, which is decoded, so that a prompt continues identically whether it was cached, handed over or computed here.

#[cfg(test)]
mod agent_trace;
mod batch;
#[cfg(test)]
mod checkpoint_tests;
mod cutting;
mod drawing;
mod guessing;
mod handoffs;
mod held;
mod images;
mod kv_rates;
mod load;
#[cfg(test)]
mod mask_tests;
mod placing;
mod rates;
mod restoring;
mod room;
mod speculating;
#[cfg(test)]
mod speculation_tests;
mod storing;
#[cfg(test)]
#[cfg(feature = "llama")]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use baton_model::vocabulary::Vocabulary;
use baton_schemas::sequence::{FinishReason, Group};
use baton_schemas::{EngineError, Token};

pub(crate) use self::{handoffs::Handoffs, speculating::Speculating, storing::Storing};
use super::checkpoints::CheckpointBudget;
use super::context::{BatchToken, ComputeError, ModelContext};
use super::jobs::{EngineLoad, SchedulerMessage};
use super::prompt_scores::MAX_STEP_TOKENS;
use super::sequence::Sequence;
use super::slots::CacheSlot;
use super::step_budget::{PrefillBudget, SharedSteps, share};
use super::vectors::Vectors;

/// Events that an engine runs ahead of its reader. A slower reader pauses its own sequence, but no other.
pub(crate) const EVENT_WINDOW: usize = 64;

/// Free places that a step needs in a reader's channel: for a token and the final event, so that sending never waits.
const MIN_ROOM: usize = 2;

/// How often paused sequences are checked when nothing else runs.
const PAUSED_POLL: Duration = Duration::from_millis(5);

/// How long the choices of a request wait for each other.
const GROUP_WAIT: Duration = Duration::from_secs(1);

/// How long a sequence waits at most for others to end before the cache is overwritten. Then they are recomputed: this
/// costs them a prefill, so NaN in every other prompt must not cause it all the time.
const NAN_WAIT: Duration = Duration::from_secs(3);

#[derive(Debug, Clone)]
pub(crate) struct SchedulerLimits {
    pub(crate) n_slots: usize,
    /// Tokens one sequence may hold.
    pub(crate) n_ctx: usize,
    /// Cells of the unified cache, shared by all slots.
    pub(crate) n_cells: usize,
    pub(crate) budget: PrefillBudget,
    /// Sliding window in tokens, if the model has one.
    pub(crate) sliding_window: Option<usize>,
    /// Some layers keep a state, which cannot be cut to a prefix (recurrent and hybrid models).
    pub(crate) has_states: bool,
}

/// Owns the context. See the module's documentation.
pub(crate) struct Scheduler<C: ModelContext, V: Vectors> {
    context: C,
    vocabulary: Arc<Vocabulary>,
    limits: SchedulerLimits,
    shared: Arc<EngineLoad>,
    slots: Vec<CacheSlot>,
    running: Vec<Option<Sequence>>,
    waiting: VecDeque<Sequence>,
    batch: Vec<BatchToken>,
    /// The next image of each slot's sequence.
    preparations: Vec<Option<Arc<C::Preparation>>>,
    clock: u64,
    /// A sequence was preempted for lack of cells, so none starts until a running one has ended. Counting cells cannot
    /// replace this flag, because an engine may need more than the count, as for a sliding window that forks share.
    short_of_cells: bool,
    /// Since when freed cells may hold NaN. None starts until the cache is overwritten, which needs that no sequence runs.
    nan_since: Option<Instant>,
    prefill_tps: f64,
    /// How long steps take that also decode.
    shared_steps: SharedSteps,
    decode_tps: f64,
    handoffs: Option<Handoffs>,
    /// `None`: idle conversations stay in the cache until others need it.
    storing: Option<Storing>,
    /// The memory of the slots' checkpoints.
    checkpoints: CheckpointBudget,
    vectors: V,
    /// `None`: no drafts are verified.
    speculating: Option<Speculating<C>>,
    #[cfg(test)]
    fails_at: Option<Token>,
}

/// A slot's part of a step.
struct BatchPart {
    slot: usize,
    n_tokens: usize,
    /// Index in the batch of its first token.
    first_at: usize,
    /// Index in the batch of the token whose logits are sampled. `None` for prefill.
    logits_at: Option<usize>,
    /// Tokens that may come after its own. The batch has them behind it, each with logits.
    draft: Vec<Token>,
}

impl<C: ModelContext, V: Vectors> Scheduler<C, V> {
    pub(crate) fn new(
        context: C,
        vectors: V,
        vocabulary: Arc<Vocabulary>,
        limits: SchedulerLimits,
        shared: Arc<EngineLoad>,
    ) -> Self {
        Scheduler {
            context,
            vectors,
            vocabulary,
            shared,
            slots: vec![CacheSlot::default(); limits.n_slots],
            running: (0..limits.n_slots).map(|_| None).collect(),
            waiting: VecDeque::new(),
            batch: Vec::with_capacity(limits.budget.max_tokens() + limits.n_slots),
            preparations: (0..limits.n_slots).map(|_| None).collect(),
            clock: 0,
            short_of_cells: false,
            nan_since: None,
            prefill_tps: 0.0,
            shared_steps: SharedSteps::new(limits.budget.n_ubatch),
            decode_tps: 0.0,
            handoffs: None,
            storing: None,
            checkpoints: CheckpointBudget::default(),
            speculating: None,
            #[cfg(test)]
            fails_at: None,
            limits,
        }
    }

    /// The same scheduler, which hands KV over.
    pub(crate) fn with_handoffs(self, handoffs: Option<Handoffs>) -> Self {
        Scheduler { handoffs, ..self }
    }

    /// The same scheduler, which moves idle conversations into a store.
    pub(crate) fn with_store(self, storing: Option<Storing>) -> Self {
        Scheduler { storing, ..self }
    }

    /// The same scheduler, whose checkpoints take at most `max_bytes`.
    pub(crate) fn with_checkpoints(self, max_bytes: u64) -> Self {
        Scheduler { checkpoints: CheckpointBudget::new(max_bytes), ..self }
    }

    /// Runs until every handle is dropped.
    pub(crate) fn run(mut self, messages: &Receiver<SchedulerMessage>) {
        while self.receive(messages) {
            self.turn();
        }
    }

    fn turn(&mut self) {
        self.drop_cancelled();
        self.give_way();
        self.fill_slots();
        self.store_idle();
        self.restore_blocks();
        self.import_chunks();
        self.draw_held();
        self.send_scored();
        self.publish_load();
        self.prepare_images();
        self.decode_next_image();
        self.step();
        self.export_chunks();
        self.embed();
    }

    /// Handles all messages that have arrived; waits for one if there is nothing to do. Returns false once every handle
    /// was dropped.
    fn receive(&mut self, messages: &Receiver<SchedulerMessage>) -> bool {
        if self.waiting.is_empty() && self.running.iter().all(Option::is_none) && self.vectors.is_idle() {
            self.publish_load();
            let message = loop {
                match messages.try_recv() {
                    Err(TryRecvError::Empty) if self.store_while_idle() => self.publish_load(),
                    Err(TryRecvError::Empty) => break messages.recv().ok(),
                    message => break message.ok(),
                }
            };
            let Some(message) = message else { return false };
            self.take(message);
        } else if self.awaits_messages() {
            match messages.recv_timeout(PAUSED_POLL) {
                Ok(message) => self.take(message),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        }
        let still_open = loop {
            match messages.try_recv() {
                Ok(message) => self.take(message),
                Err(TryRecvError::Empty) => break true,
                Err(TryRecvError::Disconnected) => break false,
            }
        };
        self.complete_groups();
        still_open
    }

    fn take(&mut self, message: SchedulerMessage) {
        match message {
            SchedulerMessage::Job(job) => {
                self.clock += 1;
                let mut sequence = Sequence::new(*job, &self.vocabulary);
                sequence.number = self.clock;
                self.begin_drafting(&mut sequence);
                self.waiting.push_back(sequence);
            }
            SchedulerMessage::Embed(job) => self.vectors.push(*job),
            SchedulerMessage::Held(reply) => drop(reply.send(self.held())),
            SchedulerMessage::Wake => self.forget_cleared(),
            SchedulerMessage::Forget(scopes) => self.forget_scopes(&scopes),
            SchedulerMessage::Store(reply) => {
                self.store_at_end();
                // Its caller may have given up.
                _ = reply.send(());
            }
        }
    }

    /// Makes a step of the vectors. While sequences run, it is as small as a step of prefill.
    fn embed(&mut self) {
        let n_running = self.running.iter().flatten().count();
        let tokens = || self.shared_steps.tokens(0, self.prefill_tps);
        let limit = (n_running > 0).then(|| self.limits.budget.tokens(n_running, tokens));
        self.vectors.step(limit);
    }

    /// Lets the choices of a request start together; after [`GROUP_WAIT`] without those that may have been refused.
    fn complete_groups(&mut self) {
        let groups: Vec<(Group, bool)> =
            self.waiting.iter().filter_map(|s| Some((s.request.group?, s.accepted.elapsed() > GROUP_WAIT))).collect();
        for sequence in &mut self.waiting {
            let Some(group) = sequence.request.group else { continue };
            let siblings = groups.iter().filter(|(g, _)| g.id == group.id);
            let (n_here, overdue) = siblings.fold((0, false), |(n, any), (_, late)| (n + 1, any || *late));
            if n_here >= group.size || overdue {
                sequence.request.group = None;
                sequence.number = self.clock;
            }
        }
    }

    /// Frees the slots and queue places of readers that have left.
    fn drop_cancelled(&mut self) {
        let n_waiting = self.waiting.len();
        self.waiting.retain(|sequence| !sequence.events.is_closed());
        self.shared.n_queued.fetch_sub(n_waiting - self.waiting.len(), Ordering::AcqRel);
        for slot in 0..self.slots.len() {
            if self.running[slot].as_ref().is_some_and(|s| s.events.is_closed()) {
                self.release(slot);
            }
        }
    }

    /// Makes a slot idle. Its KV stays for the next turn of the conversation, unless the request is ephemeral.
    fn release(&mut self, slot: usize) -> Option<Sequence> {
        self.clock += 1;
        self.short_of_cells = false;
        self.slots[slot].busy = false;
        self.slots[slot].target.clear();
        self.slots[slot].last_used = self.clock;
        self.preparations[slot] = None;
        let sequence = self.running[slot].take()?;
        self.note_mark(slot, &sequence);
        if sequence.request.ephemeral {
            self.cut(slot, 0);
        } else if sequence.import.is_some() || sequence.restoring.is_some() {
            self.leave_continuable(slot, &sequence.tokens);
        }
        Some(sequence)
    }

    /// Returns true if a slot's sequence can be part of the next step. It must run, its reader must keep up, and it must
    /// not wait for another node, for an image or for a mask.
    fn can_step(&self, slot: usize) -> bool {
        !self.awaits_image(slot)
            && !self.awaits_mask(slot)
            && self.running[slot].as_ref().is_some_and(|s| {
                let has_sent = s.scores.as_ref().is_none_or(|scores| scores.waiting.is_empty());
                let has_room = s.events.capacity() >= MIN_ROOM && has_sent;
                s.events.is_closed() || (has_room && !s.in_transfer(self.slots[slot].kv.len()))
            })
    }

    /// The number of tokens that a slot's sequence still has to compute. The last one is decoded.
    fn missing(&self, slot: usize) -> usize {
        self.running[slot].as_ref().map_or(0, |s| s.tokens.len() - self.slots[slot].kv.len())
    }

    /// The number of tokens that a slot's sequence still has to prefill. 0 once it decodes, or replays known tokens.
    fn missing_prefill(&self, slot: usize) -> usize {
        self.running[slot].as_ref().map_or(0, |s| s.n_prefill().saturating_sub(self.slots[slot].kv.len()))
    }

    /// The most prompt tokens that a slot's sequence can use in the next step, in which `n_prompts` are prefilled. They
    /// end before its next image and the tokens of a refused batch, which have steps of their own, and at checkpoints.
    fn next_prefill(&self, slot: usize, n_prompts: usize) -> usize {
        let ends = [self.to_next_image(slot), self.to_refused(slot), self.to_next_mark(slot)];
        let n_left = ends.into_iter().flatten().fold(self.missing_prefill(slot), usize::min);
        let scores = self.running[slot].as_ref().is_some_and(|s| s.scores.is_some());
        let n_left = if scores { n_left.min(MAX_STEP_TOKENS) } else { n_left };
        let exports = self.running[slot].as_ref().is_some_and(|s| s.export.is_some());
        let budget = self.limits.budget.behind(self.slots[slot].kv.len());
        // An engine that pulls KV computes its own prompts in the same chunks as a prefill node. Without states they follow from
        // the prompt alone, so its KV is identical to the bit, wherever each part of it was computed. With states, a prefill
        // whose link is measured has a last chunk of its own: see `tokens_beside_states`.
        match (exports || self.pulls(), self.limits.has_states) {
            (false, _) => n_left,
            (true, false) => budget.taper(n_left, n_prompts),
            (true, true) => budget.even(n_left, self.tokens_beside_states(slot)),
        }
    }

    /// Computes one batch for all sequences that can step.
    fn step(&mut self) {
        self.end_held_only();
        self.finish_prefill_only();
        let mut ready: Vec<usize> = (0..self.slots.len()).filter(|&slot| self.can_step(slot)).collect();
        // A sequence that may be at fault for a refused batch must not fail the others again with the same tokens.
        if let Some(&suspect) = ready.iter().find(|&&slot| self.is_suspect(slot)) {
            ready = vec![suspect];
        }
        let (decoding, prefilling): (Vec<usize>, Vec<usize>) =
            ready.into_iter().partition(|&slot| self.missing_prefill(slot) == 0);
        let budget = self.prompt_tokens(decoding.len(), &prefilling);
        let needs: Vec<usize> = prefilling.iter().map(|&slot| self.next_prefill(slot, prefilling.len())).collect();
        let shares = share(budget, &needs);

        let part = |slot, n_tokens, logits_at| BatchPart { slot, n_tokens, first_at: 0, logits_at, draft: Vec::new() };
        let mut parts: Vec<BatchPart> = decoding.iter().map(|&slot| part(slot, 1, Some(0))).collect();
        let prefill = prefilling.iter().zip(shares).filter(|&(_, n)| n > 0);
        parts.extend(prefill.map(|(&slot, n_tokens)| part(slot, n_tokens, None)));
        if parts.is_empty() {
            return;
        }
        let n_tokens: usize = parts.iter().map(|p| p.n_tokens).sum();
        if !self.make_room(n_tokens) {
            // A running sequence went back to the queue; the next turn chooses its parts again.
            return;
        }
        self.add_drafts(&mut parts);
        self.compute(parts);
    }

    /// Returns true if a slot's sequence lost its KV in a batch that was refused, and its next token was in that
    /// batch.
    fn is_suspect(&self, slot: usize) -> bool {
        let n_kv = self.slots[slot].kv.len();
        self.running[slot].as_ref().and_then(|s| s.refused.as_ref()).is_some_and(|refused| refused.contains(&n_kv))
    }

    /// The number of tokens before those that a slot's sequence computes alone, if it is not there yet.
    fn to_refused(&self, slot: usize) -> Option<usize> {
        let refused = self.running[slot].as_ref()?.refused.as_ref()?;
        refused.start.checked_sub(self.slots[slot].kv.len()).filter(|n| *n > 0)
    }

    /// Computes the next tokens of `parts` in one batch. If the batch is refused, each part is computed alone,
    /// so that only the faulty sequence fails. If states are lost with the batch, each sequence goes back to its last
    /// checkpoint, and later computes the batch's tokens alone.
    fn compute(&mut self, mut parts: Vec<BatchPart>) {
        parts.iter().for_each(|part| self.keep_marked(part.slot));
        self.fill_batch(&mut parts);
        let began = Instant::now();
        let Err(error) = self.decode(&parts) else { return self.take_computed(&parts, began) };
        if !matches!(error, ComputeError::Lost { .. }) && self.compute_without_drafts(&parts) {
            return;
        }
        match error {
            ComputeError::NoCells => self.give_up_cells(),
            ComputeError::Lost { reason, by_batch } => {
                self.recover(if by_batch { &parts } else { &[] }, reason);
            }
            error if parts.len() == 1 => self.fail(parts[0].slot, EngineError::internal(error)),
            error => {
                tracing::warn!(%error, n_parts = parts.len(), "a batch was refused; its parts are computed alone");
                for part in parts {
                    let from = self.slots[part.slot].kv.len();
                    if self.restore(part.slot) {
                        self.compute(vec![part]);
                    } else if let Some(sequence) = &mut self.running[part.slot] {
                        sequence.refuse(from..from + part.n_tokens);
                    }
                }
            }
        }
    }

    #[cfg(not(test))]
    fn decode(&mut self, parts: &[BatchPart]) -> Result<(), ComputeError> {
        self.compute_batch(parts)
    }

    /// The same, but a batch with the token `fails_at` fails after it was computed, like one that was interrupted.
    #[cfg(test)]
    fn decode(&mut self, parts: &[BatchPart]) -> Result<(), ComputeError> {
        self.compute_batch(parts)?;
        let has_token = |part: &BatchPart| {
            let from = self.slots[part.slot].kv.len();
            let tokens = self.running[part.slot].as_ref().map_or(&[][..], |s| &s.tokens[from..from + part.n_tokens]);
            self.fails_at.is_some_and(|token| tokens.contains(&token))
        };
        if parts.iter().any(has_token) { Err(ComputeError::Refused("the test's token".into())) } else { Ok(()) }
    }

    /// Finishes sequences that generate no tokens once their prefill is complete.
    fn finish_prefill_only(&mut self) {
        for slot in 0..self.slots.len() {
            let at_limit = self.running[slot].as_ref().is_some_and(|s| s.at_limit(self.limits.n_ctx));
            if at_limit && self.missing(slot) == 1 && self.can_step(slot) {
                self.finish(slot, FinishReason::Length);
            }
        }
    }
}

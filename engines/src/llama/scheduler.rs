//! The loop that owns a llama.cpp context: continuous batching over slots.
//!
//! One OS thread runs [`Scheduler::run`]; everything else sends it [`Job`]s. Each turn takes in new jobs, drops those
//! whose reader has gone, gives free slots to waiting sequences, and makes one step: a batch of one token from every
//! decoding sequence and a budgeted share of the prompts. Prefill covers a sequence's tokens but the last, and the
//! last is decoded like any other, so a prompt that was cached, handed over or computed here continues identically.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use baton_schemas::EngineError;
use baton_schemas::node::NodeLoad;
use baton_schemas::sequence::{Delta, FinishReason, Group, TokenDelta};
use llama_cpp_2::DecodeError;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::llama_batch::LlamaBatch;
use tokio::sync::watch;

use super::budget::{Budget, share};
use super::sampler::{logprobs, token};
use super::sequence::{Job, Sequence};
use super::slots::{self, Assignment, Memory, Slot};
use super::vocabulary::Vocabulary;

/// Deltas an engine runs ahead of its reader. A reader this far behind pauses its sequence, not the others.
pub(super) const DELTA_WINDOW: usize = 64;

/// A token and the final delta must both fit, so that sending never waits.
const MIN_ROOM: usize = 2;

/// How soon a sequence whose slow reader caught up is looked at again when nothing else runs.
const PAUSED_POLL: Duration = Duration::from_millis(5);

/// Cells a newcomer must find beyond its prompt while others run.
const HEADROOM: usize = 64;

/// How long a request's choices wait for each other.
const GROUP_WAIT: Duration = Duration::from_secs(1);

/// Weight of the newest measurement in a rate.
const RATE_WEIGHT: f64 = 0.2;

/// What the scheduler shares with the engine's handles.
pub(super) struct Shared {
    /// Jobs accepted and not yet in a slot. The submitting side counts up, against its bound.
    pub(super) n_queued: AtomicUsize,
    pub(super) load: watch::Sender<NodeLoad>,
}

/// Sizes and rules the scheduler works by.
pub(super) struct Limits {
    pub(super) n_slots: usize,
    /// Tokens one sequence may hold.
    pub(super) n_ctx: usize,
    /// Cells of the unified cache, shared by all slots.
    pub(super) n_cells: usize,
    pub(super) budget: Budget,
    /// Sliding window in tokens, if the model has one and its cache is cut to it.
    pub(super) sliding_window: Option<usize>,
    /// State that cannot be cut back to a prefix (recurrent and hybrid models).
    pub(super) indivisible: bool,
}

/// Owns the context. See the module's documentation.
pub(super) struct Scheduler<'m> {
    context: LlamaContext<'m>,
    vocabulary: Arc<Vocabulary>,
    limits: Limits,
    shared: Arc<Shared>,
    slots: Vec<Slot>,
    running: Vec<Option<Sequence>>,
    waiting: VecDeque<Sequence>,
    batch: LlamaBatch<'static>,
    clock: u64,
    /// A sequence was set back for lack of cells: nobody starts until a running one has ended. Counting cells cannot
    /// replace this, because llama.cpp's own need (a sliding window shared by forks, say) may be larger than ours.
    short_of_cells: bool,
    prefill_tps: f64,
    decode_tps: f64,
}

/// One slot's part of a step.
struct Part {
    slot: usize,
    n_tokens: usize,
    /// Index in the batch whose logits are sampled, if this part ends in a decode.
    logits_at: Option<i32>,
}

impl<'m> Scheduler<'m> {
    pub(super) fn new(
        context: LlamaContext<'m>,
        vocabulary: Arc<Vocabulary>,
        limits: Limits,
        shared: Arc<Shared>,
    ) -> Self {
        let capacity = limits.budget.n_ubatch + limits.n_slots;
        Scheduler {
            context,
            vocabulary,
            shared,
            slots: vec![Slot::default(); limits.n_slots],
            running: (0..limits.n_slots).map(|_| None).collect(),
            waiting: VecDeque::new(),
            batch: LlamaBatch::new(capacity, 1),
            clock: 0,
            short_of_cells: false,
            prefill_tps: 0.0,
            decode_tps: 0.0,
            limits,
        }
    }

    /// Runs until every handle is dropped.
    pub(super) fn run(mut self, jobs: &Receiver<Job>) {
        while self.take_in(jobs) {
            self.drop_cancelled();
            self.fill_slots();
            self.publish_load();
            self.step();
        }
    }

    /// Takes in what has arrived; waits while there is nothing to do. False once no handle is left.
    fn take_in(&mut self, jobs: &Receiver<Job>) -> bool {
        let job = if self.waiting.is_empty() && self.running.iter().all(Option::is_none) {
            self.publish_load();
            match jobs.recv() {
                Ok(job) => Some(job),
                Err(_) => return false,
            }
        } else if (0..self.slots.len()).any(|slot| self.can_step(slot)) {
            None
        } else {
            match jobs.recv_timeout(PAUSED_POLL) {
                Ok(job) => Some(job),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return false,
            }
        };
        self.waiting.extend(job.map(|job| Sequence::new(job, &self.vocabulary)));
        let still_open = loop {
            match jobs.try_recv() {
                Ok(job) => self.waiting.push_back(Sequence::new(job, &self.vocabulary)),
                Err(TryRecvError::Empty) => break true,
                Err(TryRecvError::Disconnected) => break false,
            }
        };
        self.complete_groups();
        still_open
    }

    /// Frees the choices of a request to start once all of them are here, or one has waited long enough: a sibling
    /// may have been refused.
    fn complete_groups(&mut self) {
        let groups: Vec<(Group, bool)> =
            self.waiting.iter().filter_map(|s| Some((s.request.group?, s.accepted.elapsed() > GROUP_WAIT))).collect();
        for sequence in &mut self.waiting {
            let Some(group) = sequence.request.group else { continue };
            let siblings = groups.iter().filter(|(g, _)| g.id == group.id);
            let (n_here, overdue) = siblings.fold((0, false), |(n, any), (_, late)| (n + 1, any || *late));
            if n_here >= group.size || overdue {
                sequence.request.group = None;
            }
        }
    }

    /// Frees the slots and queue places of readers that left.
    fn drop_cancelled(&mut self) {
        let n_waiting = self.waiting.len();
        self.waiting.retain(|sequence| !sequence.deltas.is_closed());
        self.shared.n_queued.fetch_sub(n_waiting - self.waiting.len(), Ordering::AcqRel);
        for slot in 0..self.slots.len() {
            if self.running[slot].as_ref().is_some_and(|s| s.deltas.is_closed()) {
                self.release(slot);
            }
        }
    }

    /// Gives slots to waiting sequences, oldest first. One that waits for a sibling's prefill lets others pass.
    fn fill_slots(&mut self) {
        if self.short_of_cells && self.running.iter().any(Option::is_some) {
            return;
        }
        self.short_of_cells = false;
        let mut i = 0;
        while i < self.waiting.len() {
            let sequence = &self.waiting[i];
            if sequence.request.group.is_some() {
                i += 1;
                continue;
            }
            let memory = Memory {
                usable: &|slot, n| self.usable_prefix(slot, n),
                will_have: &|slot, n| {
                    let whole = n == self.slots[slot].target.len();
                    self.can_step(slot) && (whole || !self.limits.indivisible)
                },
            };
            let assignment = slots::assign(&self.slots, &sequence.tokens, sequence.request.cache_scope, &memory);
            if !self.has_room_for(sequence, &assignment) {
                // Whoever comes later must not overtake for ever: the queue waits for room.
                return;
            }
            match assignment {
                Assignment::NoSlot => return,
                Assignment::WaitFor { .. } => i += 1,
                Assignment::Take { slot, n_keep } => {
                    self.cut(slot, n_keep);
                    self.start(i, slot);
                }
                Assignment::Fork { slot, source, n_keep } => {
                    self.cut(slot, 0);
                    self.fork(source, slot, n_keep);
                    self.start(i, slot);
                }
            }
        }
    }

    /// Whether the cells that running sequences do not need are enough for one more. The headroom keeps a sequence
    /// that was set back for lack of room from coming back only to be set back again.
    fn has_room_for(&self, sequence: &Sequence, assignment: &Assignment) -> bool {
        let busy: Vec<&Slot> = self.slots.iter().filter(|s| s.busy).collect();
        if busy.is_empty() {
            return true;
        }
        let committed: usize = busy.iter().map(|s| s.kv.len().max(s.target.len()) + 1 - s.n_shared).sum();
        let shared = match *assignment {
            Assignment::Fork { source, n_keep, .. } if self.slots[source].busy => n_keep,
            _ => 0,
        };
        committed + sequence.tokens.len() - shared + HEADROOM <= self.limits.n_cells
    }

    /// How much of a prefix of length `n` the cache of `slot` can really give.
    fn usable_prefix(&self, slot: usize, n: usize) -> usize {
        if self.limits.indivisible {
            // Only whole: the state is that of the last token.
            return if n == self.slots[slot].kv.len() { n } else { 0 };
        }
        // A sliding window forgets: the next token attends to the window before it, which must still be there. The
        // memory itself is asked, since not every file with a window says how long it is.
        let oldest = usize::try_from(self.context.kv_cache_seq_pos_min(seq_id(slot))).unwrap_or(0);
        if n < self.slots[slot].kv.len() && oldest > 0 {
            let needed_from = self.limits.sliding_window.map(|window| n.saturating_sub(window));
            return if needed_from.is_some_and(|from| oldest <= from) { n } else { 0 };
        }
        n
    }

    /// Cuts a slot's cache back to its first `n_keep` tokens.
    fn cut(&mut self, slot: usize, n_keep: usize) {
        if self.slots[slot].kv.len() <= n_keep {
            return;
        }
        let from = u32::try_from(n_keep).ok();
        let cut = self.context.kv_cache_seq_rm(seq_id(slot), from, None);
        let n_left = if cut.is_ok() { n_keep } else { 0 };
        if n_left == 0 && n_keep > 0 {
            // A memory that cannot be cut is cleared whole; removing everything never fails.
            tracing::debug!(slot, n_keep, "the cache could not be cut to a prefix and is recomputed");
            if self.context.kv_cache_seq_rm(seq_id(slot), None, None).is_err() {
                tracing::error!(slot, "llama.cpp refused to clear a sequence");
            }
        }
        self.slots[slot].kv.truncate(n_left);
        self.slots[slot].n_shared = self.slots[slot].n_shared.min(n_left);
    }

    /// Shares the first `n` cells of `source` with the empty slot `slot`.
    fn fork(&mut self, source: usize, slot: usize, n: usize) {
        let copied = self.context.kv_cache_seq_cp(seq_id(source), seq_id(slot), Some(0), u32::try_from(n).ok());
        if copied.is_ok() {
            let prefix = self.slots[source].kv[..n].to_vec();
            self.slots[slot].kv = prefix;
            self.slots[slot].n_shared = n;
        }
    }

    fn start(&mut self, waiting_idx: usize, slot: usize) {
        let Some(mut sequence) = self.waiting.remove(waiting_idx) else { return };
        self.shared.n_queued.fetch_sub(1, Ordering::AcqRel);
        self.clock += 1;
        let state = &mut self.slots[slot];
        state.busy = true;
        state.last_used = self.clock;
        state.scope = sequence.request.cache_scope;
        state.target = sequence.tokens[..sequence.tokens.len() - 1].to_vec();
        // A preempted sequence starts twice; its reader hears of it once.
        if sequence.started.is_none() {
            sequence.started = Some(Instant::now());
            sequence.send(Ok(Delta::Started { n_cached: state.kv.len() as u32 }));
        }
        self.running[slot] = Some(sequence);
    }

    /// Makes a slot idle. Its cache stays for the next turn of the same conversation.
    fn release(&mut self, slot: usize) -> Option<Sequence> {
        self.clock += 1;
        self.short_of_cells = false;
        self.slots[slot].busy = false;
        self.slots[slot].target.clear();
        self.slots[slot].last_used = self.clock;
        self.running[slot].take()
    }

    /// Whether a slot's sequence can be part of the next step: it runs, and its reader keeps up.
    fn can_step(&self, slot: usize) -> bool {
        self.running[slot].as_ref().is_some_and(|s| s.deltas.is_closed() || s.deltas.capacity() >= MIN_ROOM)
    }

    /// Tokens a slot's sequence has to compute, the last of which is decoded.
    fn missing(&self, slot: usize) -> usize {
        self.running[slot].as_ref().map_or(0, |s| s.tokens.len() - self.slots[slot].kv.len())
    }

    /// One `llama_decode` over everybody who can use it.
    fn step(&mut self) {
        self.finish_prefill_only();
        let ready: Vec<usize> = (0..self.slots.len()).filter(|&slot| self.can_step(slot)).collect();
        let (decoding, prefilling): (Vec<usize>, Vec<usize>) = ready.into_iter().partition(|&s| self.missing(s) == 1);
        let budget = self.limits.budget.tokens(decoding.len(), self.prefill_tps);
        let needs: Vec<usize> = prefilling.iter().map(|&slot| self.missing(slot) - 1).collect();
        let shares = share(budget, &needs);

        let mut parts: Vec<Part> =
            decoding.iter().map(|&slot| Part { slot, n_tokens: 1, logits_at: Some(0) }).collect();
        let prefill = prefilling.iter().zip(shares).filter(|&(_, n)| n > 0);
        parts.extend(prefill.map(|(&slot, n_tokens)| Part { slot, n_tokens, logits_at: None }));
        if parts.is_empty() {
            return;
        }
        let n_tokens: usize = parts.iter().map(|p| p.n_tokens).sum();
        if !self.make_room(n_tokens) {
            // A running sequence went back to the queue; the next turn plans anew.
            return;
        }
        self.fill_batch(&mut parts);
        let began = Instant::now();
        match self.context.decode(&mut self.batch) {
            Ok(()) => {
                self.commit(&parts);
                for part in &parts {
                    if let Some(at) = part.logits_at {
                        self.sample(part.slot, at);
                    }
                }
                self.learn_rates(&parts, began.elapsed());
            }
            Err(DecodeError::NoKvCacheSlot) => self.give_up_cells(),
            Err(error) => self.fail_step(&parts, &error.to_string()),
        }
    }

    /// A request for no tokens is complete once its prefill is.
    fn finish_prefill_only(&mut self) {
        for slot in 0..self.slots.len() {
            let at_limit = self.running[slot].as_ref().is_some_and(|s| s.at_limit(self.limits.n_ctx));
            if at_limit && self.missing(slot) == 1 && self.can_step(slot) {
                self.finish(slot, FinishReason::Length);
            }
        }
    }

    fn fill_batch(&mut self, parts: &mut [Part]) {
        self.batch.clear();
        for part in parts {
            let Some(sequence) = &self.running[part.slot] else { continue };
            let from = self.slots[part.slot].kv.len();
            for (position, &t) in sequence.tokens.iter().enumerate().skip(from).take(part.n_tokens) {
                let wants_logits = part.logits_at.is_some();
                let added = self.batch.add(token(t), position as i32, &[seq_id(part.slot)], wants_logits);
                debug_assert!(added.is_ok(), "the batch holds n_ubatch + n_slots tokens, and a step is no larger");
            }
            if part.logits_at.is_some() {
                part.logits_at = Some(self.batch.n_tokens() - 1);
            }
        }
    }

    /// Notes that the cache now holds what the step computed.
    fn commit(&mut self, parts: &[Part]) {
        for part in parts {
            let Some(sequence) = &mut self.running[part.slot] else { continue };
            let kv = &mut self.slots[part.slot].kv;
            let from = kv.len();
            kv.extend_from_slice(&sequence.tokens[from..from + part.n_tokens]);
            if sequence.first_token.is_none() {
                sequence.n_computed += part.n_tokens as u32;
            }
        }
    }

    /// Draws a slot's next token, sends it, and finishes the sequence if that was its last.
    fn sample(&mut self, slot: usize, logits_at: i32) {
        let Some(sequence) = &mut self.running[slot] else { return };
        let logits = self.context.get_logits_ith(logits_at);
        let id = sequence.sampler.sample(logits, sequence.tokens.len());
        let now = Instant::now();
        sequence.first_token.get_or_insert(now);
        sequence.last_token = Some(now);
        if self.vocabulary.is_end_of_generation(id) {
            return self.finish(slot, FinishReason::Stop);
        }
        let vocabulary = &self.vocabulary;
        let logprobs = sequence.request.top_logprobs.map(|k| logprobs(logits, id, k as usize, |t| vocabulary.piece(t)));
        let delta = TokenDelta { id, bytes: vocabulary.piece(id), special: vocabulary.is_control(id), logprobs };
        sequence.tokens.push(id);
        sequence.n_generated += 1;
        sequence.send(Ok(Delta::Token(delta)));
        if sequence.at_limit(self.limits.n_ctx) {
            self.finish(slot, FinishReason::Length);
        }
    }

    fn finish(&mut self, slot: usize, reason: FinishReason) {
        if let Some(sequence) = self.release(slot) {
            sequence.send(Ok(Delta::Finished { reason, timings: sequence.timings() }));
        }
    }

    /// Sees to it that `n` cells are free: first from idle caches, then from the youngest running sequence, which goes
    /// back to the head of the queue with its tokens and is recomputed later. False if a sequence was set back.
    fn make_room(&mut self, n: usize) -> bool {
        while slots::cells_in_use(&self.slots) + n > self.limits.n_cells {
            match slots::evictable(&self.slots) {
                Some(slot) => self.cut(slot, 0),
                None => return !self.set_back_youngest(),
            }
        }
        true
    }

    /// llama.cpp found no cell although the count said there was one (a shared prefix outlived its source).
    fn give_up_cells(&mut self) {
        match slots::evictable(&self.slots) {
            Some(slot) => self.cut(slot, 0),
            None => {
                self.set_back_youngest();
            }
        }
    }

    /// Sets the youngest running sequence back, unless it is the only one. Returns whether one was.
    fn set_back_youngest(&mut self) -> bool {
        let youngest = (0..self.slots.len())
            .filter(|&slot| self.running[slot].is_some())
            .max_by_key(|&slot| self.slots[slot].last_used);
        let n_running = self.running.iter().flatten().count();
        let Some(slot) = youngest else { return false };
        if n_running == 1 {
            // One sequence never needs more than n_ctx ≤ n_cells cells, so this is llama.cpp failing, not us.
            self.fail_step(&[Part { slot, n_tokens: 0, logits_at: None }], "no cell in the KV cache");
            return true;
        }
        tracing::info!(slot, "the KV cache is full: the youngest sequence waits for room");
        if let Some(sequence) = self.release(slot) {
            self.cut(slot, 0);
            self.shared.n_queued.fetch_add(1, Ordering::AcqRel);
            self.waiting.push_front(sequence);
            self.short_of_cells = true;
        }
        true
    }

    /// llama.cpp refused the batch. Its sequences end with an error and their caches, now unknown, are cleared.
    fn fail_step(&mut self, parts: &[Part], detail: &str) {
        tracing::error!(detail, "llama.cpp could not compute a batch");
        for part in parts {
            if let Some(sequence) = self.release(part.slot) {
                sequence.send(Err(EngineError::internal(detail)));
            }
            self.cut(part.slot, 0);
            if self.context.kv_cache_seq_rm(seq_id(part.slot), None, None).is_err() {
                tracing::error!(slot = part.slot, "llama.cpp refused to clear a sequence");
            }
            self.slots[part.slot].kv.clear();
        }
    }

    /// Rates come from steps of one kind alone: in a mixed step neither can be told.
    fn learn_rates(&mut self, parts: &[Part], took: Duration) {
        let n_decoded = parts.iter().filter(|p| p.logits_at.is_some()).count();
        let n_prefilled: usize = parts.iter().filter(|p| p.logits_at.is_none()).map(|p| p.n_tokens).sum();
        let per_second = |n: usize| n as f64 / took.as_secs_f64().max(1e-6);
        let learn = |rate: &mut f64, new: f64| {
            *rate = if *rate > 0.0 { *rate + RATE_WEIGHT * (new - *rate) } else { new };
        };
        // A handful of tokens measures the launch and not the rate.
        if n_decoded == 0 && n_prefilled >= 16 {
            learn(&mut self.prefill_tps, per_second(n_prefilled));
        } else if n_prefilled == 0 && n_decoded > 0 {
            learn(&mut self.decode_tps, per_second(1));
        }
    }

    fn publish_load(&self) {
        let active = self.running.iter().flatten().count();
        let held: usize = self.slots.iter().filter(|s| s.busy).map(|s| s.kv.len().saturating_sub(s.n_shared)).sum();
        self.shared.load.send_replace(NodeLoad {
            active_slots: active as u32,
            queued: self.waiting.len() as u32,
            free_cells: self.limits.n_cells.saturating_sub(held) as u32,
            prefill_tps: self.prefill_tps,
            decode_tps: self.decode_tps,
        });
    }
}

/// A slot's llama.cpp sequence id.
fn seq_id(slot: usize) -> i32 {
    i32::try_from(slot).unwrap_or(i32::MAX)
}

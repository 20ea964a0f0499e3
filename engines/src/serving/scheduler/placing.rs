//! Moves sequences from the queue into slots.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use baton_schemas::EngineError;
use baton_schemas::handoff::KvSource;
use baton_schemas::sequence::{CachedTokens, SequenceEvent};

use super::super::context::ModelContext;
use super::super::sequence::Sequence;
use super::super::slots::{self, Assignment, CacheSlot, SlotMemory, Stored};
use super::super::vectors::Vectors;
use super::{Scheduler, Storing};

/// Cells that must be free beyond a new sequence's prompt while others run.
const HEADROOM: usize = 64;

impl<C: ModelContext, V: Vectors> Scheduler<C, V> {
    /// Ends the measurements, and the returns of KV, if there is a request: in its steps they would change the shape of the batches,
    /// and with it the rounding of its numbers.
    pub(super) fn give_way(&mut self) {
        if self.running.iter().flatten().chain(&self.waiting).all(|sequence| sequence.request.gives_way) {
            return;
        }
        for slot in 0..self.slots.len() {
            if self.running[slot].as_ref().is_some_and(|sequence| sequence.request.gives_way)
                && let Some(mut sequence) = self.release(slot)
            {
                // Nothing of a measurement stays, whatever its request says.
                if !sequence.request.held_only {
                    self.cut(slot, 0);
                }
                sequence.send(Err(EngineError::GaveWay));
            }
        }
        let n_waiting = self.waiting.len();
        self.waiting.retain_mut(|sequence| {
            if sequence.request.gives_way {
                sequence.send(Err(EngineError::GaveWay));
            }
            !sequence.request.gives_way
        });
        self.shared.n_queued.fetch_sub(n_waiting - self.waiting.len(), Ordering::AcqRel);
    }

    /// Gives slots to waiting sequences, oldest first. A sequence that waits for another's prefill lets others pass.
    pub(super) fn fill_slots(&mut self) {
        if self.has_waited_for_nan() {
            self.preempt_all();
        }
        if self.running.iter().all(Option::is_none) {
            self.short_of_cells = false;
            self.remove_nan();
        } else if self.short_of_cells || self.nan_since.is_some() {
            return;
        }
        let mut i = 0;
        while i < self.waiting.len() && self.slots.iter().any(|slot| !slot.busy) {
            let sequence = &self.waiting[i];
            if sequence.request.group.is_some() {
                i += 1;
                continue;
            }
            if let Some(refusal) = self.refusal_of_held(sequence) {
                if let Some(mut sequence) = self.waiting.remove(i) {
                    self.shared.n_queued.fetch_sub(1, Ordering::AcqRel);
                    sequence.send(Err(EngineError::invalid(refusal)));
                }
                continue;
            }
            let scores = sequence.scores.is_some();
            let scope = sequence.request.cache_scope;
            let stored = self.found_in_store(sequence);
            let memory = SlotMemory {
                usable: &|slot, n| self.usable_prefix_for(sequence, slot, n),
                is_worth_waiting: &|slot, n, n_cached| !scores && self.is_worth_waiting(sequence, slot, n, n_cached),
                n_stored: stored.n_tokens(),
                is_worth_restoring: &|n_cached| self.is_worth_restoring(&stored, n_cached),
                adds_to_slots: self.storing.as_ref().is_some_and(Storing::adds_to_slots),
            };
            let assignment = slots::assign(&self.slots, &sequence.tokens, scope, &memory);
            if !self.has_room_for(sequence, &assignment) {
                // The whole queue waits for room, since later sequences must not overtake this one forever.
                return;
            }
            // Compared now, because the slot may be cut below.
            let n_common = match self.limits.has_states {
                true => {
                    let in_store = |storing: &Storing| storing.n_common(scope, &sequence.tokens);
                    let in_store = self.storing.as_ref().map_or(0, in_store);
                    slots::n_common(&self.slots, &sequence.tokens, scope).max(in_store)
                }
                false => 0,
            };
            let n_new = sequence.tokens.len() - assignment.n_reused(stored.n_tokens());
            if self.gather(&assignment, i) {
                continue;
            }
            match self.rather_taken(assignment, n_new) {
                Assignment::NoSlot => return,
                Assignment::WaitFor { source, n } => {
                    self.add_mark(source, n);
                    i += 1;
                }
                Assignment::Take { slot, n_keep } => {
                    self.leave(slot, n_keep, n_new);
                    self.start(i, slot);
                    self.begin_or_restore(slot, n_common);
                }
                Assignment::Fork { slot, source, n_keep } => {
                    self.leave(slot, 0, n_new);
                    self.fork(source, slot, n_keep);
                    self.start(i, slot);
                    self.begin_or_restore(slot, n_common);
                }
                Assignment::Restore { slot } => {
                    self.leave(slot, 0, n_new);
                    self.start(i, slot);
                    self.begin_or_restore(slot, n_common);
                }
            }
        }
    }

    /// Why a sequence that computes nothing comes to nothing: this engine has nothing of what another one asks for. It would take a
    /// slot from another conversation.
    fn refusal_of_held(&self, sequence: &Sequence) -> Option<&'static str> {
        let export = sequence.export.as_ref().filter(|_| sequence.request.held_only)?;
        let wanted = &sequence.tokens[..sequence.tokens.len() - 1];
        let of_scope = (0..self.slots.len()).filter(|&slot| self.slots[slot].scope == sequence.request.cache_scope);
        let common = |slot: usize| slots::common_prefix(&self.slots[slot].kv, wanted);
        let n_in_slots = of_scope.map(|slot| self.usable_prefix_for(sequence, slot, common(slot))).max().unwrap_or(0);
        let stored = self.found_in_store(sequence);
        let n_stored = if self.is_worth_restoring(&stored, n_in_slots) { stored.n_tokens() } else { 0 };
        (n_in_slots.max(n_stored) <= export.start()).then_some("none of this KV is held")
    }

    /// Returns true if `sequence`, which shares `n` tokens with the sequence in `slot` and finds `n_cached` of them
    /// cached, should wait for the others.
    fn is_worth_waiting(&self, sequence: &Sequence, slot: usize, n: usize, n_cached: usize) -> bool {
        if sequence.needs_lossless_kv() && self.slots[slot].n_lossless(n) < n {
            return false;
        }
        if let Some(restoring) = self.running[slot].as_ref().and_then(|s| s.restoring.as_ref()) {
            return !self.limits.has_states || n <= restoring.prefix.n_tokens();
        }
        let is_whole = n == self.slots[slot].target.len();
        let is_pulled = self.running[slot].as_ref().is_some_and(|s| s.import.is_some());
        // States come with the end of a pull. What is computed here can still take a checkpoint after `n` tokens.
        if self.limits.has_states && !is_whole && (is_pulled || n <= self.slots[slot].kv.len()) {
            return false;
        }
        let Some(import) = self.running[slot].as_ref().and_then(|s| s.import.as_ref()) else {
            // Its prefill goes on in the steps of this engine, or as soon as an image is prepared.
            return self.can_step(slot) || self.awaits_image(slot);
        };
        // A pull from the same node, as that of another choice of the request, would only queue behind this one there.
        let is_same = |source: &KvSource| sequence.number == self.slots[slot].request || source.url == import.url();
        let pulls_the_same = is_whole && sequence.request.kv_source.as_ref().is_some_and(is_same);
        let tps = self.next_tps();
        let n_before = (0..self.slots.len()).filter(|&slot| self.can_step(slot)).map(|slot| self.missing_prefill(slot));
        let n_computed = n_before.sum::<usize>() + n - n_cached;
        let compute = (tps > 0.0).then(|| Duration::from_secs_f64(n_computed as f64 / tps));
        pulls_the_same || import.is_worth_waiting(n.saturating_sub(self.slots[slot].kv.len()), compute)
    }

    /// Returns true if enough cells are free for one more sequence. The headroom prevents that a sequence which was
    /// preempted for lack of room starts again only to be preempted again.
    fn has_room_for(&self, sequence: &Sequence, assignment: &Assignment) -> bool {
        let busy: Vec<&CacheSlot> = self.slots.iter().filter(|s| s.busy).collect();
        if busy.is_empty() {
            return true;
        }
        let committed: usize = busy.iter().map(|s| s.kv.len().max(s.target.len()) + 1 - s.n_shared).sum();
        let shared = match *assignment {
            Assignment::Fork { source, n_keep, .. } if self.slots[source].busy && self.context.forks_share_cells() => {
                n_keep
            }
            _ => 0,
        };
        committed + sequence.tokens.len() - shared + HEADROOM <= self.limits.n_cells
    }

    /// Gives a waiting sequence a slot.
    fn start(&mut self, waiting_idx: usize, slot: usize) {
        let Some(mut sequence) = self.waiting.remove(waiting_idx) else { return };
        self.shared.n_queued.fetch_sub(1, Ordering::AcqRel);
        self.clock += 1;
        self.context.set_tokens(slot, &sequence.tokens);
        // A checkpoint of another node may have been dropped meanwhile.
        self.cut(slot, self.usable_prefix_for(&sequence, slot, self.slots[slot].kv.len()));
        let checkpoints = &self.slots[slot].checkpoints;
        sequence.export.iter_mut().for_each(|export| export.take_copies(|position| checkpoints.copy(position)));
        let state = &mut self.slots[slot];
        // A pull that ended before its rows came left the mark.
        state.unmark(state.kv.len());
        state.busy = true;
        state.stored = Stored::Partly;
        state.last_used = self.clock;
        state.started = self.clock;
        state.request = sequence.number;
        state.scope = sequence.request.cache_scope;
        state.target = sequence.tokens[..sequence.tokens.len() - 1].to_vec();
        sequence.started.get_or_insert_with(Instant::now);
        self.running[slot] = Some(sequence);
    }

    /// Begins a sequence whose slot has all that is cached of it. `n_common` is the number of tokens that it has in common with
    /// some conversation.
    pub(super) fn begin(&mut self, slot: usize, n_common: usize, cached: CachedTokens) {
        let Some(mut sequence) = self.running[slot].take() else { return };
        // A preempted sequence begins again, but its reader gets `Started` only once.
        if !std::mem::replace(&mut sequence.announced, true) {
            sequence.send(Ok(SequenceEvent::Started(cached)));
        }
        // The first mask is computed while the prompt is.
        sequence.sampler.begin();
        let n_kv = self.slots[slot].kv.len();
        sequence.marks = self.marks(&sequence, slot, n_kv, n_common);
        self.running[slot] = Some(sequence);
        self.begin_import(slot, n_kv);
        if let Some(sequence) = self.running[slot].as_mut().filter(|sequence| sequence.import.is_none()) {
            sequence.prefill_begins();
        }
    }
}

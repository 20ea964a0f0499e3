//! Frees cells when they run out, and recovers when a batch is refused.

use std::sync::atomic::Ordering;
use std::time::Instant;

use baton_schemas::EngineError;

use super::super::context::ModelContext;
use super::super::slots;
use super::super::vectors::Vectors;
use super::{BatchPart, NAN_WAIT, Scheduler};

impl<C: ModelContext, V: Vectors> Scheduler<C, V> {
    /// Frees cells until `n` are free: first those of idle slots, then those of the youngest running sequence. That
    /// one goes back to the head of the queue and is recomputed later. Returns false if a sequence was preempted.
    pub(super) fn make_room(&mut self, n: usize) -> bool {
        self.evict_idle(n) || !self.preempt_youngest()
    }

    /// Frees cells of idle slots until `n` are free. Returns false if there are not as many.
    pub(super) fn evict_idle(&mut self, n: usize) -> bool {
        while slots::cells_in_use(&self.slots) + n > self.limits.n_cells {
            match slots::evictable(&self.slots) {
                Some(slot) => self.leave(slot, 0, 0),
                None => return false,
            }
        }
        true
    }

    /// Frees cells after the context found none although the count showed a free one. That happens if a shared prefix
    /// outlives its source.
    pub(super) fn give_up_cells(&mut self) {
        match slots::evictable(&self.slots) {
            Some(slot) => self.cut(slot, 0),
            None => {
                self.preempt_youngest();
            }
        }
    }

    /// Preempts the youngest running sequence, or fails it if it is the only one. Returns false if none is running.
    fn preempt_youngest(&mut self) -> bool {
        let youngest = (0..self.slots.len())
            .filter(|&slot| self.running[slot].is_some())
            .max_by_key(|&slot| self.slots[slot].last_used);
        let n_running = self.running.iter().flatten().count();
        let Some(slot) = youngest else { return false };
        if n_running == 1 {
            // One sequence never needs more than n_ctx ≤ n_cells cells, so the context is at fault.
            self.fail(slot, EngineError::internal("no cell in the KV cache"));
            return true;
        }
        tracing::info!(slot, "the KV cache is full; the youngest sequence goes back to the queue");
        self.preempt(slot);
        self.short_of_cells = true;
        true
    }

    /// Sends all running sequences back to the queue. The one that started first is first there, too.
    pub(super) fn preempt_all(&mut self) {
        tracing::info!("all sequences go back to the queue");
        let mut slots: Vec<usize> = (0..self.slots.len()).collect();
        slots.sort_by_key(|&slot| self.slots[slot].last_used);
        for slot in slots.into_iter().rev() {
            self.preempt(slot);
        }
    }

    /// Goes on after the KV of all slots was lost, perhaps because of a batch of `parts`. All sequences start again, and
    /// those of the batch compute its tokens alone: one that loses the KV alone, too, fails.
    pub(super) fn recover(&mut self, parts: &[BatchPart], reason: String) {
        tracing::error!(reason, "the KV of all sequences was lost; they start again");
        for part in parts {
            let from = self.slots[part.slot].kv.len();
            if parts.len() == 1 && self.is_suspect(part.slot) {
                self.fail(part.slot, EngineError::internal(&reason));
            } else if let Some(sequence) = &mut self.running[part.slot] {
                sequence.refuse(from..from + part.n_tokens);
            }
        }
        self.preempt_all();
        self.empty_slots();
    }

    /// Takes note that no slot has KV.
    fn empty_slots(&mut self) {
        for slot in 0..self.slots.len() {
            slots::truncate(&mut self.slots, slot, 0);
        }
    }

    /// Sends a slot's sequence back to the head of the queue.
    fn preempt(&mut self, slot: usize) {
        // Dropping the import ends the pull. The sequence computes the lost KV later.
        self.running[slot].iter_mut().for_each(|sequence| {
            (sequence.import, sequence.restoring) = (None, None);
            sequence.held = None;
        });
        if let Some(sequence) = self.release(slot) {
            self.cut(slot, 0);
            self.shared.n_queued.fetch_add(1, Ordering::AcqRel);
            self.waiting.push_front(sequence);
        }
    }

    /// Ends a sequence that cannot be computed even alone, and clears its cache, whose content is unknown.
    pub(super) fn fail(&mut self, slot: usize, error: EngineError) {
        tracing::error!(%error, slot, "a sequence cannot be computed; it fails");
        if let Some(mut sequence) = self.release(slot) {
            sequence.send(Err(error));
        }
        self.forget(slot);
    }

    /// Ends a sequence whose logits are not numbers. Its KV may hold NaN, which some backends read even from cells that
    /// a sequence does not attend to: weight 0 times NaN is NaN.
    pub(super) fn fail_not_finite(&mut self, slot: usize) {
        self.fail(slot, EngineError::NotFinite);
        if self.context.keeps_freed_cells() {
            self.nan_since.get_or_insert_with(Instant::now);
        }
    }

    /// Returns true if a sequence could have a slot, and running ones have kept the cache from being overwritten for too
    /// long.
    pub(super) fn has_waited_for_nan(&self) -> bool {
        self.nan_since.is_some_and(|since| since.elapsed() >= NAN_WAIT)
            && self.running.iter().any(Option::is_none)
            && self.waiting.iter().any(|sequence| sequence.request.group.is_none())
    }

    /// Overwrites the cache if freed cells may hold NaN. No sequence may run.
    pub(super) fn remove_nan(&mut self) {
        if self.nan_since.take().is_none() {
            return;
        }
        tracing::warn!("the KV cache is overwritten, since a sequence has computed NaN");
        self.context.overwrite();
        self.empty_slots();
    }
}

//! Cells: who gives theirs up when they run out, and what happens when llama.cpp refuses a batch.

use std::sync::atomic::Ordering;

use baton_schemas::EngineError;

use super::super::slots;
use super::{Part, Scheduler, seq_id};

impl Scheduler<'_> {
    /// Sees to it that `n` cells are free: first from idle caches, then from the youngest running sequence, which goes
    /// back to the head of the queue with its tokens and is recomputed later. False if a sequence was set back.
    pub(super) fn make_room(&mut self, n: usize) -> bool {
        while slots::cells_in_use(&self.slots) + n > self.limits.n_cells {
            match slots::evictable(&self.slots) {
                Some(slot) => self.cut(slot, 0),
                None => return !self.set_back_youngest(),
            }
        }
        true
    }

    /// llama.cpp found no cell although the count said there was one (a shared prefix outlived its source).
    pub(super) fn give_up_cells(&mut self) {
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
        if let Some(mut sequence) = self.release(slot) {
            // What it lost it computes itself: dropping the import ends the pull.
            sequence.import = None;
            self.cut(slot, 0);
            self.shared.n_queued.fetch_add(1, Ordering::AcqRel);
            self.waiting.push_front(sequence);
            self.short_of_cells = true;
        }
        true
    }

    /// llama.cpp refused the batch. Its sequences end with an error and their caches, now unknown, are cleared.
    pub(super) fn fail_step(&mut self, parts: &[Part], detail: &str) {
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
}

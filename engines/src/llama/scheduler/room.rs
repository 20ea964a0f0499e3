//! Cells: who gives theirs up when they run out, and what happens when llama.cpp refuses a batch.

use std::sync::atomic::Ordering;

use baton_schemas::EngineError;

use super::super::slots;
use super::{Scheduler, seq_id};

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
            self.fail(slot, "no cell in the KV cache");
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

    /// Takes from llama.cpp's cache what a refused batch may have left there of a slot. False if nothing of the slot can
    /// be computed at once: its sequence was set back, or its cache could not be cut and is computed anew.
    pub(super) fn restore(&mut self, slot: usize) -> bool {
        if self.running[slot].is_none() {
            return false;
        }
        let from = u32::try_from(self.slots[slot].kv.len()).ok();
        let is_cut = self.context.kv_cache_seq_rm(seq_id(slot), from, None).is_ok();
        if !is_cut {
            self.forget(slot);
        }
        is_cut
    }

    /// llama.cpp refuses a slot's tokens by themselves. Its sequence ends with an error and its cache, now unknown, is
    /// cleared.
    pub(super) fn fail(&mut self, slot: usize, detail: &str) {
        tracing::error!(detail, slot, "llama.cpp could not compute a sequence");
        if let Some(sequence) = self.release(slot) {
            sequence.send(Err(EngineError::internal(detail)));
        }
        self.forget(slot);
    }

    fn forget(&mut self, slot: usize) {
        if self.context.kv_cache_seq_rm(seq_id(slot), None, None).is_err() {
            tracing::error!(slot, "llama.cpp refused to clear a sequence");
        }
        self.slots[slot].kv.clear();
        self.slots[slot].n_shared = 0;
    }
}

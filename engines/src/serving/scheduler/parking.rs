//! Moves idle conversations out of the cache while others run, and back when they continue.
//!
//! On a CPU, llama.cpp's attention visits every cell below the highest used one, for each head and layer, also the cells
//! of other sequences. So idle conversations would slow every step. Their KV is copied to the host's memory, in the
//! chunks of a handoff, and their cells are freed. llama-server does the same (`--cache-idle-slots`).
//!
//! Not on a GPU: a copy would cross the bus, and there such cells cost only a part of the cache's bandwidth.

use std::time::{Duration, Instant};

use baton_schemas::kv::{Chunk, KvLayout};

use super::super::context::{ExportTo, ModelContext};
use super::super::slots::{self, CacheSlot};
use super::super::vectors::Vectors;
use super::Scheduler;
use super::handoffs::cached_chunk;

/// Conversations with fewer tokens stay in the cache. llama.cpp visits cells in blocks of 256.
const MIN_TOKENS: usize = 64;

/// The time for copies before a step while others stream. A chunk that was begun within it is finished.
const SHARE_WITH_STREAMS: Duration = Duration::from_millis(2);

/// The same without streams.
const SHARE: Duration = Duration::from_millis(50);

/// The time for copies before a step that starts long prompts, as a part of the time that the prompts will take.
const SHARE_OF_PREFILL: f64 = 0.05;

/// The conversations that are not in the cache.
pub(crate) struct Parking {
    layout: KvLayout,
    /// For each slot.
    copies: Vec<KvCopy>,
    max_bytes: usize,
}

/// A copy of a slot's KV. It is incomplete while the slot still has its cells.
#[derive(Default)]
struct KvCopy {
    chunks: Vec<Chunk>,
    /// The tokens that memory is reserved for: those of the whole conversation.
    n_reserved: usize,
}

impl KvCopy {
    fn n_tokens(&self) -> usize {
        self.chunks.last().map_or(0, |chunk| chunk.p1 as usize)
    }

    /// The first position that every section has. Windowed rows that the end of a chunk does not attend to are not exported,
    /// even if the cache still has them.
    fn oldest(&self) -> usize {
        let gaps = self
            .chunks
            .iter()
            .flat_map(|chunk| chunk.sections.iter().map(|rows| rows.start).filter(|start| *start > chunk.p0));
        gaps.max().map_or(0, |start| start as usize)
    }
}

impl Parking {
    /// Keeps at most `max_bytes` of KV.
    pub(crate) fn new(layout: &KvLayout, n_slots: u32, max_bytes: u64) -> Self {
        Parking {
            layout: layout.clone(),
            copies: (0..n_slots).map(|_| KvCopy::default()).collect(),
            max_bytes: usize::try_from(max_bytes).unwrap_or(usize::MAX),
        }
    }

    /// Reserves memory for the copy of a slot with `n_tokens` tokens. Returns false if there is too little.
    fn reserve(&mut self, slot: usize, n_tokens: usize) -> bool {
        let others: usize = self.reservations().sum::<usize>() - self.copies[slot].n_reserved;
        let has_room = (others + n_tokens).saturating_mul(self.layout.bytes_per_position()) <= self.max_bytes;
        if has_room {
            self.copies[slot].n_reserved = n_tokens;
        }
        has_room
    }

    fn reservations(&self) -> impl Iterator<Item = usize> {
        self.copies.iter().map(|copy| copy.n_reserved)
    }

    /// The memory of all copies, without the checkpoints of their conversations.
    pub(super) fn n_bytes(&self) -> usize {
        self.reservations().sum::<usize>().saturating_mul(self.layout.bytes_per_position())
    }

    /// Shortens a slot's copy to its first `n` tokens, where a chunk ends.
    fn truncate(&mut self, slot: usize, n: usize) {
        let copy = &mut self.copies[slot];
        copy.chunks.retain(|chunk| chunk.p1 as usize <= n);
        copy.n_reserved = n;
    }
}

impl<C: ModelContext, V: Vectors> Scheduler<C, V> {
    /// Copies idle conversations if a sequence runs or is about to, the one that was idle for longest first, as far as
    /// the time allows. `n_new` is the number of tokens of a prompt that is about to start.
    ///
    /// Not while one sequence alone has begun: llama.cpp would give its next tokens the cells that become free below its
    /// first ones. Attention adds in the order of cells, so its numbers would be rounded in another way than those of an
    /// equal sequence elsewhere. Beside other sequences they are rounded differently anyway.
    pub(super) fn park_idle(&mut self, n_new: usize) {
        let running: Vec<usize> = (0..self.slots.len()).filter(|&slot| self.slots[slot].busy).collect();
        let n_begun = running.iter().filter(|&&slot| !self.slots[slot].kv.is_empty()).count();
        if self.parking.is_none() || n_begun == 1 || (running.is_empty() && n_new == 0) {
            return;
        }
        let began = Instant::now();
        let n_prompts = running.iter().map(|&slot| self.missing_prefill(slot)).sum::<usize>() + n_new;
        let decodes = running.iter().any(|&slot| self.missing_prefill(slot) == 0);
        let share = if decodes {
            SHARE_WITH_STREAMS
        } else {
            SHARE.max(self.prefill_time(n_prompts).mul_f64(SHARE_OF_PREFILL))
        };
        while let Some(slot) = self.next_to_park() {
            if !self.park_chunk(slot) || began.elapsed() >= share {
                return;
            }
        }
    }

    /// The predicted time of a prefill; zero if no rate is known yet.
    fn prefill_time(&self, n_tokens: usize) -> Duration {
        if self.prefill_tps > 0.0 {
            Duration::from_secs_f64(n_tokens as f64 / self.prefill_tps)
        } else {
            Duration::ZERO
        }
    }

    /// The slot that has been idle for longest, of those whose cells can be freed.
    fn next_to_park(&mut self) -> Option<usize> {
        let is_idle = |&slot: &usize| {
            let state = &self.slots[slot];
            let is_idle = !state.busy && !state.parked && state.kv.len() >= MIN_TOKENS;
            is_idle && !slots::lends_cells(&self.slots, slot) && self.is_continuable(slot)
        };
        let mut idle: Vec<usize> = (0..self.slots.len()).filter(is_idle).collect();
        idle.sort_by_key(|&slot| self.slots[slot].last_used);
        idle.into_iter().find(|&slot| self.reserve_copy(slot))
    }

    /// Reserves memory for the copy of a slot, and for the states of its end, without which the rows would be of no use. Returns
    /// false if there is too little. Then the conversation stays in the cache.
    fn reserve_copy(&mut self, slot: usize) -> bool {
        let n_kv = self.slots[slot].kv.len();
        if !self.parking.as_mut().is_some_and(|parking| parking.reserve(slot, n_kv)) {
            return false;
        }
        self.trim_checkpoints();
        let is_whole = self.keep_states(slot);
        if !is_whole {
            self.forget_copy(slot);
        }
        is_whole
    }

    /// Copies the next chunk of an idle slot, and frees its cells after the last one. Returns false if it cannot be
    /// copied; then its conversation is forgotten, since nothing better can be done with such a cache.
    fn park_chunk(&mut self, slot: usize) -> bool {
        let n_kv = self.slots[slot].kv.len();
        let Some(parking) = &mut self.parking else { return false };
        let n_copied = parking.copies[slot].n_tokens();
        let chunk_len = cached_chunk(&parking.layout).min(self.limits.budget.n_ubatch);
        // Chunks end at checkpoints, so that rows can go with the checkpoint after them.
        let next = self.slots[slot].checkpoints.after(n_copied).unwrap_or(n_kv);
        let positions = n_copied as u32..next.min(n_copied + chunk_len) as u32;
        let exported = self.context.export(slot, positions, n_kv as u32, ExportTo::Host);
        match exported {
            Ok(chunk) => parking.copies[slot].chunks.push(chunk),
            Err(error) => {
                tracing::warn!(slot, error, "an idle conversation cannot be copied out of the cache; it is forgotten");
                self.cut(slot, 0);
                return false;
            }
        }
        if parking.copies[slot].n_tokens() == n_kv {
            self.free_cells(slot);
            self.slots[slot].parked = true;
            self.slots[slot].n_shared = 0;
        }
        true
    }

    /// Drops what parked conversations have after their last checkpoint: rows without states cannot be continued.
    pub(super) fn trim_parked(&mut self) {
        for slot in 0..self.slots.len() {
            let CacheSlot { kv, checkpoints, parked, .. } = &self.slots[slot];
            let n = checkpoints.nearest(kv.len());
            if !self.limits.has_states || !parked || n == kv.len() {
                continue;
            }
            match &mut self.parking {
                Some(parking) if n > 0 => parking.truncate(slot, n),
                _ => self.forget_copy(slot),
            }
            self.slots[slot].truncate(n);
        }
    }

    /// The first position of a parked slot's copy that every cache has.
    pub(super) fn oldest_parked(&self, slot: usize) -> usize {
        self.parking.as_ref().map_or(0, |parking| parking.copies[slot].oldest())
    }

    /// Drops the copy of a slot's KV, complete or not.
    pub(super) fn forget_copy(&mut self, slot: usize) {
        self.slots[slot].parked = false;
        if let Some(parking) = &mut self.parking {
            parking.copies[slot] = KvCopy::default();
        }
    }

    /// Puts the first `n` tokens of the parked slot `source` into the cache of `slot`, which may be the same and else is
    /// empty. If that fails, `slot` is empty, and its sequence computes its prompt.
    pub(super) fn unpark(&mut self, source: usize, slot: usize, n: usize) {
        let checkpoints = self.slots[source].checkpoints.up_to(n);
        let Some(parking) = &self.parking else { return };
        let chunks: Vec<Chunk> =
            parking.copies[source].chunks.iter().take_while(|chunk| (chunk.p0 as usize) < n).cloned().collect();
        let n_cells = chunks.last().map_or(0, |chunk| chunk.p1 as usize);
        let tokens = self.slots[source].kv[..n_cells].to_vec();
        if source == slot {
            self.forget_copy(slot);
            self.slots[slot].truncate(0);
        }
        // First the others leave, so that the low cells are free for this one.
        self.park_idle(n);
        // Chunks are imported whole, so this is more than the sequence was promised. No running one makes room for that.
        if !self.evict_idle(n_cells) {
            return;
        }
        match self.import_copy(slot, &chunks) {
            Ok(()) => {
                self.fill(slot, tokens, checkpoints);
                if n < n_cells || self.limits.has_states {
                    self.end_at(slot, n);
                }
                // Some may have been dropped meanwhile.
                self.trim_checkpoints();
            }
            Err(error) => {
                tracing::warn!(slot, error, "a conversation cannot be moved back into the cache; it is computed again");
                self.free_cells(slot);
            }
        }
    }

    fn import_copy(&mut self, slot: usize, chunks: &[Chunk]) -> Result<(), String> {
        chunks.iter().try_for_each(|chunk| self.context.restore(slot, chunk))
    }
}

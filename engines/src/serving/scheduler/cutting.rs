//! Lets a slot end at an earlier position, from which it can be continued.
//!
//! Rows can be cut anywhere. The states of recurrent layers are those of one position: a slot of a model with states can end
//! where its states are, and at its checkpoints ([`super::super::checkpoints`]). A checkpoint is taken when the states of a
//! position that matters are about to be lost: before the next step, before a received chunk is added, and before an idle
//! conversation leaves the cache.

use baton_schemas::kv::KvLayout;
use baton_schemas::{CacheScope, Token};
use baton_store::ClearedKv;

use super::super::checkpoints::{Checkpoints, MIN_SHARED, REPLY_HEAD, totals};
use super::super::context::{CannotCut, ModelContext};
use super::super::kv_flow::Export;
use super::super::sequence::Sequence;
use super::super::slots::{self, CacheSlot, MIN_WAIT_TOKENS};
use super::super::vectors::Vectors;
use super::{Scheduler, Storing};

impl<C: ModelContext, V: Vectors> Scheduler<C, V> {
    /// How much of a cached prefix of length `n` the slot can really provide.
    pub(super) fn usable_prefix(&self, slot: usize, n: usize) -> usize {
        let state = &self.slots[slot];
        let n = slots::whole_images(&state.kv, n);
        if self.limits.has_states {
            let has_states = n == state.kv.len() && self.is_continuable(slot);
            return if has_states { n } else { state.checkpoints.nearest(n) };
        }
        if n > 0 && !self.is_continuable(slot) {
            return 0;
        }
        // A windowed cache drops old positions, but the next token attends to the window before it. The oldest cached
        // position comes from the context, since not every file with a window gives its length.
        let oldest = self.context.oldest(slot);
        if n < state.kv.len() && oldest > 0 {
            let needed_from = self.limits.sliding_window.map(|window| n.saturating_sub(window));
            return if needed_from.is_some_and(|from| oldest <= from) { n } else { 0 };
        }
        n
    }

    /// The same for a sequence: the cache has no log-probabilities, and of a prefix that is cached to another node's checkpoint and
    /// further, the states at that checkpoint must be there, too. Other nodes get exact KV of the own weights alone, and
    /// some requests want lossless KV.
    pub(super) fn usable_prefix_for(&self, sequence: &Sequence, slot: usize, n: usize) -> usize {
        let state = &self.slots[slot];
        let n = if sequence.export.is_some() { state.n_exact(n) } else { n };
        let n = if sequence.needs_lossless_kv() { state.n_lossless(n) } else { n };
        let n = if sequence.scores.is_some() { 0 } else { self.usable_prefix(slot, n) };
        let checkpoints = &self.slots[slot].checkpoints;
        let mut promised = sequence.export.iter().flat_map(Export::checkpoints);
        match promised.find(|position| *position < n && !checkpoints.has(*position)) {
            Some(position) => self.usable_prefix(slot, position),
            None => n,
        }
    }

    /// Returns true if a slot has all that its next token needs. An import leaves out windowed rows that are not needed at its
    /// end, and brings the states last. So during an import, or after it broke off, the context would compute on without them.
    pub(super) fn is_continuable(&self, slot: usize) -> bool {
        let can_lack = |layout: &KvLayout| {
            !layout.states.is_empty() || layout.sections.iter().any(|section| section.window.is_some())
        };
        if !self.kv_layout().is_some_and(can_lack) {
            return true;
        }
        let n_kv = self.slots[slot].kv.len();
        n_kv == 0 || self.context.can_continue(slot, n_kv)
    }

    /// `None`: no KV is moved into the cache or out of it.
    fn kv_layout(&self) -> Option<&KvLayout> {
        let layout = self.handoffs.as_ref().map(|handoffs| &*handoffs.layout);
        layout.or_else(|| self.storing.as_ref().map(Storing::layout))
    }

    /// Cuts a slot's cache back to its first `n_keep` tokens.
    pub(super) fn cut(&mut self, slot: usize, n_keep: usize) {
        if self.slots[slot].kv.len() > n_keep {
            self.end_at(slot, n_keep);
        }
    }

    /// Cuts a slot back to where it can be continued, after an import of these tokens that did not bring all that its end needs. An
    /// image of which only a part has come is of no use: it is computed whole.
    pub(super) fn leave_continuable(&mut self, slot: usize, tokens: &[Token]) {
        let n_kv = self.slots[slot].kv.len();
        let n_whole = slots::whole_images(tokens, n_kv);
        if n_whole < n_kv || !self.is_continuable(slot) {
            self.end_at(slot, self.usable_prefix(slot, n_whole));
        }
    }

    /// The same for the sequence that runs in the slot.
    pub(super) fn go_on_continuable(&mut self, slot: usize) {
        if let Some(sequence) = self.running[slot].take() {
            self.leave_continuable(slot, &sequence.tokens);
            self.running[slot] = Some(sequence);
        }
    }

    /// Removes what a refused batch may have left in a slot. Returns false if the slot cannot step now: its sequence was
    /// preempted, or has lost tokens.
    pub(super) fn restore(&mut self, slot: usize) -> bool {
        if self.running[slot].is_none() {
            return false;
        }
        let n_kv = self.slots[slot].kv.len();
        let n = if self.limits.has_states { self.slots[slot].checkpoints.nearest(n_kv) } else { n_kv };
        self.end_at(slot, n);
        self.slots[slot].kv.len() == n_kv
    }

    /// Gives `slot`, which must be empty, the first `n` positions of `source`.
    pub(super) fn fork(&mut self, source: usize, slot: usize, n: usize) {
        if self.slots[source].kv.len() < n {
            // It was forgotten, since it could not be copied into the store.
            return;
        }
        let shares = self.context.forks_share_cells();
        if n == self.slots[source].kv.len() {
            // Both share the checkpoint.
            self.keep_marked(source);
        }
        let CacheSlot { kv, checkpoints, foreign_from, lossy_from, .. } = &self.slots[source];
        let (prefix, checkpoints) = (kv[..n].to_vec(), checkpoints.up_to(n));
        let (foreign_from, lossy_from) = (*foreign_from, *lossy_from);
        // The states of the source's end come along.
        let is_whole = n == kv.len() && self.is_continuable(source);
        // The source may be evicted for its copy's cells, like any idle slot. Then the prefix is computed.
        let has_room = shares || (self.evict_idle(n) && self.slots[source].kv.starts_with(&prefix));
        if has_room && self.context.fork(source, slot, n) {
            self.slots[slot].n_shared = if shares { n } else { 0 };
            self.fill(slot, prefix, checkpoints);
            (self.slots[slot].foreign_from, self.slots[slot].lossy_from) = (foreign_from, lossy_from);
            self.slots[slot].unmark(n);
            if self.limits.has_states && !is_whole {
                self.end_at(slot, n);
            }
        }
    }

    /// Takes note that the context has `kv` in a slot that was empty, with checkpoints of it.
    pub(super) fn fill(&mut self, slot: usize, kv: Vec<Token>, checkpoints: Checkpoints) {
        self.slots[slot].kv = kv;
        self.slots[slot].checkpoints = checkpoints;
    }

    /// Lets a slot end after its first `n` tokens, so that it can be continued there. If that is not possible, it is empty.
    pub(super) fn end_at(&mut self, slot: usize, n: usize) {
        if n == 0 {
            return self.forget(slot);
        }
        let ended = match self.limits.has_states {
            false => self.context.cut(slot, n),
            true => match self.checkpoints.take_up(&mut self.slots[slot].checkpoints, n) {
                Some(checkpoint) => self.context.return_to(slot, n, &checkpoint),
                None => Err(CannotCut),
            },
        };
        if ended.is_ok() {
            return slots::truncate(&mut self.slots, slot, n);
        }
        tracing::debug!(slot, n, "a slot cannot be cut to a prefix, which is computed again");
        self.forget(slot);
    }

    /// Empties a slot.
    pub(super) fn forget(&mut self, slot: usize) {
        self.free_cells(slot);
        slots::truncate(&mut self.slots, slot, 0);
    }

    /// Empties the idle slots of these scopes, and the store of what it has of them. What runs leaves nothing when it ends.
    pub(super) fn forget_scopes(&mut self, scopes: &[CacheScope]) {
        for sequence in self.running.iter_mut().flatten().chain(&mut self.waiting) {
            sequence.request.ephemeral |= scopes.contains(&sequence.request.cache_scope);
        }
        for slot in 0..self.slots.len() {
            if !self.slots[slot].busy && scopes.contains(&self.slots[slot].scope) {
                self.forget(slot);
            }
        }
        if let Some(storing) = &self.storing {
            scopes.iter().for_each(|scope| storing.forget(*scope));
        }
    }

    /// Forgets what somebody has cleared in the store's folder.
    pub(super) fn forget_cleared(&mut self) {
        let scopes = match self.storing.as_ref().and_then(|storing| storing.store().take_cleared()) {
            None => return,
            Some(ClearedKv::Of(scopes)) => scopes,
            Some(ClearedKv::All) => {
                let of_sequences = self.running.iter().flatten().chain(&self.waiting);
                let of_sequences = of_sequences.map(|sequence| sequence.request.cache_scope);
                self.slots.iter().map(|slot| slot.scope).chain(of_sequences).collect()
            }
        };
        self.forget_scopes(&scopes);
    }

    /// Frees all cells of a slot, those of the draft model, too.
    pub(super) fn free_cells(&mut self, slot: usize) {
        self.forget_guesses(slot);
        if self.context.cut(slot, 0).is_err() {
            tracing::error!(slot, "a sequence cannot be cleared; its cells stay in use");
        }
    }

    /// Keeps a checkpoint of a slot's end. Returns false if the slot cannot come back to its end: its states are missing, or
    /// not worth the memory, or cannot be copied.
    pub(super) fn keep_states(&mut self, slot: usize) -> bool {
        let n = self.slots[slot].kv.len();
        if !self.limits.has_states || self.slots[slot].checkpoints.has(n) {
            return true;
        }
        let is_ephemeral = self.running[slot].as_ref().is_some_and(|sequence| sequence.request.ephemeral);
        let has_room = |this: &mut Self, n_bytes| {
            let mut slots: Vec<&mut Checkpoints> = this.slots.iter_mut().map(|slot| &mut slot.checkpoints).collect();
            this.checkpoints.make_room(&mut slots, slot, n, n_bytes)
        };
        // The last one's size saves a copy that would be thrown away.
        let expected_bytes = self.checkpoints.last_bytes;
        if n == 0 || is_ephemeral || !self.is_continuable(slot) || !has_room(self, expected_bytes) {
            return false;
        }
        let bytes = match self.context.checkpoint(slot) {
            Ok(bytes) => bytes,
            Err(error) => {
                tracing::debug!(slot, n, error, "a slot's states cannot be copied");
                return false;
            }
        };
        self.checkpoints.last_bytes = bytes.len();
        if bytes.len() > expected_bytes && !has_room(self, bytes.len()) {
            return false;
        }
        self.checkpoints.add(&mut self.slots[slot].checkpoints, n, bytes);
        let (n_checkpoints, n_bytes) = self.checkpoint_totals();
        tracing::debug!(slot, n, n_checkpoints, n_bytes, "a checkpoint was taken");
        true
    }

    /// The number of checkpoints, and their bytes.
    pub(super) fn checkpoint_totals(&self) -> (usize, usize) {
        totals(self.slots.iter().map(|slot| &slot.checkpoints))
    }

    /// Where a sequence that starts in `slot` with its first `n_kept` tokens takes checkpoints: before the head of the reply, at the
    /// end of the prefill, before each image, and where other conversations may leave it: after its first message, and where it
    /// leaves one itself, with which it has `n_common` tokens in common. Without states only after the first message, where the
    /// window is stored.
    pub(super) fn marks(&self, sequence: &Sequence, slot: usize, n_kept: usize, n_common: usize) -> Vec<usize> {
        let end = sequence.n_prefill();
        if !self.limits.has_states {
            let n = slots::whole_images(&sequence.tokens, sequence.n_first_message);
            let windows = || self.kv_layout()?.sections.iter().filter_map(|section| section.window).min();
            // The prompt's end lacks what a conversation needs that leaves it there.
            let is_lost = n > n_kept && n < end && windows().is_some_and(|window| end > window as usize);
            return is_lost.then_some(n).into_iter().collect();
        }
        let shared = [sequence.n_first_message, n_common].map(|n| self.before_last_chunk(sequence, n));
        let shared = shared.into_iter().filter(|n| *n >= n_kept + MIN_SHARED && n + REPLY_HEAD < reply_at(sequence));
        let images = sequence.images.iter().map(|run| run.at.start);
        let asked = sequence.export.iter().flat_map(Export::checkpoints);
        let ends = [self.slots[slot].mark, reply_at(sequence), end];
        let marks = ends.into_iter().chain(shared).chain(images).chain(asked);
        let marks = marks.map(|n| slots::whole_images(&sequence.tokens, n));
        let mut marks: Vec<usize> = marks.filter(|n| (n_kept.max(1)..=end).contains(n)).collect();
        marks.sort_unstable();
        marks.dedup();
        marks
    }

    /// The position of a checkpoint for the first `n` tokens of a sequence: there, or where its last chunk begins. On an engine that
    /// takes part in handoffs, that chunk stays as long as it would be, since the states of the end leave meanwhile.
    fn before_last_chunk(&self, sequence: &Sequence, n: usize) -> usize {
        let last = self.limits.budget.behind(reply_at(sequence)).last_before_states();
        match sequence.export.is_some() || self.pulls() {
            true => n.min(reply_at(sequence).saturating_sub(last)),
            false => n,
        }
    }

    /// Notes a mark at the end of a slot, whose sequence ends before a step that would take the checkpoint.
    pub(super) fn note_mark(&mut self, slot: usize, sequence: &Sequence) {
        let n_kv = self.slots[slot].kv.len();
        self.slots[slot].mark = if sequence.marks.contains(&n_kv) { n_kv } else { 0 };
    }

    /// Lets the sequence that a slot computes take a checkpoint after `n` tokens, for another that waits for these, unless there is
    /// one shortly before.
    pub(super) fn add_mark(&mut self, slot: usize, n: usize) {
        let Some(sequence) = self.running[slot].as_ref().filter(|_| self.limits.has_states) else { return };
        let at = slots::whole_images(&sequence.tokens, self.before_last_chunk(sequence, n));
        let has_one =
            |n: usize| sequence.marks.iter().any(|mark| (0..MIN_WAIT_TOKENS).contains(&n.wrapping_sub(*mark)));
        if has_one(n) || has_one(at) {
            return;
        }
        let idx = sequence.marks.partition_point(|mark| *mark < at);
        self.running[slot].iter_mut().for_each(|sequence| sequence.marks.insert(idx, at));
    }

    /// The tokens before the next mark of a slot's sequence, if there is one.
    pub(super) fn to_next_mark(&self, slot: usize) -> Option<usize> {
        let n_kv = self.slots[slot].kv.len();
        let marks = &self.running[slot].as_ref()?.marks;
        marks.iter().find(|mark| **mark > n_kv).map(|mark| mark - n_kv)
    }

    /// Takes a checkpoint before a step, if the slot's sequence has come to a mark, or stores what a window needs there.
    pub(super) fn keep_marked(&mut self, slot: usize) {
        let n_kv = self.slots[slot].kv.len();
        match self.running[slot].as_ref().is_some_and(|sequence| sequence.marks.contains(&n_kv)) {
            true if self.limits.has_states => _ = self.keep_states(slot),
            true => self.store_marked(slot),
            false => {}
        }
    }
}

/// Where the head of a sequence's reply begins. A prefill for another node ends there.
fn reply_at(sequence: &Sequence) -> usize {
    if sequence.export.is_some() { sequence.n_prefill() } else { sequence.n_before_reply }
}

//! Moves idle conversations into the store. `restoring.rs` brings them back when they continue.
//!
//! What is idle is copied while nothing runs, in small shares of time beside what does, and before a new sequence takes its
//! place. Where idle cells slow the others, they are then freed: llama.cpp's attention on a CPU visits every cell below the
//! highest used one, for each head and layer, also the cells of other sequences.

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_process::parent::GRACE;
use baton_schemas::held::RestoreRates;
use baton_schemas::kv::{KvLayout, Section};
use baton_schemas::{CacheScope, Token};
use baton_store::{CLOSE_DEADLINE, KvBlock, KvStore, MAX_BLOCK_TOKENS, StoredPrefix, WantedKv};

use super::super::context::{ExportTo, ModelContext};
use super::super::described::IdleKv;
use super::super::slots::{Assignment, CacheSlot, Stored, cells_in_use, whole_images};
use super::super::vectors::Vectors;
use super::super::wake::Wake;
use super::Scheduler;
use super::handoffs::{rows_are_finite, states_are_finite};
use super::kv_rates::{KvRate, MeasuredRestores};

/// Conversations with fewer tokens stay in the cache. llama.cpp visits cells in blocks of 256.
const MIN_TOKENS: usize = 64;

/// The time for copies before a step while others stream. A block that was begun within it is finished.
pub(super) const SHARE_WITH_STREAMS: Duration = Duration::from_millis(2);

/// The same without streams.
pub(super) const SHARE: Duration = Duration::from_millis(50);

/// The same before the process ends: some GB from memory, or a conversation or two across a bus.
const SHARE_AT_END: Duration = Duration::from_secs(2);

// The rest of a child's time is for the step that runs.
const _: () = assert!(SHARE_AT_END.as_millis() + CLOSE_DEADLINE.as_millis() < GRACE.as_millis());

/// The time for copies before a step that starts long prompts, as a part of the time that the prompts will take.
const SHARE_OF_PREFILL: f64 = 0.05;

/// How likely the end of a conversation that goes on in another way is asked for again.
const CHANCE_OF_LEFT_ENDS: f64 = 1.0 / 8.0;

/// A conversation is gathered in low cells again if others have at least this part of its number of cells.
const SCATTERED: usize = 8;

/// Where conversations go that leave the cache.
pub(crate) struct Storing {
    pub(super) store: KvStore,
    layout: Arc<KvLayout>,
    idle: IdleKv,
    pub(super) wake: Wake,
    /// The rate at which KV is copied out of the cache.
    copies: KvRate,
    pub(super) restores: MeasuredRestores,
    /// The last turn's time for restoring was over: more blocks may be there.
    pub(super) restores_on: bool,
}

impl Storing {
    pub(crate) fn new(store: KvStore, layout: Arc<KvLayout>, idle: IdleKv, wake: Wake) -> Self {
        store.on_change(Arc::clone(&wake));
        let restores = MeasuredRestores::default();
        Storing { store, layout, idle, wake, copies: KvRate::default(), restores, restores_on: false }
    }

    pub(super) fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// What the store has of a prompt. The last token is always decoded, and images are reused as a whole.
    pub(super) fn find(&self, scope: CacheScope, tokens: &[Token], wanted: WantedKv) -> StoredPrefix {
        let mut n = tokens.len().saturating_sub(1);
        loop {
            let found = self.store.find_kv(scope, &tokens[..n], wanted);
            n = whole_images(tokens, found.n_tokens());
            if n == found.n_tokens() {
                return found;
            }
        }
    }

    /// Tokens that a prompt has in common with what is stored, usable or not.
    pub(super) fn n_common(&self, scope: CacheScope, tokens: &[Token]) -> usize {
        self.store.n_common(scope, tokens)
    }

    /// A slot with the first tokens of a prompt can get those that follow. States are those of one position, and a window may
    /// lack rows.
    pub(super) fn adds_to_slots(&self) -> bool {
        let is_plain = |section: &Section| section.window.is_none() && section.tokens_per_row == 1;
        self.layout.states.is_empty() && self.layout.sections.iter().all(is_plain)
    }

    /// How fast KV comes back.
    pub(super) fn restore_rates(&self) -> RestoreRates {
        self.restores.at(Instant::now())
    }

    /// The predicted seconds until the last `n_moved` tokens of a prefix are back.
    pub(super) fn restore_s(&self, prefix: &StoredPrefix, n_moved: usize) -> f64 {
        let RestoreRates { memory, disk } = self.restore_rates();
        let seconds = |n: usize, tps: f64| if tps > 0.0 { n as f64 / tps } else { 0.0 };
        let n_on_disk = prefix.n_on_disk().min(n_moved);
        seconds(n_moved - n_on_disk, memory) + seconds(n_on_disk, disk)
    }

    /// The predicted seconds until the store has all of a slot; 0 if no rate was measured.
    pub(super) fn copy_s(&self, state: &CacheSlot) -> f64 {
        let n_missing = state.kv.len() - self.store.vacant_from(state.scope, &state.kv).min(state.kv.len());
        let copy_tps = self.copies.at(Instant::now());
        if copy_tps > 0.0 { n_missing as f64 / copy_tps } else { 0.0 }
    }

    pub(super) fn forget(&self, scope: CacheScope) {
        self.store.forget(scope);
    }

    pub(super) fn store(&self) -> &KvStore {
        &self.store
    }

    /// The same on a machine where so many tokens come back in a second.
    #[cfg(test)]
    pub(super) fn measured(self, restore_tps: f64) -> Self {
        Storing { restores: MeasuredRestores::of(restore_tps), ..self }
    }

    /// The same where everything comes back sooner than it is computed.
    #[cfg(test)]
    pub(super) fn fast(self) -> Self {
        self.measured(1e300)
    }
}

impl<C: ModelContext, V: Vectors> Scheduler<C, V> {
    /// Copies idle conversations if a sequence runs, the one that was idle for longest first, as far as the time allows, and frees
    /// the cells that would slow others.
    ///
    /// No cells are freed while one sequence alone has begun: llama.cpp would give its next tokens the cells that become free
    /// below its first ones. Attention adds in the order of cells, so its numbers would be rounded in another way than those of
    /// an equal sequence elsewhere. Beside other sequences they are rounded differently anyway.
    pub(super) fn store_idle(&mut self) {
        if !self.slots.iter().any(|slot| slot.busy) {
            return;
        }
        let n_begun = self.slots.iter().filter(|slot| slot.busy && !slot.kv.is_empty()).count();
        let frees = self.frees_cells() && n_begun != 1;
        let (began, share) = (Instant::now(), self.share(0));
        while let Some(slot) = self.next_idle(|stored| stored == Stored::Partly || frees) {
            let is_whole = self.store_within(slot, share.saturating_sub(began.elapsed()));
            if is_whole && frees {
                self.forget(slot);
            }
            if began.elapsed() >= share {
                return;
            }
        }
    }

    /// Copies a block of an idle conversation while nothing runs. Returns false if all are in the store.
    pub(super) fn store_while_idle(&mut self) -> bool {
        let Some(slot) = self.next_idle(|stored| stored == Stored::Partly) else { return false };
        self.store_block(slot);
        true
    }

    /// Copies idle conversations that the store's disk lacks, and closes the store, which writes them. Afterwards only memory keeps KV:
    /// the process is about to end.
    pub(super) fn store_at_end(&mut self) {
        if !self.storing.as_ref().is_some_and(|storing| storing.store.has_disk()) {
            return;
        }
        self.drop_cancelled();
        let began = Instant::now();
        let is_lacking = |slot: &usize| self.can_be_stored(*slot) && self.slots[*slot].stored == Stored::Partly;
        let mut lacking: Vec<usize> = (0..self.slots.len()).filter(is_lacking).collect();
        // The conversation that has just ended is the likeliest to go on.
        lacking.sort_by_key(|slot| Reverse(self.slots[*slot].last_used));
        for slot in lacking {
            if began.elapsed() >= SHARE_AT_END {
                break;
            }
            self.store_within(slot, SHARE_AT_END.saturating_sub(began.elapsed()));
        }
        self.storing.iter_mut().for_each(|storing| storing.store.close());
    }

    /// Stores the prompt of a running sequence up to its mark, before the window moves on: other conversations begin alike, and go on
    /// from there. Not if that would hold up the next step for long; another conversation then does it.
    pub(super) fn store_marked(&mut self, slot: usize) {
        let (Some(storing), state) = (&self.storing, &self.slots[slot]) else { return };
        let takes_s = storing.copy_s(state);
        let is_ephemeral = self.running[slot].as_ref().is_none_or(|sequence| sequence.request.ephemeral);
        let (began, share) = (Instant::now(), self.share(0));
        if is_ephemeral || state.foreign_from.is_some() || takes_s > share.as_secs_f64() {
            return;
        }
        // Before the first measurement, nobody knows how long it takes.
        while self.slots[slot].stored == Stored::Partly && began.elapsed() <= share {
            self.store_block(slot);
        }
        // When it ends, it has more.
        self.slots[slot].stored = Stored::Partly;
    }

    /// Cuts an idle slot that a sequence needs, after what it loses was copied, if that pays and as far as the time allows. `n_new` is
    /// the number of tokens that are about to be computed.
    pub(super) fn leave(&mut self, slot: usize, n_keep: usize, n_new: usize) {
        let n_lost = self.slots[slot].kv.len().saturating_sub(n_keep);
        if n_lost > 0 {
            if self.pays_to_copy(slot, n_lost) {
                self.store_within(slot, self.share(n_new));
            }
            self.cut(slot, n_keep);
        }
    }

    /// Returns true if the last tokens of a slot, by their chance to be asked for again, take longer to compute than all that the store
    /// lacks of it takes to copy: a block needs those before it. A next turn that drops the end of a reply does not wait for a copy of the conversation.
    fn pays_to_copy(&self, slot: usize, n_lost: usize) -> bool {
        let Some(storing) = &self.storing else { return false };
        // If most of it goes, another conversation takes the slot, and this one is likely to go on.
        let chance = if 2 * n_lost > self.slots[slot].kv.len() { 1.0 } else { CHANCE_OF_LEFT_ENDS };
        n_lost as f64 * chance >= storing.copy_s(&self.slots[slot]) * self.prefill_tps
    }

    /// Takes the slot of a conversation instead of a fork, if its other cells would slow the new sequence and are not needed: the
    /// store has them.
    pub(super) fn rather_taken(&mut self, assignment: Assignment, n_new: usize) -> Assignment {
        match assignment {
            Assignment::Fork { source, n_keep, .. }
                if self.frees_cells() && !self.slots[source].busy && self.store_within(source, self.share(n_new)) =>
            {
                Assignment::Take { slot: source, n_keep }
            }
            assignment => assignment,
        }
    }

    /// Moves everything into the store, if a conversation that is about to continue alone has many cells of others among its own.
    /// It then comes back into low cells. Returns false if nothing was moved.
    pub(super) fn gather(&mut self, assignment: &Assignment, waiting_idx: usize) -> bool {
        let Assignment::Take { slot, n_keep } = *assignment else { return false };
        let n_others = cells_in_use(&self.slots).saturating_sub(self.slots[slot].kv.len());
        let is_scattered = n_others > MIN_TOKENS.max(n_keep / SCATTERED);
        if !self.frees_cells() || !is_scattered || n_keep < MIN_TOKENS || self.slots.iter().any(|slot| slot.busy) {
            return false;
        }
        let n_new = self.waiting[waiting_idx].tokens.len();
        let is_whole = self.store_within(slot, self.share(n_new));
        let prefix = self.found_in_store(&self.waiting[waiting_idx]);
        let comes_back = is_whole && prefix.n_tokens() >= n_keep && self.is_worth_restoring(&prefix, 0);
        if comes_back {
            self.forget(slot);
        }
        comes_back
    }

    /// Idle conversations leave the cache, since they would slow the others' steps.
    fn frees_cells(&self) -> bool {
        self.storing.as_ref().is_some_and(|storing| storing.idle == IdleKv::Moves)
    }

    /// The time for copies before the next step.
    fn share(&self, n_new: usize) -> Duration {
        if self.decodes() {
            return SHARE_WITH_STREAMS;
        }
        let n_prompts = (0..self.slots.len()).map(|slot| self.missing_prefill(slot)).sum::<usize>() + n_new;
        let prefill_s = if self.prefill_tps > 0.0 { n_prompts as f64 / self.prefill_tps } else { 0.0 };
        SHARE.max(Duration::from_secs_f64(prefill_s * SHARE_OF_PREFILL))
    }

    /// The slot that has been idle for longest, of those with a conversation that can be stored.
    fn next_idle(&self, is_wanted: impl Fn(Stored) -> bool) -> Option<usize> {
        let wanted =
            (0..self.slots.len()).filter(|&slot| self.can_be_stored(slot) && is_wanted(self.slots[slot].stored));
        wanted.min_by_key(|&slot| self.slots[slot].last_used)
    }

    fn can_be_stored(&self, slot: usize) -> bool {
        let Some(storing) = &self.storing else { return false };
        // Across a slow bus or link, computing again may be faster.
        let copy_tps = storing.copies.at(Instant::now());
        let pays = storing.idle == IdleKv::Moves || copy_tps <= 0.0 || copy_tps >= self.prefill_tps;
        let state = &self.slots[slot];
        let is_own = state.foreign_from.is_none();
        pays && is_own && !state.busy && state.kv.len() >= MIN_TOKENS && state.stored != Stored::Refused
    }

    /// Copies what the store lacks of an idle slot, as far as the time allows. Returns true if it has all of it.
    fn store_within(&mut self, slot: usize, share: Duration) -> bool {
        let began = Instant::now();
        while self.can_be_stored(slot) && self.slots[slot].stored == Stored::Partly {
            self.store_block(slot);
            if began.elapsed() >= share {
                break;
            }
        }
        self.slots[slot].stored == Stored::Whole
    }

    /// Copies the next block of a slot that the store lacks.
    fn store_block(&mut self, slot: usize) {
        let began = Instant::now();
        let Some(storing) = &self.storing else { return };
        let state = &self.slots[slot];
        let n_kv = state.kv.len();
        let max = MAX_BLOCK_TOKENS.min(self.limits.budget.n_ubatch);
        let Range { start: n_stored, end } =
            storing.store.next_to_copy(state.scope, &state.kv, state.n_lossless(n_kv), max);
        if n_stored >= end {
            self.slots[slot].stored = Stored::Whole;
            return;
        }
        let next_state = state.checkpoints.after(n_stored).map_or(n_kv, |(position, _)| position);
        // A block is either exact or not.
        let exact_end = state.lossy_from.filter(|from| *from > n_stored).unwrap_or(n_kv);
        let p1 = exact_end.min(next_state).min(end);
        let block = self.is_continuable(slot).then(|| self.copied(slot, n_stored as u32..p1 as u32)).transpose();
        let block = match block {
            Ok(block) => block,
            Err(error) if self.slots[slot].busy => {
                tracing::warn!(slot, error, "a prompt cannot be copied out of the cache; the store lacks it");
                self.slots[slot].stored = Stored::Refused;
                return;
            }
            Err(error) => {
                tracing::warn!(slot, error, "an idle conversation cannot be copied out of the cache; it is forgotten");
                return self.cut(slot, 0);
            }
        };
        let (Some(storing), state) = (&mut self.storing, &mut self.slots[slot]) else { return };
        let is_added = block.is_some_and(|block| storing.store.add(state.scope, &state.kv, block));
        state.stored = match is_added {
            false => Stored::Refused,
            true if p1 == n_kv => Stored::Whole,
            true => Stored::Partly,
        };
        // The parts of a short block that do not depend on its length would hide the rate.
        if p1 - n_stored >= MIN_TOKENS {
            let copy_tps = (p1 - n_stored) as f64 / began.elapsed().as_secs_f64().max(1e-6);
            storing.copies.learn(copy_tps, Instant::now());
        }
    }

    /// The block of some positions of a slot, with the states of its end if they are known.
    fn copied(&mut self, slot: usize, positions: Range<u32>) -> Result<KvBlock, String> {
        let n_kv = self.slots[slot].kv.len() as u32;
        let end = positions.end;
        let chunk = self.context.export(slot, positions, n_kv, ExportTo::Host)?;
        let layout = self.storing.as_ref().map(|storing| Arc::clone(&storing.layout)).ok_or("there is no store")?;
        if !rows_are_finite(&chunk, &layout) {
            return Err("it is not finite".into());
        }
        let state = match self.slots[slot].checkpoints.after(end as usize - 1) {
            _ if !self.limits.has_states => None,
            _ if end == n_kv => Some(self.context.export_state(slot, end)?),
            Some((position, checkpoint)) if position == end as usize => Some(self.context.states_of(end, checkpoint)?),
            _ => None,
        };
        if state.as_ref().is_some_and(|state| !states_are_finite(state, &layout)) {
            return Err("its states are not finite".into());
        }
        let is_lossy = self.slots[slot].lossy_from.is_some_and(|from| from < end as usize);
        Ok(KvBlock { chunk, state, is_lossy })
    }
}

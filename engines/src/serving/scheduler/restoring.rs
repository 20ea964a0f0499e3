//! Brings stored conversations back into slots, between steps.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_schemas::handoff::PULL_AHEAD;
use baton_schemas::sequence::CachedTokens;
use baton_store::{KvBlock, Restored, StoredPrefix, WantedKv};

use super::super::context::ModelContext;
use super::super::kv_flow::Restoring;
use super::super::sequence::Sequence;
use super::super::vectors::Vectors;
use super::storing::{SHARE, SHARE_WITH_STREAMS};
use super::{Scheduler, Storing};

/// The longest wait for a block from disk: as long as computing what is missing takes, but within these bounds.
const MIN_DISK_WAIT_S: f64 = 1.0;
const MAX_DISK_WAIT_S: f64 = 10.0;

impl<C: ModelContext, V: Vectors> Scheduler<C, V> {
    /// Returns true if what the store has of a prompt is here sooner than all but the first `n_cached` tokens of it are computed.
    pub(super) fn is_worth_restoring(&self, prefix: &StoredPrefix, n_cached: usize) -> bool {
        let Some(storing) = &self.storing else { return false };
        let n_new = prefix.n_tokens().saturating_sub(n_cached);
        if n_new == 0 || self.prefill_tps <= 0.0 {
            return n_new > 0;
        }
        let n_moved = if storing.adds_to_slots() { n_new } else { prefix.n_tokens() };
        storing.restore_s(prefix, n_moved) < n_new as f64 / self.prefill_tps
    }

    /// Finds the part of a sequence that the store has. Nothing is restored for a prompt whose log-probabilities are wanted, or
    /// whose inner states another node waits for: the store has neither.
    pub(super) fn found_in_store(&self, sequence: &Sequence) -> StoredPrefix {
        let promises = sequence.export.as_ref().is_some_and(|export| export.checkpoints().next().is_some());
        let storing = self.storing.as_ref().filter(|_| sequence.scores.is_none() && !promises);
        let wanted = if sequence.needs_lossless_kv() { WantedKv::Lossless } else { WantedKv::Any };
        let scope = sequence.request.cache_scope;
        storing.map_or_else(StoredPrefix::default, |storing| storing.find(scope, &sequence.tokens, wanted))
    }

    /// Begins a sequence whose slot has what other slots have of it. The rest comes from the store, if that has more.
    pub(super) fn begin_or_restore(&mut self, slot: usize, n_common: usize) {
        let n_kv = self.slots[slot].kv.len();
        if self.storing.is_some() && n_kv == 0 {
            // First the others leave, so that the low cells are free for this one.
            self.store_idle();
        }
        let prefix = self.running[slot].as_ref().map_or_else(StoredPrefix::default, |s| self.found_in_store(s));
        let adds = n_kv == 0 || self.storing.as_ref().is_some_and(Storing::adds_to_slots);
        let restores = adds && self.is_worth_restoring(&prefix, n_kv);
        if let (true, Some(storing), Some(sequence)) = (restores, &self.storing, &mut self.running[slot]) {
            let restore = storing.store.restore_after(n_kv as u32, &prefix, Arc::clone(&storing.wake));
            let began = Instant::now();
            let state = None;
            sequence.restoring = Some(Restoring { restore, prefix, n_common, state, began, waits_since: began });
            return self.pull_ahead(slot);
        }
        self.begin(slot, n_common, CachedTokens::in_slot(n_kv as u32));
    }

    /// Begins to pull what follows a restore that will soon have ended, if the slot's request names a source.
    fn pull_ahead(&mut self, slot: usize) {
        let n_kv = self.slots[slot].kv.len();
        let (Some(storing), Some(sequence)) = (&self.storing, &self.running[slot]) else { return };
        let Some(Restoring { prefix, n_common, .. }) = &sequence.restoring else { return };
        let n_tokens = prefix.n_tokens();
        let is_soon = storing.restore_s(prefix, n_tokens.saturating_sub(n_kv)) <= PULL_AHEAD.as_secs_f64();
        if sequence.request.kv_source.is_none() || sequence.import.is_some() || !is_soon {
            return;
        }
        let marks = self.marks(sequence, slot, n_tokens, *n_common);
        if let Some(sequence) = &mut self.running[slot] {
            sequence.marks = marks;
        }
        self.begin_import(slot, n_tokens);
    }

    /// Adds blocks that have come from the store to their slots, that of the oldest sequence first: one, and more as far as the
    /// time allows.
    pub(super) fn restore_blocks(&mut self) {
        let n_restored = |this: &Self| this.storing.as_ref().map_or(0, |storing| storing.store().n_restored());
        let (has_streams, n_before) = (self.decodes(), n_restored(self));
        self.restore_within(if has_streams { SHARE_WITH_STREAMS } else { SHARE });
        if let (true, Some(storing)) = (has_streams, &self.storing) {
            storing.store().count_step(n_restored(self) - n_before);
        }
    }

    fn restore_within(&mut self, share: Duration) {
        let began = Instant::now();
        self.restores_on(false);
        let is_restoring = |slot: &usize| self.running[*slot].as_ref().is_some_and(|s| s.restoring.is_some());
        let mut slots: Vec<usize> = (0..self.slots.len()).filter(is_restoring).collect();
        slots.sort_by_key(|&slot| self.slots[slot].last_used);
        for slot in slots {
            while self.restore_next(slot) {
                if began.elapsed() >= share {
                    return self.restores_on(true);
                }
            }
        }
    }

    /// Returns true if there is nothing to do until a message comes: nothing can be computed, and all blocks that have come are back.
    pub(super) fn awaits_messages(&self) -> bool {
        let can_step = (0..self.slots.len()).any(|slot| self.can_step(slot));
        self.vectors.is_idle() && !can_step && !self.storing.as_ref().is_some_and(|storing| storing.restores_on)
    }

    fn restores_on(&mut self, on: bool) {
        self.storing.iter_mut().for_each(|storing| storing.restores_on = on);
    }

    /// Adds the next block of a slot. Returns false if none has come.
    fn restore_next(&mut self, slot: usize) -> bool {
        let n_kv = self.slots[slot].kv.len();
        let Some(restoring) = self.running[slot].as_mut().and_then(|s| s.restoring.as_mut()) else { return false };
        let problem = match restoring.restore.poll() {
            Restored::Pending => {
                let compute_s = (restoring.prefix.n_tokens() - n_kv) as f64 / self.prefill_tps.max(1e-3);
                if restoring.waits_since.elapsed().as_secs_f64() < compute_s.clamp(MIN_DISK_WAIT_S, MAX_DISK_WAIT_S) {
                    return false;
                }
                let (given, took) = (restoring.restore.given(), restoring.began.elapsed());
                self.storing.iter_mut().for_each(|s| s.restores.give_up_disk(given, took, Instant::now()));
                Some("the disk is too slow".to_owned())
            }
            Restored::End => None,
            Restored::Failed => Some("it cannot be read".to_owned()),
            Restored::Block(block) => match self.restore_block(slot, block) {
                Ok(()) => {
                    self.pull_ahead(slot);
                    return true;
                }
                Err(error) => Some(error),
            },
        };
        if let Some(error) = problem {
            tracing::warn!(slot, error, "the store has more of a prompt than it can give; the rest is computed");
            if self.restore_less(slot) {
                return true;
            }
        }
        self.end_restore(slot);
        true
    }

    /// Begins again with the shorter prefix that the store can still give, where the rows that have come lack the states of their end.
    /// Returns false if that does not pay.
    fn restore_less(&mut self, slot: usize) -> bool {
        let n_kv = self.slots[slot].kv.len();
        let Some((sequence, restoring)) = self.running[slot].as_ref().and_then(|s| Some((s, s.restoring.as_ref()?)))
        else {
            return false;
        };
        let has_states = restoring.state.as_ref().is_some_and(|state| state.position as usize == n_kv);
        if !self.limits.has_states || has_states {
            return false;
        }
        let prefix = self.found_in_store(sequence);
        // Each time it is shorter, so this ends.
        if prefix.n_tokens() >= restoring.prefix.n_tokens() || !self.is_worth_restoring(&prefix, 0) {
            return false;
        }
        self.forget(slot);
        let Some(storing) = &self.storing else { return false };
        let restore = storing.store.restore_after(0, &prefix, Arc::clone(&storing.wake));
        let Some(restoring) = self.running[slot].as_mut().and_then(|s| s.restoring.as_mut()) else { return false };
        *restoring = Restoring { restore, prefix, state: None, waits_since: Instant::now(), ..*restoring };
        true
    }

    fn restore_block(&mut self, slot: usize, block: KvBlock) -> Result<(), String> {
        let n_kv = self.slots[slot].kv.len();
        let p1 = block.chunk.p1 as usize;
        if block.chunk.p0 as usize != n_kv {
            return Err(format!("the block at {} does not continue {n_kv} tokens", block.chunk.p0));
        }
        if block.is_lossy && self.running[slot].as_ref().is_some_and(Sequence::needs_lossless_kv) {
            // Its copy in memory has made room since it was found, and its file is lossy.
            return Err("it went through a lossy codec, and lossless KV is needed".into());
        }
        // No running sequence makes room for more than this one was promised.
        while !self.make_room(p1 - n_kv) {
            if self.running[slot].as_ref().is_none_or(|s| s.restoring.is_none()) {
                return Ok(());
            }
        }
        self.context.restore(slot, &block.chunk)?;
        let Some(sequence) = &mut self.running[slot] else { return Ok(()) };
        self.slots[slot].kv.extend_from_slice(&sequence.tokens[n_kv..p1]);
        if block.is_lossy {
            self.slots[slot].mark_lossy(n_kv);
        }
        if let Some(restoring) = &mut sequence.restoring {
            restoring.state = block.state;
            restoring.waits_since = Instant::now();
        }
        Ok(())
    }

    /// Goes on with a sequence whose KV has come from the store, or as much of it as there was.
    fn end_restore(&mut self, slot: usize) {
        let Some(restoring) = self.running[slot].as_mut().and_then(|s| s.restoring.take()) else { return };
        let Restoring { restore, prefix, n_common, state, began, .. } = restoring;
        if let Some(state) = state.filter(|state| state.position as usize == self.slots[slot].kv.len())
            && let Err(error) = self.context.restore_state(slot, &state)
        {
            tracing::warn!(slot, error, "states cannot be moved back into the cache; the prompt is computed again");
            self.forget(slot);
        }
        self.go_on_continuable(slot);
        let n_kv = self.slots[slot].kv.len();
        let given = restore.given();
        self.running[slot].iter_mut().for_each(|sequence| sequence.restored = began.elapsed());
        let is_alone = self.running.iter().flatten().count() == 1;
        let (took, now) = (began.elapsed(), Instant::now());
        match &mut self.storing {
            Some(storing) if n_kv == prefix.n_tokens() && is_alone => storing.restores.learn(given, took, now),
            Some(storing) => storing.restores.learn_disturbed(given, took, now),
            None => {}
        }
        let disk = given.disk.min(n_kv as u32);
        let memory = given.memory.min(n_kv as u32 - disk);
        self.begin(slot, n_common, CachedTokens { n_cached: n_kv as u32, memory, disk });
    }
}

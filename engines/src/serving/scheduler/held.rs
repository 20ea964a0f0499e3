//! Tells which conversations the slots and the store hold.

use baton_schemas::held::{HeldPiece, HeldPieces, KvTier, PieceUse};

use super::super::context::ModelContext;
use super::super::slots::CacheSlot;
use super::super::vectors::Vectors;
use super::{Scheduler, Storing};

impl<C: ModelContext, V: Vectors> Scheduler<C, V> {
    /// Changes with what the slots or the store hold. Never 0.
    pub(super) fn held_version(&self) -> u64 {
        let stored = self.storing.as_ref().map_or(0, |storing| storing.store().version());
        self.clock.wrapping_add(stored.rotate_left(32)).max(1)
    }

    /// What the slots and the store hold. A prompt that is being computed counts: others wait for it.
    pub(super) fn held(&self) -> HeldPieces {
        let mut pieces = self.storing.as_ref().map_or_else(Vec::new, |storing: &Storing| storing.store().held());
        (0..self.slots.len()).for_each(|slot| self.add_slot(slot, &mut pieces));
        HeldPieces { version: self.held_version(), pieces }
    }

    fn add_slot(&self, slot: usize, pieces: &mut Vec<HeldPiece>) {
        if self.running[slot].as_ref().is_some_and(|sequence| sequence.request.ephemeral) {
            return;
        }
        let CacheSlot { kv, target, scope, checkpoints, .. } = &self.slots[slot];
        let has_states = self.limits.has_states;
        let tokens = if kv.len() < target.len() && !has_states { target } else { kv };
        let n_exact = self.slots[slot].n_exact(tokens.len());
        let mut ends = Vec::new();
        if has_states {
            let positions = std::iter::successors(checkpoints.after(0), |(position, _)| checkpoints.after(*position));
            ends.extend(positions.map(|(position, _)| (position, PieceUse::AtEnd)));
            ends.push((kv.len(), if self.is_continuable(slot) { PieceUse::AtEnd } else { PieceUse::Nowhere }));
        } else {
            // A windowed cache has dropped the rows that an earlier end needs.
            ends.push((self.first_usable(slot) - 1, PieceUse::Nowhere));
            ends.push((n_exact, PieceUse::Anywhere));
            ends.push((tokens.len(), PieceUse::Anywhere));
        }
        let (mut before, mut from) = (None, 0);
        for (to, use_at) in ends.into_iter().filter(|(to, _)| *to <= tokens.len()) {
            if to > from {
                let (first, tokens) = (from as u32, tokens[from..to].into());
                let (tier, is_exact) = (KvTier::Slot, to <= n_exact);
                pieces.push(HeldPiece { scope: *scope, before, from: first, tokens, tier, use_at, is_exact });
                (before, from) = (Some(pieces.len() - 1), to);
            }
        }
    }

    /// The smallest number of a slot's first tokens after which another sequence can go on.
    fn first_usable(&self, slot: usize) -> usize {
        let (mut low, mut high) = (1, self.slots[slot].kv.len().max(1));
        while low < high {
            let middle = usize::midpoint(low, high);
            if self.usable_prefix(slot, middle) > 0 {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        low
    }
}

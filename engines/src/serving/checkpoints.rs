//! Checkpoints of slots: what a slot needs beside its rows to end at an earlier position again.
//!
//! Recurrent layers keep a state instead of rows: the result of all positions before it. It cannot be cut, so a slot of such a
//! model ends only where its state is, or where a copy of the state was taken. The copies lie in the host's memory, and slots
//! that were forked from each other share them. Pure: [`super::scheduler`] takes the copies and returns to them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use baton_model::vocabulary::Vocabulary;
use baton_schemas::Token;
use baton_store::GreedyDual;
use bytes::Bytes;

/// The most checkpoints of a slot, however small they are.
pub(crate) const MAX_CHECKPOINTS: usize = 64;

/// The tokens at the end of a prompt among which the head of the reply is looked for.
const MAX_REPLY_HEAD: usize = 32;

/// The tokens of such a head where no control token shows its beginning.
pub(crate) const REPLY_HEAD: usize = 4;

/// A checkpoint for other conversations saves each of them at least so many tokens.
pub(crate) const MIN_SHARED: usize = 64;

/// The number of tokens of a prompt before the head of the reply ("assistant", and what opens its reasoning). Templates drop
/// earlier reasoning, so a conversation's next turn shares no more of this prompt.
pub(crate) fn before_reply(prompt: &[Token], vocabulary: &Vocabulary) -> usize {
    // The last token is decoded.
    let end = prompt.len().saturating_sub(1);
    let control = (end.saturating_sub(MAX_REPLY_HEAD)..end).rev().find(|&i| vocabulary.is_control(prompt[i]));
    control.unwrap_or(end.saturating_sub(REPLY_HEAD))
}

/// The number of tokens of a prompt's first message, mostly the system prompt, with which other conversations begin, too: those
/// before the first control token that follows [`MIN_SHARED`] tokens. 0 if there is none.
pub(crate) fn first_message(prompt: &[Token], vocabulary: &Vocabulary) -> usize {
    (MIN_SHARED..prompt.len()).find(|&i| vocabulary.is_control(prompt[i])).unwrap_or(0)
}

#[derive(Debug, Clone)]
struct Checkpoint {
    /// The number of tokens that the state has seen.
    position: usize,
    bytes: Bytes,
    /// The budget's aging when it was taken or last returned to.
    used: GreedyDual,
}

/// A slot's checkpoints, by position.
#[derive(Debug, Clone, Default)]
pub(crate) struct Checkpoints(Vec<Checkpoint>);

impl Checkpoints {
    /// The last position at or below `n` that can be returned to; 0 if there is none.
    pub(crate) fn nearest(&self, n: usize) -> usize {
        self.0.iter().rev().map(|checkpoint| checkpoint.position).find(|position| *position <= n).unwrap_or(0)
    }

    /// The first one after `n`: its position, and its bytes.
    pub(crate) fn after(&self, n: usize) -> Option<(usize, &Bytes)> {
        self.0.iter().map(|checkpoint| (checkpoint.position, &checkpoint.bytes)).find(|(position, _)| *position > n)
    }

    pub(crate) fn has(&self, position: usize) -> bool {
        self.0.iter().any(|checkpoint| checkpoint.position == position)
    }

    /// The checkpoint at a position.
    pub(crate) fn copy(&self, position: usize) -> Option<Bytes> {
        self.0.iter().find(|checkpoint| checkpoint.position == position).map(|checkpoint| checkpoint.bytes.clone())
    }

    /// The checkpoints at or below `n`, for a slot that shares the first `n` tokens.
    pub(crate) fn up_to(&self, n: usize) -> Checkpoints {
        Checkpoints(self.0.iter().filter(|checkpoint| checkpoint.position <= n).cloned().collect())
    }

    /// Drops those of tokens that the slot no longer has.
    pub(crate) fn truncate(&mut self, n: usize) {
        self.0.retain(|checkpoint| checkpoint.position <= n);
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Each one's bytes, and the tokens that it saves: those since the one before it.
    fn savings(&self) -> impl Iterator<Item = (&Checkpoint, usize)> {
        let before = [0].into_iter().chain(self.0.iter().map(|checkpoint| checkpoint.position));
        self.0.iter().zip(before).map(|(checkpoint, before)| (checkpoint, checkpoint.position - before))
    }
}

/// The memory of all checkpoints, and which are dropped when it is short.
///
/// A checkpoint is worth the tokens that it saves for each of its bytes, and that [ages](GreedyDual) from its last use.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct CheckpointBudget {
    max_bytes: usize,
    aging: GreedyDual,
    /// The size of the last copy: the best guess of the next one's.
    pub(crate) last_bytes: usize,
}

impl CheckpointBudget {
    pub(crate) fn new(max_bytes: u64) -> Self {
        CheckpointBudget { max_bytes: usize::try_from(max_bytes).unwrap_or(usize::MAX), ..Self::default() }
    }

    /// Makes room for a checkpoint of slot `at` at `position`. Returns false if it is worth less than those that would be dropped
    /// for it.
    pub(crate) fn make_room(
        &mut self,
        slots: &mut [&mut Checkpoints],
        at: usize,
        position: usize,
        n_bytes: usize,
    ) -> bool {
        let max_bytes = self.max_bytes;
        if n_bytes > max_bytes {
            return false;
        }
        let worth = self.aging.worth((position - slots[at].nearest(position)) as f64, n_bytes);
        loop {
            let is_full = slots[at].len() >= MAX_CHECKPOINTS;
            let of = if is_full { at..at + 1 } else { 0..slots.len() };
            if !is_full && totals(slots.iter().map(|slot| &**slot)).1 <= max_bytes - n_bytes {
                return true;
            }
            if !self.drop_cheapest(slots, of, worth) {
                return false;
            }
        }
    }

    /// Drops the checkpoint of the slots `of` that is worth least, unless that is more than `worth`. In all slots that share it:
    /// before that, its memory would not be free.
    fn drop_cheapest(&mut self, slots: &mut [&mut Checkpoints], of: Range<usize>, worth: f64) -> bool {
        let mut worths: BTreeMap<*const u8, f64> = BTreeMap::new();
        for (checkpoint, n_saved) in slots.iter().flat_map(|slot| slot.savings()) {
            let most = worths.entry(checkpoint.bytes.as_ptr()).or_default();
            *most = most.max(checkpoint.used.worth(n_saved as f64, checkpoint.bytes.len()));
        }
        let candidates = slots[of].iter().flat_map(|slot| &slot.0).map(|checkpoint| checkpoint.bytes.as_ptr());
        let cheapest = candidates.map(|address| (address, worths[&address])).min_by(|(_, a), (_, b)| a.total_cmp(b));
        let Some((address, least)) = cheapest.filter(|(_, least)| *least <= worth) else { return false };
        self.aging.dropped(least);
        slots.iter_mut().for_each(|slot| slot.0.retain(|checkpoint| checkpoint.bytes.as_ptr() != address));
        true
    }

    /// Adds a checkpoint to a slot, which has none at this position.
    pub(crate) fn add(&self, slot: &mut Checkpoints, position: usize, bytes: Bytes) {
        let idx = slot.0.partition_point(|checkpoint| checkpoint.position < position);
        slot.0.insert(idx, Checkpoint { position, bytes, used: self.aging });
    }

    /// The checkpoint to return to at `position`, which is now in use.
    pub(crate) fn take_up(&self, slot: &mut Checkpoints, position: usize) -> Option<Bytes> {
        let checkpoint = slot.0.iter_mut().find(|checkpoint| checkpoint.position == position)?;
        checkpoint.used = self.aging;
        Some(checkpoint.bytes.clone())
    }
}

/// The number of different checkpoints of some slots, and their bytes.
pub(crate) fn totals<'c>(slots: impl IntoIterator<Item = &'c Checkpoints>) -> (usize, usize) {
    let all = slots.into_iter().flat_map(|slot| &slot.0);
    let different: BTreeSet<(*const u8, usize)> =
        all.map(|checkpoint| (checkpoint.bytes.as_ptr(), checkpoint.bytes.len())).collect();
    (different.len(), different.iter().map(|(_, n_bytes)| n_bytes).sum())
}

#[cfg(test)]
mod tests {
    use baton_model::vocabulary::TokenFacts;

    use super::*;

    fn copy() -> Bytes {
        vec![0; 10].into()
    }

    fn at(budget: &CheckpointBudget, positions: &[usize]) -> Checkpoints {
        let mut slot = Checkpoints::default();
        positions.iter().for_each(|position| budget.add(&mut slot, *position, copy()));
        slot
    }

    fn positions(slot: &Checkpoints) -> Vec<usize> {
        slot.0.iter().map(|checkpoint| checkpoint.position).collect()
    }

    #[test]
    fn a_slot_returns_to_the_last_checkpoint_before_the_cut() {
        let budget = CheckpointBudget::new(1_000);
        let mut slot = at(&budget, &[50, 20, 100]);
        assert_eq!([0, 19, 20, 99, 100, 500].map(|n| slot.nearest(n)), [0, 0, 20, 50, 100, 100]);
        assert!(slot.has(50) && !slot.has(51) && budget.take_up(&mut slot, 51).is_none());
        assert_eq!(positions(&slot.up_to(50)), [20, 50]);
        slot.truncate(99);
        assert_eq!(positions(&slot), [20, 50]);
    }

    #[test]
    fn what_saves_least_is_dropped_first_and_never_for_what_saves_less() {
        let mut budget = CheckpointBudget::new(40);
        let (mut first, mut second) = (at(&budget, &[100, 104]), at(&budget, &[500, 1_000]));
        let room = |budget: &mut CheckpointBudget, slots: &mut [&mut Checkpoints], position| {
            budget.make_room(slots, 1, position, 10)
        };
        let slots = &mut [&mut first, &mut second];
        assert!(!room(&mut budget, slots, 1_003), "3 tokens are not worth the 4 at 104");
        assert!(room(&mut budget, slots, 1_200));
        assert_eq!((positions(slots[0]), positions(slots[1])), (vec![100], vec![500, 1_000]));
        // Each one that is dropped lets the older ones age.
        budget.add(slots[1], 1_200, copy());
        assert!(room(&mut budget, slots, 1_250) || budget.aging != GreedyDual::default());
        assert!(!budget.make_room(slots, 1, 5_000, 41), "more than the budget");
    }

    #[test]
    fn a_checkpoint_that_is_used_outlives_one_that_is_not() {
        let mut budget = CheckpointBudget::new(30);
        let mut slots = [at(&budget, &[100]), at(&budget, &[110]), at(&budget, &[])];
        for turn in 0..20 {
            assert!(budget.take_up(&mut slots[0], 100).is_some(), "turn {turn}");
            let [a, b, c] = &mut slots;
            c.truncate(0);
            let lists = &mut [a, b, c];
            for position in [90, 180] {
                if budget.make_room(lists, 2, position, 10) {
                    budget.add(lists[2], position, copy());
                }
            }
        }
        assert_eq!((positions(&slots[0]), positions(&slots[1])), (vec![100], vec![]));
    }

    #[test]
    fn forks_share_their_checkpoints_and_lose_them_together() {
        let mut budget = CheckpointBudget::new(30);
        let mut source = at(&budget, &[100, 900]);
        let mut fork = source.up_to(100);
        let slots = &mut [&mut source, &mut fork];
        assert_eq!(totals(slots.iter().map(|slot| &**slot)), (2, 20));
        assert!(budget.make_room(slots, 1, 5_000, 20));
        assert_eq!((positions(slots[0]), positions(slots[1])), (vec![900], vec![]));
    }

    #[test]
    fn a_slot_has_a_limited_number_of_checkpoints_whatever_their_size() {
        let mut budget = CheckpointBudget::new(u64::MAX);
        let mut slot = Checkpoints::default();
        let mut other = at(&budget, &[1]);
        for position in 1..=200 {
            if budget.make_room(&mut [&mut slot, &mut other], 0, 10 * position, 10) {
                budget.add(&mut slot, 10 * position, copy());
            }
        }
        assert_eq!((slot.len(), other.len()), (MAX_CHECKPOINTS, 1));
        assert!(slot.has(2_000), "the last one is there");
    }

    #[test]
    fn a_prompt_is_kept_up_to_where_its_next_turn_may_differ() {
        let token = |id| TokenFacts { piece: vec![id], is_control: id >= 250, is_end_of_generation: false };
        let vocabulary = Vocabulary::new((0..=255).map(token));
        let check = |prompt: &[Token], expected| assert_eq!(before_reply(prompt, &vocabulary), expected, "{prompt:?}");
        check(&[251, 1, 2, 252, 3, 251, 7, 3, 8, 3], 5);
        // Without control tokens near the end, and with one at the very end, which is decoded.
        check(&[1, 2, 3, 4, 5, 6, 7], 2);
        check(&[1, 2, 3, 4, 5, 6, 7, 252], 3);
        check(&[1, 2], 0);
        check(&[1 << 31; 8], 3);
        let far: Vec<Token> = [252].into_iter().chain((0..40).map(|i| i % 9)).collect();
        check(&far, 36);
    }
}

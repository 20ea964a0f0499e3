//! Chooses the slot for a sequence and the cached KV that it starts from.
//!
//! Pure functions over token lists, which mirror the content of llama.cpp's unified KV cache. The scheduler carries out
//! the decisions. A slot's index is its llama.cpp sequence id.

use std::cmp::Reverse;

use baton_schemas::CacheScope;
use baton_schemas::Token;
use baton_schemas::image::continues;

use super::checkpoints::Checkpoints;

/// A slot and the content of its KV cache.
#[derive(Debug, Clone, Default)]
pub(crate) struct CacheSlot {
    /// Tokens whose KV is in the cache, from position 0.
    pub(crate) kv: Vec<Token>,
    /// The scope that may reuse this KV.
    pub(crate) scope: CacheScope,
    /// Tokens at the front whose cells are shared with the slot that this one was forked from. They are counted there.
    pub(crate) n_shared: usize,
    /// The earlier ends that it can return to, if its model has states.
    pub(crate) checkpoints: Checkpoints,
    /// Its last sequence ended here, where a checkpoint is due. The states are still in the slot, so none was taken yet.
    pub(crate) mark: usize,
    /// How much of its KV is in the store.
    pub(crate) stored: Stored,
    /// The first position whose KV came from other weights, or was computed after such. It stays in the slots: stored or handed
    /// over, it would pass for what the model's own weights compute.
    pub(crate) foreign_from: Option<usize>,
    /// The first position whose KV came through a lossy codec, or was computed after such. The store keeps the mark with it; it is
    /// not handed over.
    pub(crate) lossy_from: Option<usize>,
    /// A sequence is running here.
    pub(crate) busy: bool,
    /// The tokens that the running sequence will prefill; empty if the slot is idle. A new sequence may wait for them.
    pub(crate) target: Vec<Token>,
    /// When the slot was last taken or released, by the scheduler's clock. The smallest is evicted first.
    pub(crate) last_used: u64,
    /// The number of its last sequence's request. Later requests have larger numbers; the choices of one share it.
    pub(crate) request: u64,
    /// When its last sequence started, by the scheduler's clock. Among equal caches, that of the latest request is
    /// chosen, and of its choices the one that started first. So each choice of a repeated request gets the same slot,
    /// and llama.cpp rounds as before.
    pub(crate) started: u64,
}

impl CacheSlot {
    /// Takes note that KV from this position on is not what the model's own weights compute.
    pub(crate) fn mark_foreign(&mut self, from: usize) {
        self.foreign_from = Some(self.foreign_from.map_or(from, |known| known.min(from)));
    }

    /// Takes note that KV from this position on is not exactly what was computed.
    pub(crate) fn mark_lossy(&mut self, from: usize) {
        self.lossy_from = Some(self.lossy_from.map_or(from, |known| known.min(from)));
    }

    /// How many of its first `n` tokens have KV that went through no lossy codec.
    pub(crate) fn n_lossless(&self, n: usize) -> usize {
        self.lossy_from.map_or(n, |from| from.min(n))
    }

    /// How many of its first `n` tokens have exactly the KV that the model's own weights compute.
    pub(crate) fn n_exact(&self, n: usize) -> usize {
        self.foreign_from.map_or(n, |from| from.min(n)).min(self.n_lossless(n))
    }

    /// Drops the marks of positions from `n` on.
    pub(crate) fn unmark(&mut self, n: usize) {
        self.foreign_from.take_if(|from| n <= *from);
        self.lossy_from.take_if(|from| n <= *from);
    }
}

/// How much of an idle slot's KV is in the store, too.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Stored {
    /// Perhaps not all.
    #[default]
    Partly,
    Whole,
    /// It cannot be stored.
    Refused,
}

/// How a new sequence gets its slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Assignment {
    /// It takes this idle slot and keeps the first `n_keep` tokens of its KV.
    Take { slot: usize, n_keep: usize },
    /// It takes the idle slot `slot`, which is cleared, and shares the first `n_keep` tokens of `source`.
    Fork { slot: usize, source: usize, n_keep: usize },
    /// It takes the idle slot `slot`, which is cleared, and gets its first tokens from the store.
    Restore { slot: usize },
    /// It waits and then shares the first `n` tokens, which `source` is computing now.
    WaitFor { source: usize, n: usize },
    /// Every slot is busy.
    NoSlot,
}

impl Assignment {
    /// The first tokens of the prompt that are not computed, if the store has `n_stored`.
    pub(crate) fn n_reused(&self, n_stored: usize) -> usize {
        match self {
            Assignment::Take { n_keep, .. } | Assignment::Fork { n_keep, .. } => *n_keep,
            Assignment::Restore { .. } => n_stored,
            Assignment::WaitFor { .. } | Assignment::NoSlot => 0,
        }
    }
}

/// Takes note that only the first `n` tokens of a slot are left. The cells that it had lent stay, and are counted in the slot
/// that shares most of them.
pub(crate) fn truncate(slots: &mut [CacheSlot], slot: usize, n: usize) {
    let lender = std::mem::take(&mut slots[slot]);
    let n_kept = n.max(lender.n_shared);
    let borrows = |(_, other): &(usize, &CacheSlot)| {
        other.n_shared > n_kept && common_prefix(&other.kv, &lender.kv) >= other.n_shared
    };
    let heir = slots.iter().enumerate().filter(borrows).max_by_key(|(_, other)| other.n_shared).map(|(i, _)| i);
    if let Some(heir) = heir {
        slots[heir].n_shared = n_kept;
    }
    slots[slot] = lender;
    slots[slot].unmark(n);
    let CacheSlot { kv, n_shared, checkpoints, mark, stored, .. } = &mut slots[slot];
    kv.truncate(n);
    *n_shared = n.min(*n_shared);
    checkpoints.truncate(n);
    if *mark > n {
        *mark = 0;
    }
    *stored = Stored::Partly;
}

/// What the caches can really provide: states are those of one position, and windowed caches drop old positions.
pub(crate) struct SlotMemory<'a> {
    /// Maps a slot and the length of a cached prefix to the usable length.
    pub(crate) usable: &'a dyn Fn(usize, usize) -> usize,
    /// Returns true if a slot's KV is coming and can then be shared up to this many tokens. It must come sooner than the
    /// new sequence could compute it from this many cached tokens on.
    pub(crate) is_worth_waiting: &'a dyn Fn(usize, usize, usize) -> bool,
    /// The tokens that the store has.
    pub(crate) n_stored: usize,
    /// Returns true if these come sooner from the store than all but this many cached ones are computed.
    pub(crate) is_worth_restoring: &'a dyn Fn(usize) -> bool,
    /// A slot with a part of them gets only the rest.
    pub(crate) adds_to_slots: bool,
}

/// A new sequence waits for another's prefill only if that saves it at least so many tokens: computing fewer is faster.
pub(crate) const MIN_WAIT_TOKENS: usize = 32;

/// Chooses a slot for a sequence of `tokens`.
pub(crate) fn assign(slots: &[CacheSlot], tokens: &[Token], scope: CacheScope, memory: &SlotMemory<'_>) -> Assignment {
    // The last token is always decoded, since its logits start the output.
    let wanted = &tokens[..tokens.len().saturating_sub(1)];
    let Some(oldest_idle) =
        slots.iter().enumerate().filter(|(_, s)| !s.busy).min_by_key(|(_, s)| (!s.kv.is_empty(), s.last_used))
    else {
        return Assignment::NoSlot;
    };

    let same_scope = || slots.iter().enumerate().filter(|(_, s)| s.scope == scope);
    let best = same_scope()
        .map(|(i, s)| (i, (memory.usable)(i, common_prefix(&s.kv, wanted))))
        .max_by_key(|&(i, n)| (n, !slots[i].busy, slots[i].request, Reverse(slots[i].started)))
        .filter(|&(_, n)| n > 0);
    let n_best = best.map_or(0, |(_, n)| n);
    let restores = memory.n_stored > n_best && (memory.is_worth_restoring)(n_best);
    let n_now = if restores { memory.n_stored } else { n_best };

    let coming = same_scope()
        .filter(|(_, s)| s.busy && s.kv.len() < s.target.len())
        .map(|(i, s)| (i, common_prefix(&s.target, wanted)))
        .filter(|&(i, n)| n >= n_now + MIN_WAIT_TOKENS && (memory.is_worth_waiting)(i, n, n_now))
        .max_by_key(|&(_, n)| n);
    if let Some((source, n)) = coming {
        return Assignment::WaitFor { source, n };
    }

    if restores && (n_best == 0 || !memory.adds_to_slots) {
        // An idle slot with a part of the conversation has nothing else to lose.
        let part = best.map(|(slot, _)| slot).filter(|slot| !slots[*slot].busy && slots[*slot].kv.len() == n_best);
        return Assignment::Restore { slot: part.unwrap_or(oldest_idle.0) };
    }
    match best {
        None => Assignment::Take { slot: oldest_idle.0, n_keep: 0 },
        Some((source, n_keep)) if slots[source].busy => Assignment::Fork { slot: oldest_idle.0, source, n_keep },
        // If an idle slot shares only its beginning, it keeps its own conversation and the new sequence takes another
        // slot. But if it holds the whole prompt, the request is a repetition and takes this slot. llama.cpp's rounding
        // depends on a sequence's cells, and the same seed should give the same text.
        Some((source, n_keep))
            if source != oldest_idle.0
                && !slots[source].kv.starts_with(tokens)
                && n_keep * 2 < slots[source].kv.len() =>
        {
            Assignment::Fork { slot: oldest_idle.0, source, n_keep }
        }
        Some((slot, n_keep)) => Assignment::Take { slot, n_keep },
    }
}

/// The number of tokens that a sequence shares with a conversation of its scope, usable or not.
pub(crate) fn n_common(slots: &[CacheSlot], tokens: &[Token], scope: CacheScope) -> usize {
    let of_scope = slots.iter().filter(|slot| slot.scope == scope);
    of_scope.map(|slot| common_prefix(&slot.kv, tokens).max(common_prefix(&slot.target, tokens))).max().unwrap_or(0)
}

/// The longest prefix of at most `n` tokens that does not end inside an image, since an image is reused as a whole.
pub(crate) fn whole_images(kv: &[Token], n: usize) -> usize {
    let cuts_one = |n: &usize| kv.get(*n).is_some_and(|next| continues(*next));
    (0..=n).rev().find(|n| !cuts_one(n)).unwrap_or(0)
}

/// The idle slot whose KV is evicted first when cells are short.
pub(crate) fn evictable(slots: &[CacheSlot]) -> Option<usize> {
    slots
        .iter()
        .enumerate()
        .filter(|(_, s)| !s.busy && !s.kv.is_empty())
        .min_by_key(|(_, s)| s.last_used)
        .map(|(i, _)| i)
}

/// The number of cells in use. Shared prefixes are counted in one of the slots that share them.
pub(crate) fn cells_in_use(slots: &[CacheSlot]) -> usize {
    slots.iter().map(|s| s.kv.len().saturating_sub(s.n_shared)).sum()
}

/// Length of the longest common prefix.
pub(crate) fn common_prefix(a: &[Token], b: &[Token]) -> usize {
    a.iter().zip(b).take_while(|(x, y)| x == y).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn idle(kv: &[Token], last_used: u64) -> CacheSlot {
        CacheSlot { kv: kv.to_vec(), last_used, ..CacheSlot::default() }
    }

    fn check(slots: &[CacheSlot], tokens: &[Token], expected: Assignment) {
        check_with(slots, tokens, 0, expected);
    }

    fn check_with(slots: &[CacheSlot], tokens: &[Token], n_stored: usize, expected: Assignment) {
        check_adding(slots, tokens, n_stored, false, expected);
    }

    fn check_adding(slots: &[CacheSlot], tokens: &[Token], n_stored: usize, adds_to_slots: bool, expected: Assignment) {
        let memory = SlotMemory {
            usable: &|_, n| n,
            is_worth_waiting: &|_, _, _| true,
            n_stored,
            is_worth_restoring: &|_| true,
            adds_to_slots,
        };
        assert_eq!(assign(slots, tokens, CacheScope::SHARED, &memory), expected, "{slots:?} {tokens:?}");
    }

    #[test]
    fn the_longest_prefix_wins_and_empty_slots_are_taken_before_old_ones() {
        check(&[idle(&[], 5), idle(&[], 1)], &[1, 2], Assignment::Take { slot: 1, n_keep: 0 });
        check(&[idle(&[9, 9], 1), idle(&[], 7)], &[1, 2], Assignment::Take { slot: 1, n_keep: 0 });
        check(&[idle(&[1], 1), idle(&[1, 2, 3], 2)], &[1, 2, 3, 4], Assignment::Take { slot: 1, n_keep: 3 });
        check(&[idle(&[8], 3), idle(&[9], 2)], &[1, 2], Assignment::Take { slot: 1, n_keep: 0 });
    }

    #[test]
    fn the_last_token_is_never_taken_from_the_cache() {
        check(&[idle(&[1, 2, 3], 0)], &[1, 2, 3], Assignment::Take { slot: 0, n_keep: 2 });
        check(&[idle(&[1], 0)], &[1], Assignment::Take { slot: 0, n_keep: 0 });
    }

    #[test]
    fn a_long_conversation_is_forked_from_and_not_cut_short() {
        let long: Vec<Token> = (0..100).collect();
        check(&[idle(&long, 9), idle(&[], 1)], &[0, 1, 2, 77], Assignment::Fork { slot: 1, source: 0, n_keep: 3 });
        // A repetition takes the same slot.
        check(&[idle(&long, 9), idle(&[], 1)], &[0, 1, 2], Assignment::Take { slot: 0, n_keep: 2 });
        // Without another idle slot it is cut: serving is more important than caching.
        check(&[idle(&long, 9)], &[0, 1, 2, 77], Assignment::Take { slot: 0, n_keep: 3 });
    }

    #[test]
    fn a_running_slot_shares_its_prefix() {
        let running = CacheSlot { busy: true, target: vec![1, 2, 3], ..idle(&[1, 2, 3], 4) };
        check(&[running, idle(&[], 0)], &[1, 2, 3, 4], Assignment::Fork { slot: 1, source: 0, n_keep: 3 });
    }

    #[test]
    fn a_sibling_waits_for_the_prefix_that_is_being_computed() {
        let target: Vec<Token> = (0..100).collect();
        let prefilling = CacheSlot { busy: true, target: target.clone(), ..idle(&target[..10], 4) };
        check(&[prefilling.clone(), idle(&[], 0)], &target, Assignment::WaitFor { source: 0, n: 99 });
        // Waiting would save little, so it starts with the cached part.
        check(&[prefilling, idle(&[], 0)], &[0, 1, 2, 50], Assignment::Fork { slot: 1, source: 0, n_keep: 3 });
    }

    #[test]
    fn no_prefix_ends_inside_an_image() {
        let image =
            baton_schemas::image::Image::new(&b"a"[..], "f").placeholders(&baton_schemas::image::ImageShape::plain(3));
        let kv = [&[1, 2][..], &image, &image, &[3]].concat();
        let usable: Vec<usize> = (0..=9).map(|n| whole_images(&kv, n)).collect();
        assert_eq!(usable, [0, 1, 2, 2, 2, 5, 5, 5, 8, 9]);
        // A prefix that ends with the image includes all of it.
        assert_eq!(whole_images(&kv[..5], 5), 5);
    }

    #[test]
    fn caches_are_not_shared_across_scopes() {
        let theirs = CacheSlot { scope: CacheScope(7), ..idle(&[1, 2, 3], 9) };
        check(&[theirs, idle(&[], 1)], &[1, 2, 3, 4], Assignment::Take { slot: 1, n_keep: 0 });
    }

    #[test]
    fn what_conversations_share_is_found_whether_it_can_be_used_or_not() {
        let running = CacheSlot { busy: true, target: vec![1, 2, 3, 4], ..idle(&[1, 2], 4) };
        let theirs = CacheSlot { scope: CacheScope(7), ..idle(&[1, 2, 3, 5, 6], 9) };
        let slots = [running, theirs, idle(&[1, 9], 1)];
        assert_eq!(n_common(&slots, &[1, 2, 3, 5, 6], CacheScope::SHARED), 3);
        assert_eq!(n_common(&slots, &[1, 2, 3, 5, 6], CacheScope(7)), 5);
        assert_eq!(n_common(&slots, &[1, 2], CacheScope(8)), 0);
    }

    #[test]
    fn every_slot_busy_means_no_slot() {
        let busy = CacheSlot { busy: true, ..CacheSlot::default() };
        check(&[busy.clone(), busy], &[1, 2], Assignment::NoSlot);
    }

    #[test]
    fn prefixes_that_cannot_be_reused_do_not_count() {
        let slots = [idle(&[1, 2, 3], 0)];
        let memory = SlotMemory {
            usable: &|_, _| 0,
            is_worth_waiting: &|_, _, _| false,
            n_stored: 0,
            is_worth_restoring: &|_| true,
            adds_to_slots: true,
        };
        let assigned = assign(&slots, &[1, 2, 3, 4], CacheScope::SHARED, &memory);
        assert_eq!(assigned, Assignment::Take { slot: 0, n_keep: 0 });
        // It does not wait for them either.
        let target: Vec<Token> = (0..100).collect();
        let prefilling = CacheSlot { busy: true, target: target.clone(), ..idle(&target[..10], 4) };
        let assigned = assign(&[prefilling, idle(&[], 0)], &target, CacheScope::SHARED, &memory);
        assert_eq!(assigned, Assignment::Take { slot: 1, n_keep: 0 });
    }

    #[test]
    fn the_store_gives_what_no_slot_has() {
        let slots = [idle(&[1, 2, 3], 3), idle(&[7], 5), idle(&[1, 2, 9], 9)];
        check_with(&slots, &[1, 2, 3, 4], 2, Assignment::Take { slot: 0, n_keep: 3 });
        // Into the slot that has a part of it.
        check_with(&slots, &[1, 2, 3, 4, 5, 6], 5, Assignment::Restore { slot: 0 });
        check_with(&slots, &[8, 8, 8], 2, Assignment::Restore { slot: 0 });
        check_with(&[idle(&[1, 2, 3, 4], 9), idle(&[7], 5)], &[1, 2, 8, 8], 3, Assignment::Restore { slot: 1 });
        // Where a slot can get the rest, it keeps its part, or shares what another computes on.
        check_adding(&slots, &[1, 2, 3, 4, 5, 6], 5, true, Assignment::Take { slot: 0, n_keep: 3 });
        check_adding(&slots, &[8, 8, 8], 2, true, Assignment::Restore { slot: 0 });
        let running = CacheSlot { busy: true, target: vec![1, 2, 3], ..idle(&[1, 2, 3], 4) };
        let shared = Assignment::Fork { slot: 1, source: 0, n_keep: 3 };
        check_adding(&[running, idle(&[], 0)], &[1, 2, 3, 4, 5, 6], 5, true, shared);
        // What is being computed must save more than the store.
        let target: Vec<Token> = (0..100).collect();
        let prefilling = CacheSlot { busy: true, target: target.clone(), ..idle(&target[..10], 4) };
        check_with(&[prefilling.clone(), idle(&[], 0)], &target, 80, Assignment::Restore { slot: 1 });
        check_with(&[prefilling, idle(&[], 0)], &target, 60, Assignment::WaitFor { source: 0, n: 99 });
    }

    #[test]
    fn cells_that_a_slot_has_lent_are_counted_once_whoever_leaves_first() {
        let source = idle(&[1, 2, 3, 4], 1);
        let fork = CacheSlot { n_shared: 3, ..idle(&[1, 2, 3, 9], 2) };
        let sibling = CacheSlot { n_shared: 2, ..idle(&[1, 2, 8, 8], 3) };
        let of_fork = CacheSlot { n_shared: 4, ..idle(&[1, 2, 3, 9, 9], 4) };
        let all = [source, fork, sibling, of_fork, idle(&[5, 6], 5)];
        // What really is in use: different prefixes, each with one cell.
        let n_real = |slots: &[CacheSlot]| {
            let prefixes = slots.iter().flat_map(|slot| (1..=slot.kv.len()).map(|n| &slot.kv[..n]));
            prefixes.collect::<std::collections::BTreeSet<_>>().len()
        };
        for order in [[0, 1, 2, 3, 4], [3, 1, 0, 2, 4], [1, 0, 3, 2, 4], [2, 0, 1, 3, 4], [0, 3, 2, 1, 4]] {
            for n in [0, 1, 2, 3] {
                let mut slots = all.to_vec();
                for slot in order {
                    assert_eq!(cells_in_use(&slots), n_real(&slots), "{order:?} {n} {slots:?}");
                    truncate(&mut slots, slot, n);
                }
            }
        }
    }

    #[test]
    fn eviction_takes_the_idle_slot_used_longest_ago() {
        let busy = CacheSlot { busy: true, ..idle(&[1], 0) };
        assert_eq!(evictable(&[busy, idle(&[1], 5), idle(&[2], 3), idle(&[], 1)]), Some(2));
        assert_eq!(evictable(&[idle(&[], 1)]), None);
    }
}

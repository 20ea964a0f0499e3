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
    /// Its KV is in the host's memory, see [`super::scheduler`], and has no cells.
    pub(crate) parked: bool,
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

/// How a new sequence gets its slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Assignment {
    /// It takes this idle slot and keeps the first `n_keep` tokens of its KV.
    Take { slot: usize, n_keep: usize },
    /// It takes the idle slot `slot`, which is cleared, and shares the first `n_keep` tokens of `source`.
    Fork { slot: usize, source: usize, n_keep: usize },
    /// It waits and then shares the first `n` tokens, which `source` is computing now.
    WaitFor { source: usize, n: usize },
    /// Every slot is busy.
    NoSlot,
}

impl CacheSlot {
    /// Takes note that only the first `n` tokens are left.
    pub(crate) fn truncate(&mut self, n: usize) {
        self.kv.truncate(n);
        self.n_shared = self.n_shared.min(n);
        self.checkpoints.truncate(n);
        if self.mark > n {
            self.mark = 0;
        }
    }
}

/// What the caches can really provide: states are those of one position, and windowed caches drop old positions.
pub(crate) struct SlotMemory<'a> {
    /// Maps a slot and the length of a cached prefix to the usable length.
    pub(crate) usable: &'a dyn Fn(usize, usize) -> usize,
    /// Returns true if a slot's KV is coming and can then be shared up to this many tokens. It must come sooner than the
    /// new sequence could compute it from this many cached tokens on.
    pub(crate) is_worth_waiting: &'a dyn Fn(usize, usize, usize) -> bool,
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

    let coming = same_scope()
        .filter(|(_, s)| s.busy && s.kv.len() < s.target.len())
        .map(|(i, s)| (i, common_prefix(&s.target, wanted)))
        .filter(|&(i, n)| n >= n_best + MIN_WAIT_TOKENS && (memory.is_worth_waiting)(i, n, n_best))
        .max_by_key(|&(_, n)| n);
    if let Some((source, n)) = coming {
        return Assignment::WaitFor { source, n };
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
        .filter(|(_, s)| !s.busy && !s.parked && !s.kv.is_empty())
        .min_by_key(|(_, s)| s.last_used)
        .map(|(i, _)| i)
}

/// The number of cells in use. Shared prefixes are counted in the slot that they were forked from. If that slot was
/// evicted and its fork was not, the number is too low, so the scheduler also handles llama.cpp's error that no cell is
/// free.
pub(crate) fn cells_in_use(slots: &[CacheSlot]) -> usize {
    slots.iter().filter(|s| !s.parked).map(|s| s.kv.len().saturating_sub(s.n_shared)).sum()
}

/// Returns true if another slot may share cells that are counted in this one. Freeing this one would not free them, and
/// they would be counted nowhere.
pub(crate) fn lends_cells(slots: &[CacheSlot], slot: usize) -> bool {
    let lender = &slots[slot];
    let borrows = |other: &CacheSlot| {
        !other.parked && other.n_shared > lender.n_shared && common_prefix(&other.kv, &lender.kv) >= other.n_shared
    };
    slots.iter().enumerate().any(|(i, other)| i != slot && borrows(other))
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
        let memory = SlotMemory { usable: &|_, n| n, is_worth_waiting: &|_, _, _| true };
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
        let image = baton_schemas::image::Image::new(&b"a"[..], "f").placeholders(3);
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
        let memory = SlotMemory { usable: &|_, _| 0, is_worth_waiting: &|_, _, _| false };
        let assigned = assign(&slots, &[1, 2, 3, 4], CacheScope::SHARED, &memory);
        assert_eq!(assigned, Assignment::Take { slot: 0, n_keep: 0 });
        // It does not wait for them either.
        let target: Vec<Token> = (0..100).collect();
        let prefilling = CacheSlot { busy: true, target: target.clone(), ..idle(&target[..10], 4) };
        let assigned = assign(&[prefilling, idle(&[], 0)], &target, CacheScope::SHARED, &memory);
        assert_eq!(assigned, Assignment::Take { slot: 1, n_keep: 0 });
    }

    #[test]
    fn a_parked_conversation_has_no_cells_and_its_prefix_still_counts() {
        let parked = CacheSlot { parked: true, ..idle(&[1, 2, 3], 3) };
        let slots = [parked, idle(&[7], 5)];
        assert_eq!((cells_in_use(&slots), evictable(&slots)), (1, Some(1)));
        check(&slots, &[1, 2, 3, 4], Assignment::Take { slot: 0, n_keep: 3 });
    }

    #[test]
    fn a_slot_lends_cells_while_a_fork_of_it_has_them() {
        let source = idle(&[1, 2, 3, 4], 1);
        let fork = CacheSlot { n_shared: 3, ..idle(&[1, 2, 3, 9], 2) };
        let sibling = CacheSlot { n_shared: 3, ..idle(&[1, 2, 3, 8], 3) };
        let of_fork = CacheSlot { n_shared: 4, ..idle(&[1, 2, 3, 9, 9], 4) };
        let other = idle(&[5, 6], 5);
        let lending = |slots: &[CacheSlot]| (0..slots.len()).filter(|&i| lends_cells(slots, i)).collect::<Vec<_>>();
        assert_eq!(lending(&[source.clone(), fork.clone(), sibling.clone(), other.clone()]), [0]);
        assert_eq!(lending(&[source.clone(), fork.clone(), sibling, of_fork, other]), [0, 1]);
        let parked = CacheSlot { parked: true, n_shared: 0, ..fork };
        assert_eq!(lending(&[source, parked]), Vec::<usize>::new());
    }

    #[test]
    fn eviction_takes_the_idle_slot_used_longest_ago() {
        let busy = CacheSlot { busy: true, ..idle(&[1], 0) };
        assert_eq!(evictable(&[busy, idle(&[1], 5), idle(&[2], 3), idle(&[], 1)]), Some(2));
        assert_eq!(evictable(&[idle(&[], 1)]), None);
    }
}

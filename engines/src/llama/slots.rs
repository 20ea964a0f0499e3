//! Which slot a sequence takes, and whose KV it starts from.
//!
//! Pure bookkeeping over token lists: it mirrors what llama.cpp's unified KV cache holds and decides; the scheduler
//! carries the decisions out. A slot's index is its llama.cpp sequence id.

use std::cmp::Reverse;

use baton_schemas::CacheScope;
use baton_schemas::Token;
use baton_schemas::image::continues;

/// What one sequence id of the KV cache holds.
#[derive(Debug, Clone, Default)]
pub(super) struct Slot {
    /// Tokens whose KV is in the cache, from position 0.
    pub(super) kv: Vec<Token>,
    /// Whose they are.
    pub(super) scope: CacheScope,
    /// Tokens at the front whose cells are shared with a sibling forked from the same prefix; counted once there.
    pub(super) n_shared: usize,
    /// A sequence is running here.
    pub(super) busy: bool,
    /// Tokens the running sequence's prefill will reach; empty if idle. What a newcomer may wait for.
    pub(super) target: Vec<Token>,
    /// When this slot was last given or released; the smallest is evicted first.
    pub(super) last_used: u64,
    /// Its last sequence's request: later ones are larger, and the choices of one have the same.
    pub(super) request: u64,
    /// When its last sequence started. Among equal caches the latest request's wins, and of its choices the one that
    /// started first: a repeated request goes where it was, choice by choice, and llama.cpp rounds as it did.
    pub(super) started: u64,
}

/// How a newcomer gets its slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Assignment {
    /// Take this idle slot and keep the first `n_keep` tokens of its KV.
    Take { slot: usize, n_keep: usize },
    /// Clear idle slot `slot` and share the first `n_keep` tokens of slot `source`, which keeps its own.
    Fork { slot: usize, source: usize, n_keep: usize },
    /// Another slot is computing this very prefix now: wait and share it, rather than compute it twice.
    WaitFor { source: usize },
    /// Every slot is busy.
    NoSlot,
}

/// What the memory can really give: recurrent state cannot be cut, and a sliding window forgets.
pub(super) struct SlotMemory<'a> {
    /// Maps (slot, length of a cached prefix) to the usable length.
    pub(super) usable: &'a dyn Fn(usize, usize) -> usize,
    /// Whether (slot) is getting on with its prefill, and will then be able to lend that many tokens.
    pub(super) will_have: &'a dyn Fn(usize, usize) -> bool,
}

/// A newcomer waits for a sibling's prefill only if that saves at least this many tokens; shorter prefixes are
/// recomputed sooner than the sibling reaches them.
const MIN_WAIT_TOKENS: usize = 32;

/// Chooses a slot for a sequence that will compute `tokens` but the last, which is always decoded afresh.
pub(super) fn assign(slots: &[Slot], tokens: &[Token], scope: CacheScope, memory: &SlotMemory<'_>) -> Assignment {
    // The last token is decoded, never reused: its logits start the output.
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
        .filter(|&(i, n)| (memory.will_have)(i, n))
        .max_by_key(|&(_, n)| n)
        .filter(|&(_, n)| n >= n_best + MIN_WAIT_TOKENS);
    if let Some((source, _)) = coming {
        return Assignment::WaitFor { source };
    }

    match best {
        None => Assignment::Take { slot: oldest_idle.0, n_keep: 0 },
        Some((source, n_keep)) if slots[source].busy => Assignment::Fork { slot: oldest_idle.0, source, n_keep },
        // An idle slot that shares only its beginning keeps its own conversation if a slot is free for the newcomer.
        // A prompt that is there as a whole is a repetition: it goes where it was, because llama.cpp's rounding
        // depends on which cells a sequence has, and the same seed should say the same.
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

/// The longest prefix of at most `n` tokens that ends inside no image: of one, all or nothing is reused.
pub(super) fn whole_images(kv: &[Token], n: usize) -> usize {
    let cuts_one = |n: &usize| kv.get(*n).is_some_and(|next| continues(*next));
    (0..=n).rev().find(|n| !cuts_one(n)).unwrap_or(0)
}

/// The idle slot whose KV is given up first, when cells are short.
pub(super) fn evictable(slots: &[Slot]) -> Option<usize> {
    slots
        .iter()
        .enumerate()
        .filter(|(_, s)| !s.busy && !s.kv.is_empty())
        .min_by_key(|(_, s)| s.last_used)
        .map(|(i, _)| i)
}

/// Cells in use. Shared prefixes are counted with the slot they were forked from, so this is too low once that slot
/// was evicted while its fork lives on; the scheduler therefore treats llama.cpp's own "no cell" as the last word.
pub(super) fn cells_in_use(slots: &[Slot]) -> usize {
    slots.iter().map(|s| s.kv.len().saturating_sub(s.n_shared)).sum()
}

/// Length of the longest common prefix.
pub(super) fn common_prefix(a: &[Token], b: &[Token]) -> usize {
    a.iter().zip(b).take_while(|(x, y)| x == y).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn idle(kv: &[Token], last_used: u64) -> Slot {
        Slot { kv: kv.to_vec(), last_used, ..Slot::default() }
    }

    fn check(slots: &[Slot], tokens: &[Token], expected: Assignment) {
        let memory = SlotMemory { usable: &|_, n| n, will_have: &|_, _| true };
        assert_eq!(assign(slots, tokens, CacheScope::SHARED, &memory), expected, "{slots:?} {tokens:?}");
    }

    #[test]
    fn the_longest_prefix_wins_and_an_empty_slot_comes_before_the_oldest() {
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
        // A repetition goes where it was.
        check(&[idle(&long, 9), idle(&[], 1)], &[0, 1, 2], Assignment::Take { slot: 0, n_keep: 2 });
        // With no other idle slot it is cut: serving beats remembering.
        check(&[idle(&long, 9)], &[0, 1, 2, 77], Assignment::Take { slot: 0, n_keep: 3 });
    }

    #[test]
    fn a_running_slot_lends_its_prefix() {
        let running = Slot { busy: true, target: vec![1, 2, 3], ..idle(&[1, 2, 3], 4) };
        check(&[running, idle(&[], 0)], &[1, 2, 3, 4], Assignment::Fork { slot: 1, source: 0, n_keep: 3 });
    }

    #[test]
    fn a_sibling_waits_for_the_prefix_that_is_being_computed() {
        let target: Vec<Token> = (0..100).collect();
        let prefilling = Slot { busy: true, target: target.clone(), ..idle(&target[..10], 4) };
        check(&[prefilling.clone(), idle(&[], 0)], &target, Assignment::WaitFor { source: 0 });
        // Little would be saved: go ahead with what is there.
        check(&[prefilling, idle(&[], 0)], &[0, 1, 2, 50], Assignment::Fork { slot: 1, source: 0, n_keep: 3 });
    }

    #[test]
    fn no_prefix_ends_inside_an_image() {
        let image = baton_schemas::image::Image::new(&b"a"[..], "f").placeholders(3);
        let kv = [&[1, 2][..], &image, &image, &[3]].concat();
        let usable: Vec<usize> = (0..=9).map(|n| whole_images(&kv, n)).collect();
        assert_eq!(usable, [0, 1, 2, 2, 2, 5, 5, 5, 8, 9]);
        // What ends with the image has all of it.
        assert_eq!(whole_images(&kv[..5], 5), 5);
    }

    #[test]
    fn nothing_crosses_scopes() {
        let theirs = Slot { scope: CacheScope(7), ..idle(&[1, 2, 3], 9) };
        check(&[theirs, idle(&[], 1)], &[1, 2, 3, 4], Assignment::Take { slot: 1, n_keep: 0 });
    }

    #[test]
    fn every_slot_busy_means_no_slot() {
        let busy = Slot { busy: true, ..Slot::default() };
        check(&[busy.clone(), busy], &[1, 2], Assignment::NoSlot);
    }

    #[test]
    fn what_memory_cannot_give_back_is_not_counted() {
        let slots = [idle(&[1, 2, 3], 0)];
        let memory = SlotMemory { usable: &|_, _| 0, will_have: &|_, _| false };
        let assigned = assign(&slots, &[1, 2, 3, 4], CacheScope::SHARED, &memory);
        assert_eq!(assigned, Assignment::Take { slot: 0, n_keep: 0 });
        // Nor is it waited for.
        let target: Vec<Token> = (0..100).collect();
        let prefilling = Slot { busy: true, target: target.clone(), ..idle(&target[..10], 4) };
        let assigned = assign(&[prefilling, idle(&[], 0)], &target, CacheScope::SHARED, &memory);
        assert_eq!(assigned, Assignment::Take { slot: 1, n_keep: 0 });
    }

    #[test]
    fn eviction_takes_the_idle_slot_used_longest_ago() {
        let busy = Slot { busy: true, ..idle(&[1], 0) };
        assert_eq!(evictable(&[busy, idle(&[1], 5), idle(&[2], 3), idle(&[], 1)]), Some(2));
        assert_eq!(evictable(&[idle(&[], 1)]), None);
    }
}

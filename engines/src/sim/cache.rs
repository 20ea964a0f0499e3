//! The prefix cache of a simulated engine, and its store.

use std::collections::VecDeque;

use baton_schemas::CacheScope;
use baton_schemas::Token;
use baton_schemas::held::{HeldPiece, HeldPieces, KvTier, PieceUse};
use baton_schemas::store_report::StoreReport;

/// A tier of a simulated store.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SimTier {
    /// Tokens whose KV it holds at most. 0: there is no such tier.
    pub max_tokens: usize,
    /// Tokens per second that come back. A rate that is not positive takes no time.
    pub restore_tps: f64,
}

/// The last sequences, as many as there are slots, and those that went from there into the store. What leaves a slot goes to memory,
/// and what is new of it to disk.
#[derive(Debug, Clone)]
pub(super) struct PrefixCache {
    /// For each of [`KvTier::ALL`], the oldest first.
    tiers: [VecDeque<CachedSequence>; 3],
    n_slots: usize,
    store: [SimTier; 2],
    /// Rises with each change.
    version: u64,
    /// Tokens that were written to disk.
    n_written: usize,
}

/// A copy of all that a simulated engine holds.
#[derive(Debug, Clone)]
pub struct SimMemory(PrefixCache);

#[derive(Debug, Clone)]
struct CachedSequence {
    scope: CacheScope,
    tokens: Vec<Token>,
}

/// The most sequences in slots: a look-up compares with each of them.
const MAX_ENTRIES: usize = 64;

impl PrefixCache {
    /// A cache of `n_slots` sequences, with a store in memory and on disk.
    pub(super) fn new(n_slots: usize, store: [SimTier; 2]) -> Self {
        PrefixCache { tiers: Default::default(), n_slots: n_slots.min(MAX_ENTRIES), store, version: 0, n_written: 0 }
    }

    /// For each tier, the number of tokens that `wanted` has in common with a sequence of its scope there.
    pub(super) fn common(&self, scope: CacheScope, wanted: &[Token]) -> [usize; 3] {
        self.tiers.each_ref().map(|tier| n_common(tier, scope, wanted))
    }

    pub(super) fn memory(&self) -> SimMemory {
        SimMemory(self.clone())
    }

    /// Holds again what it held then.
    pub(super) fn set_memory(&mut self, memory: &SimMemory) {
        *self = PrefixCache { version: self.version + 1, ..memory.0.clone() };
    }

    /// Removes the sequences of some scopes.
    pub(super) fn forget(&mut self, scopes: &[CacheScope]) {
        for tier in &mut self.tiers {
            tier.retain(|held| !scopes.contains(&held.scope));
        }
        self.version += 1;
    }

    /// Adds a sequence. It replaces those that it continues, or else the oldest, which leave their slots.
    pub(super) fn insert(&mut self, scope: CacheScope, tokens: Vec<Token>) {
        self.version += 1;
        let [slots, memory, disk] = &mut self.tiers;
        let sequence = CachedSequence { scope, tokens };
        [&mut *slots, &mut *memory].into_iter().for_each(|tier| tier.retain(|held| !sequence.continues(held)));
        slots.push_back(sequence);
        while slots.len() > self.n_slots
            && let Some(left) = slots.pop_front()
        {
            let n_on_disk = n_common(disk, left.scope, &left.tokens);
            if self.store[1].max_tokens > 0 && n_on_disk < left.tokens.len() {
                self.n_written += left.tokens.len() - n_on_disk;
                disk.retain(|held| !left.continues(held));
                disk.push_back(left.clone());
            }
            memory.push_back(left);
        }
        for (tier, SimTier { max_tokens, .. }) in [memory, disk].into_iter().zip(self.store) {
            while n_tokens(tier) > max_tokens {
                tier.pop_front();
            }
        }
    }

    /// Its store, if it has one whose tokens have so many bytes.
    pub(super) fn report(&self, kv_bytes_per_token: u32) -> Option<StoreReport> {
        let bytes = |n_tokens: usize| n_tokens as u64 * u64::from(kv_bytes_per_token);
        let [_, memory, disk] = &self.tiers;
        self.store.iter().any(|tier| tier.max_tokens > 0).then(|| StoreReport {
            blocks: (memory.len() + disk.len()) as u64,
            memory_bytes: bytes(n_tokens(memory)),
            disk_bytes: bytes(n_tokens(disk)),
            written_bytes: bytes(self.n_written),
            ..StoreReport::default()
        })
    }

    /// Changes with what it holds. Never 0.
    pub(super) fn version(&self) -> u64 {
        self.version + 1
    }

    /// What it holds.
    pub(super) fn held(&self) -> HeldPieces {
        let piece = |tier: KvTier, held: &CachedSequence| HeldPiece {
            scope: held.scope,
            before: None,
            from: 0,
            tokens: held.tokens.as_slice().into(),
            tier,
            use_at: PieceUse::Anywhere,
            is_exact: true,
        };
        let tiers = KvTier::ALL.into_iter().zip(&self.tiers);
        let pieces = tiers.flat_map(|(tier, held)| held.iter().map(move |sequence| piece(tier, sequence)));
        HeldPieces { version: self.version(), pieces: pieces.collect() }
    }
}

impl CachedSequence {
    fn continues(&self, other: &CachedSequence) -> bool {
        self.scope == other.scope && self.tokens.starts_with(&other.tokens)
    }
}

/// The most tokens that `wanted` has in common with one of the sequences of its scope.
fn n_common(sequences: &VecDeque<CachedSequence>, scope: CacheScope, wanted: &[Token]) -> usize {
    let common = |tokens: &[Token]| tokens.iter().zip(wanted).take_while(|(a, b)| a == b).count();
    let of_scope = sequences.iter().filter(|sequence| sequence.scope == scope);
    of_scope.map(|sequence| common(&sequence.tokens)).max().unwrap_or(0)
}

fn n_tokens(sequences: &VecDeque<CachedSequence>) -> usize {
    sequences.iter().map(|sequence| sequence.tokens.len()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_leaves_a_slot_is_in_memory_and_what_is_new_of_it_is_written() {
        let tier = |max_tokens: usize| SimTier { max_tokens, restore_tps: 1.0 };
        let mut cache = PrefixCache::new(1, [tier(150), tier(usize::MAX)]);
        let turn = |first: Token, n: Token| (0..80).chain(first..first + n).collect::<Vec<Token>>();
        let scope = CacheScope(7);
        cache.insert(scope, turn(1_000, 20));
        cache.insert(scope, turn(2_000, 20));
        assert_eq!((cache.common(scope, &turn(1_000, 30)), cache.n_written), ([80, 100, 100], 100));
        cache.insert(scope, turn(1_000, 30));
        assert_eq!(cache.n_written, 120, "of the second conversation its own tokens");
        cache.insert(scope, turn(3_000, 20));
        assert_eq!(cache.n_written, 130, "of the first conversation those that came since");
        assert_eq!(cache.common(scope, &turn(2_000, 20)), [80, 80, 100], "memory has room for one");
        let report = cache.report(2).unwrap();
        assert_eq!((report.memory_bytes, report.disk_bytes, report.written_bytes), (220, 420, 260));
        assert_eq!(PrefixCache::new(1, Default::default()).report(2), None);
    }
}

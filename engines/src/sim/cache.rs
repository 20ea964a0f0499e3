//! The prefix cache of a simulated engine, and its store.

use std::collections::VecDeque;

use baton_schemas::CacheScope;
use baton_schemas::Token;
use baton_schemas::held::{HeldPiece, HeldPieces, KvTier, PieceUse};

/// A tier of a simulated store.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SimTier {
    /// Tokens whose KV it holds at most. 0: there is no such tier.
    pub max_tokens: usize,
    /// Tokens per second that come back. A rate that is not positive takes no time.
    pub restore_tps: f64,
}

/// The last sequences, as many as there are slots, and those that went from there into the store.
pub(super) struct PrefixCache {
    /// For each of [`KvTier::ALL`], the oldest first.
    tiers: [VecDeque<CachedSequence>; 3],
    n_slots: usize,
    store: [SimTier; 2],
    /// Rises with each change.
    version: u64,
}

struct CachedSequence {
    scope: CacheScope,
    tokens: Vec<Token>,
}

/// The most sequences in slots: a look-up compares with each of them.
const MAX_ENTRIES: usize = 64;

impl PrefixCache {
    /// A cache of `n_slots` sequences, with a store in memory and on disk.
    pub(super) fn new(n_slots: usize, store: [SimTier; 2]) -> Self {
        PrefixCache { tiers: Default::default(), n_slots: n_slots.min(MAX_ENTRIES), store, version: 0 }
    }

    /// For each tier, the number of tokens that `wanted` has in common with a sequence of its scope there.
    pub(super) fn common(&self, scope: CacheScope, wanted: &[Token]) -> [usize; 3] {
        let common = |tokens: &[Token]| tokens.iter().zip(wanted).take_while(|(a, b)| a == b).count();
        [0, 1, 2].map(|tier| {
            let of_scope = self.tiers[tier].iter().filter(|sequence| sequence.scope == scope);
            of_scope.map(|sequence| common(&sequence.tokens)).max().unwrap_or(0)
        })
    }

    /// Removes the sequences of some scopes.
    pub(super) fn forget(&mut self, scopes: &[CacheScope]) {
        for tier in &mut self.tiers {
            tier.retain(|held| !scopes.contains(&held.scope));
        }
        self.version += 1;
    }

    /// Adds a sequence. It replaces those that it continues, or else the oldest, which go down a tier.
    pub(super) fn insert(&mut self, scope: CacheScope, tokens: Vec<Token>) {
        self.version += 1;
        for tier in &mut self.tiers {
            tier.retain(|held| held.scope != scope || !tokens.starts_with(&held.tokens));
        }
        self.tiers[0].push_back(CachedSequence { scope, tokens });
        let [slots, memory, disk] = &mut self.tiers;
        while slots.len() > self.n_slots {
            memory.extend(slots.pop_front());
        }
        while n_tokens(memory) > self.store[0].max_tokens {
            disk.extend(memory.pop_front());
        }
        while n_tokens(disk) > self.store[1].max_tokens {
            disk.pop_front();
        }
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

fn n_tokens(sequences: &VecDeque<CachedSequence>) -> usize {
    sequences.iter().map(|sequence| sequence.tokens.len()).sum()
}

//! The prefix cache of a simulated engine.

use std::collections::VecDeque;

use baton_schemas::CacheScope;
use baton_schemas::Token;

/// The last sequences, as many as there are slots.
pub(super) struct PrefixCache {
    entries: VecDeque<(CacheScope, Vec<Token>)>,
    capacity: usize,
}

/// The most sequences: a look-up compares with each of them.
const MAX_ENTRIES: usize = 64;

impl PrefixCache {
    pub(super) fn new(n_slots: usize) -> Self {
        PrefixCache { entries: VecDeque::new(), capacity: n_slots.min(MAX_ENTRIES) }
    }

    /// The length of the longest prefix that `wanted` shares with a sequence of the same scope.
    pub(super) fn longest_prefix(&self, scope: CacheScope, wanted: &[Token]) -> usize {
        let same_scope = self.entries.iter().filter(|(s, _)| *s == scope);
        same_scope.map(|(_, t)| t.iter().zip(wanted).take_while(|(a, b)| a == b).count()).max().unwrap_or(0)
    }

    /// Removes the sequences of some scopes.
    pub(super) fn forget(&mut self, scopes: &[CacheScope]) {
        self.entries.retain(|(scope, _)| !scopes.contains(scope));
    }

    /// Adds a sequence. It replaces those that it continues, or else the oldest.
    pub(super) fn insert(&mut self, scope: CacheScope, tokens: Vec<Token>) {
        self.entries.retain(|(s, t)| *s != scope || !tokens.starts_with(t));
        self.entries.push_back((scope, tokens));
        while self.entries.len() > self.capacity {
            self.entries.pop_front();
        }
    }
}

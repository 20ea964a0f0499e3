//! Remembers which prompts a node has seen, so that a conversation returns to the node that holds its KV.
//!
//! This is an estimate, because the node may have evicted a remembered prefix. It affects only the choice of the node; the
//! node itself decides what it computes.

use std::collections::{HashMap, VecDeque};

use baton_schemas::CacheScope;
use baton_schemas::Token;

/// Tokens of a block. Short, because only the end of a remembered sequence is known to the token; on a slow machine each
/// token costs milliseconds, which can change a short request's route. A block costs one hash.
const BLOCK: usize = 8;

/// The number of remembered blocks of a node: half a million tokens.
const MAX_BLOCKS: usize = 65_536;

/// Prefixes that a node probably holds.
#[derive(Debug, Default)]
pub(super) struct Prefixes {
    /// Hashes of remembered sequences, and of their prefixes of whole blocks, with the time of their last use.
    seen: HashMap<u64, u64>,
    order: VecDeque<(u64, u64)>,
    clock: u64,
}

impl Prefixes {
    /// Remembers a sequence.
    pub(super) fn remember(&mut self, scope: CacheScope, tokens: &[Token]) {
        self.clock += 1;
        for hash in prefix_hashes(scope, tokens) {
            self.seen.insert(hash, self.clock);
            self.order.push_back((hash, self.clock));
        }
        // A prefix that was used again has a second, newer entry in the queue.
        while self.seen.len() > MAX_BLOCKS || self.order.len() > 2 * MAX_BLOCKS {
            let Some((hash, age)) = self.order.pop_front() else { break };
            if self.seen.get(&hash) == Some(&age) {
                self.seen.remove(&hash);
            }
        }
    }

    /// Tokens at the front of a prompt that the node probably holds.
    pub(super) fn cached(&self, scope: CacheScope, tokens: &[Token]) -> usize {
        let n_blocks = prefix_hashes(scope, tokens).take_while(|hash| self.seen.contains_key(hash)).count();
        (n_blocks * BLOCK).min(tokens.len())
    }

    /// Forgets everything: the node's process has ended.
    pub(super) fn clear(&mut self) {
        self.seen.clear();
        self.order.clear();
    }
}

/// Hashes of the prefixes of 1, 2, 3, … blocks, and of all tokens.
fn prefix_hashes(scope: CacheScope, tokens: &[Token]) -> impl Iterator<Item = u64> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&scope.0.to_le_bytes());
    tokens.chunks(BLOCK).map(move |block| {
        for token in block {
            hasher.update(&token.to_le_bytes());
        }
        let hash = hasher.finalize();
        u64::from_le_bytes(hash.as_bytes()[..8].try_into().unwrap_or_default())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_blocks_of_a_known_prefix_count() {
        let mut prefixes = Prefixes::default();
        let tokens: Vec<Token> = (0..200).collect();
        assert_eq!(prefixes.cached(CacheScope::SHARED, &tokens), 0);
        prefixes.remember(CacheScope::SHARED, &tokens[..100]);
        assert_eq!(prefixes.cached(CacheScope::SHARED, &tokens), 96);
        assert_eq!(prefixes.cached(CacheScope::SHARED, &tokens[..70]), 64);
        assert_eq!(
            prefixes.cached(CacheScope::SHARED, &tokens[..100]),
            100,
            "the sequence itself is known to the token"
        );
        assert_eq!(prefixes.cached(CacheScope(1), &tokens), 0, "prefixes are not shared between callers");
        let mut other = tokens.clone();
        other[40] = 999;
        assert_eq!(prefixes.cached(CacheScope::SHARED, &other), 40);
        prefixes.clear();
        assert_eq!(prefixes.cached(CacheScope::SHARED, &tokens), 0);
    }

    #[test]
    fn memory_is_bounded_and_the_oldest_goes_first() {
        let mut prefixes = Prefixes::default();
        let prompt = |i: u32| (0..1_024).map(|t| t + i * 7).collect::<Vec<Token>>();
        for i in 0..600 {
            prefixes.remember(CacheScope::SHARED, &prompt(i));
            prefixes.remember(CacheScope::SHARED, &prompt(0));
        }
        assert!(prefixes.seen.len() <= MAX_BLOCKS && prefixes.order.len() <= 2 * MAX_BLOCKS);
        assert_eq!(prefixes.cached(CacheScope::SHARED, &prompt(0)), 1_024, "what is used again stays");
        assert_eq!(prefixes.cached(CacheScope::SHARED, &prompt(1)), 0);
    }
}

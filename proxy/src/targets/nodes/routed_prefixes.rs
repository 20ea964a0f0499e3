//! Hashes of the beginnings of prompts that were sent somewhere, so that a conversation is found again.

use std::collections::{HashMap, VecDeque};

use tokio::time::Instant;

/// The number of remembered blocks.
const MAX_BLOCKS: usize = 65_536;

/// Hashes of sequences that were sent to one place, and of their prefixes of whole blocks, with their last use. The oldest are
/// forgotten first.
#[derive(Debug, Default)]
pub(in crate::targets) struct RoutedPrefixes {
    routed: HashMap<u64, RoutedPrefix>,
    order: VecDeque<(u64, u64)>,
    /// Rises by one for each sequence, and for each block that was not remembered.
    clock: u64,
}

/// The last use of a prefix.
#[derive(Debug, Clone, Copy)]
pub(in crate::targets) struct RoutedPrefix {
    /// The clock at its last use.
    used: u64,
    pub(in crate::targets) at: Instant,
    /// Its whole blocks, if it has more tokens than these.
    pub(in crate::targets) whole: Option<u64>,
}

impl RoutedPrefixes {
    /// Remembers a sequence: the hashes after each of its whole blocks, and after its last token if that ends none.
    pub(in crate::targets) fn remember(&mut self, blocks: &[u64], end: Option<u64>) {
        self.clock += 1 + blocks.iter().filter(|hash| !self.routed.contains_key(hash)).count() as u64;
        let (used, at) = (self.clock, Instant::now());
        let whole = blocks.iter().map(|hash| (*hash, None));
        for (hash, whole) in whole.chain(end.map(|end| (end, blocks.last().copied()))) {
            self.routed.insert(hash, RoutedPrefix { used, at, whole });
            self.order.push_back((hash, used));
        }
        // A prefix that was used again has a second, newer entry in the queue.
        while self.routed.len() > MAX_BLOCKS || self.order.len() > 2 * MAX_BLOCKS {
            let Some((hash, used)) = self.order.pop_front() else { break };
            if self.routed.get(&hash).is_some_and(|routed| routed.used == used) {
                self.routed.remove(&hash);
            }
        }
    }

    /// The number of a sequence's first blocks that are remembered.
    pub(in crate::targets) fn n_blocks(&self, blocks: &[u64]) -> usize {
        blocks.iter().take_while(|hash| self.routed.contains_key(hash)).count()
    }

    /// A sequence's first blocks that are remembered, in parts that were last used at the same time: their end, in blocks, and the
    /// blocks that came since.
    pub(in crate::targets) fn runs(&self, blocks: &[u64]) -> Vec<(usize, u64)> {
        let mut runs: Vec<(usize, u64)> = Vec::new();
        let known = blocks.iter().map_while(|hash| self.routed.get(hash));
        for (n_blocks, distance) in (1..).zip(known.map(|routed| self.clock - routed.used)) {
            match runs.last_mut() {
                Some((end, last)) if *last == distance => *end = n_blocks,
                _ => runs.push((n_blocks, distance)),
            }
        }
        runs
    }

    pub(in crate::targets) fn contains(&self, hash: u64) -> bool {
        self.routed.contains_key(&hash)
    }

    /// Forgets all others.
    pub(in crate::targets) fn retain(&mut self, keep: impl Fn(&RoutedPrefix) -> bool) {
        self.routed.retain(|_, routed| keep(routed));
        self.order.retain(|(hash, used)| self.routed.get(hash).is_some_and(|routed| routed.used == *used));
    }

    #[cfg(test)]
    pub(super) fn sizes(&self) -> (usize, usize) {
        (self.routed.len(), self.order.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn memory_is_bounded_and_the_oldest_goes_first() {
        let mut prefixes = RoutedPrefixes::default();
        let prompt = |i: u64| (0..128).map(|block| (i << 32) + block).collect::<Vec<u64>>();
        for i in 0..600 {
            prefixes.remember(&prompt(i), Some(i << 40));
            prefixes.remember(&prompt(0), None);
        }
        let (n_routed, n_order) = prefixes.sizes();
        assert!(n_routed <= MAX_BLOCKS && n_order <= 2 * MAX_BLOCKS);
        assert_eq!(prefixes.n_blocks(&prompt(0)), 128, "what is used again stays");
        assert_eq!(prefixes.n_blocks(&prompt(1)), 0);
    }

    #[tokio::test]
    async fn parts_tell_how_much_came_since_their_last_use() {
        let mut prefixes = RoutedPrefixes::default();
        let (shared, first, second): (Vec<u64>, Vec<u64>, Vec<u64>) =
            ((0..4).collect(), (10..13).collect(), (20..29).collect());
        let of = |own: &[u64]| [&shared[..], own].concat();
        prefixes.remember(&of(&first), None);
        assert_eq!(prefixes.runs(&of(&first)), [(7, 0)]);
        prefixes.remember(&of(&second), None);
        assert_eq!(prefixes.runs(&of(&first)), [(4, 0), (7, 10)], "nine blocks, and the sequence itself");
        assert_eq!(prefixes.runs(&of(&second)), [(13, 0)]);
        assert!(prefixes.runs(&[99, 0]).is_empty());
    }
}

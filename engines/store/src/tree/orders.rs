//! The orders in which blocks lose their memory and get their files, kept with every change: a tree has thousands of blocks,
//! and each new one asks for the next.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::node::{BlockFile, TreeNode};
use super::siblings::BlockId;

#[derive(Debug, Default)]
pub(super) struct Orders {
    /// Blocks in memory that wait for no file, the one that is worth least first; of equal ones the one that begins last, then the
    /// oldest.
    settled: BTreeSet<MemoryRank>,
    /// The same of those that shall have a file.
    waiting: BTreeSet<MemoryRank>,
    /// Blocks that shall have a file, the oldest first.
    unwritten: BTreeSet<BlockId>,
}

type MemoryRank = (u64, Reverse<u32>, BlockId);

impl Orders {
    pub(super) fn add(&mut self, id: BlockId, node: &TreeNode) {
        let waits = node.file == BlockFile::Wanted;
        if node.memory.is_some() {
            if waits { &mut self.waiting } else { &mut self.settled }.insert(rank(id, node));
        }
        if waits {
            self.unwritten.insert(id);
        }
    }

    pub(super) fn remove(&mut self, id: BlockId, node: &TreeNode) {
        self.settled.remove(&rank(id, node));
        self.waiting.remove(&rank(id, node));
        self.unwritten.remove(&id);
    }

    /// The block that is worth least of those that `can_go`; with `keeps_unwritten`, none that shall have a file.
    pub(super) fn cheapest(&self, keeps_unwritten: bool, can_go: impl Fn(BlockId) -> bool) -> Option<BlockId> {
        let first = |ranks: &BTreeSet<MemoryRank>| ranks.iter().find(|(.., id)| can_go(*id)).copied();
        let waiting = if keeps_unwritten { None } else { first(&self.waiting) };
        first(&self.settled).into_iter().chain(waiting).min().map(|(.., id)| id)
    }

    pub(super) fn unwritten(&self) -> impl Iterator<Item = BlockId> {
        self.unwritten.iter().copied()
    }
}

/// The bits of a number that is not negative are in its order.
fn rank(id: BlockId, node: &TreeNode) -> MemoryRank {
    (node.worth.max(0.0).to_bits(), Reverse(node.p0), id)
}

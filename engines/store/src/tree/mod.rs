//! The store's content: blocks under a prefix tree of their tokens. No I/O, and no clock: what was used later is worth more.
//!
//! A block continues the one before it at its end or, where prompts part within it, earlier. So no token that prompts share is
//! there twice.

mod paths;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use baton_schemas::kv::KvLayout;
use baton_schemas::{CacheScope, Token};

pub(crate) use self::paths::{Path, Reach};
use super::block::{FileName, KvBlock};
use super::greedy_dual::GreedyDual;

/// Names a block of a tree. Never given twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BlockId(u64);

/// A block's file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum BlockFile {
    /// It waits to be written, so it stays in memory while that is not too much.
    Wanted,
    /// It made room for others, or cannot be written. The block gets none until it is used again: writing it at once would
    /// only push out the next one.
    Dropped,
    /// The block, or one before it, went through a lossy codec. In a file of a lossless one it would pass for exact.
    Never,
    Named(FileName),
}

#[derive(Debug)]
pub(crate) struct TreeNode {
    pub(crate) scope: CacheScope,
    parent: Option<BlockId>,
    children: Vec<BlockId>,
    /// The block's first position.
    pub(crate) p0: u32,
    /// The block's tokens.
    pub(crate) tokens: Arc<[Token]>,
    /// The first position of each section's rows.
    pub(crate) starts: Vec<u32>,
    pub(crate) has_state: bool,
    pub(crate) memory: Option<KvBlock>,
    pub(crate) file: BlockFile,
    worth: f64,
}

/// A block to add.
#[derive(Debug)]
pub(crate) struct NewBlock {
    pub(crate) p0: u32,
    pub(crate) tokens: Arc<[Token]>,
    pub(crate) starts: Vec<u32>,
    pub(crate) has_state: bool,
    pub(crate) memory: Option<KvBlock>,
    pub(crate) file: BlockFile,
}

/// The blocks of one model.
pub(crate) struct BlockTree {
    layout: Arc<KvLayout>,
    nodes: HashMap<BlockId, TreeNode>,
    /// The first blocks of each scope's prompts.
    roots: HashMap<CacheScope, Vec<BlockId>>,
    next: u64,
    aging: GreedyDual,
    memory_bytes: usize,
    /// Counts what was added, moved or removed.
    n_changes: u64,
    /// Files that no block has any more.
    orphans: Vec<String>,
    /// Blocks that were used, whose files do not show it yet.
    used: BTreeSet<BlockId>,
}

impl TreeNode {
    pub(crate) fn is_in(&self, reach: Reach) -> bool {
        reach == Reach::All || self.memory.is_some()
    }

    /// Whether what it gives back now went through a lossy codec.
    pub(crate) fn is_lossy(&self) -> bool {
        match (&self.memory, &self.file) {
            (Some(block), _) => block.is_lossy,
            (None, BlockFile::Named(file)) => file.is_lossy,
            (None, BlockFile::Wanted | BlockFile::Dropped | BlockFile::Never) => false,
        }
    }

    /// One past the block's last position.
    pub(crate) fn p1(&self) -> usize {
        self.p0 as usize + self.tokens.len()
    }
}

impl BlockTree {
    pub(crate) fn new(layout: Arc<KvLayout>) -> BlockTree {
        let (nodes, roots) = (HashMap::new(), HashMap::new());
        let (aging, orphans, used) = (GreedyDual::default(), Vec::new(), BTreeSet::new());
        BlockTree { layout, nodes, roots, next: 0, aging, memory_bytes: 0, n_changes: 0, orphans, used }
    }

    pub(crate) fn get(&self, id: BlockId) -> Option<&TreeNode> {
        self.nodes.get(&id)
    }

    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// The bytes of all blocks in memory.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.memory_bytes
    }

    /// Changes with the blocks and where they are.
    pub(crate) fn version(&self) -> u64 {
        self.n_changes
    }

    /// Adds a block of `tokens`, which has everything up to the block's end or further. One that is there gets its file: a folder may
    /// be read only after prompts were added. Returns `None` if blocks before it are missing.
    pub(crate) fn add(&mut self, scope: CacheScope, tokens: &[Token], block: NewBlock) -> Option<BlockId> {
        let p0 = block.p0;
        let parent = match p0 as usize {
            0 => None,
            n_before => {
                let known = self.known(scope, tokens);
                let path = if known.n_tokens == n_before { known } else { self.path(scope, &tokens[..n_before]) };
                let last = path.blocks.last().copied()?;
                let can_go_on = self.branches_anywhere() || self.nodes.get(&last)?.p1() == n_before;
                Some((path.n_tokens == n_before && can_go_on).then_some(last)?)
            }
        };
        let is_same = |node: &TreeNode| {
            let is_same_place = (node.p0, &node.tokens, &node.starts) == (p0, &block.tokens, &block.starts);
            is_same_place && node.has_state == block.has_state
        };
        let siblings = self.siblings(scope, parent).clone();
        let known = siblings.into_iter().find(|id| self.nodes.get(id).is_some_and(is_same));
        if let (Some(id), BlockFile::Named(file)) = (known, &block.file) {
            self.set_file(id, file.clone());
            return Some(id);
        }
        let NewBlock { p0, tokens: its_tokens, starts, has_state, memory, file } = block;
        let follows_lossy = parent.and_then(|id| self.nodes.get(&id)).is_some_and(|node| node.file == BlockFile::Never);
        let file = if follows_lossy && file == BlockFile::Wanted { BlockFile::Never } else { file };
        let id = BlockId(self.next);
        self.next += 1;
        self.n_changes += 1;
        self.memory_bytes += memory.as_ref().map_or(0, KvBlock::n_bytes);
        let (children, worth) = (Vec::new(), 0.0);
        let node = TreeNode { scope, parent, children, p0, tokens: its_tokens, starts, has_state, memory, file, worth };
        self.nodes.insert(id, node);
        self.siblings(scope, parent).push(id);
        self.touch(id);
        Some(id)
    }

    /// Notes that a block was used, and with it those before it, which are worth no less, and get files again.
    pub(crate) fn touch(&mut self, id: BlockId) {
        let mut next = Some(id);
        let mut worth = f64::NEG_INFINITY;
        while let Some(node) = next.and_then(|id| self.nodes.get_mut(&id)) {
            let n_bytes = node.memory.as_ref().map_or(0, KvBlock::n_bytes).max(1);
            // The cost of computing its tokens again, for each byte. A later token attends to more.
            let cost = node.tokens.len() as f64 * (1.0 + f64::from(node.p0) / ATTENTION_EQUALS_WEIGHTS);
            worth = worth.max(self.aging.worth(cost, n_bytes));
            node.worth = worth;
            if node.file == BlockFile::Dropped {
                node.file = BlockFile::Wanted;
            }
            next = node.parent;
        }
    }

    /// Lets the files of a block and of those before it show that they are used now.
    pub(crate) fn show_use(&mut self, id: BlockId) {
        self.used.insert(id);
    }

    /// Takes the blocks whose files shall show that they were used.
    pub(crate) fn take_used(&mut self) -> BTreeSet<BlockId> {
        std::mem::take(&mut self.used)
    }

    /// Takes the files that no block has any more.
    pub(crate) fn take_orphans(&mut self) -> Vec<String> {
        std::mem::take(&mut self.orphans)
    }

    /// The block that shall be written next: the oldest without a file whose block before it has one. Without that one it would
    /// never be found.
    pub(crate) fn next_to_write(&self) -> Option<BlockId> {
        let has_file = |id| matches!(self.nodes.get(&id).map(|node| &node.file), Some(BlockFile::Named(_)));
        let waits = |node: &TreeNode| {
            node.file == BlockFile::Wanted && node.memory.is_some() && node.parent.is_none_or(has_file)
        };
        self.nodes.iter().filter(|(_, node)| waits(node)).map(|(id, _)| *id).min()
    }

    /// Gives a block's rows a place in memory, or takes it away.
    pub(crate) fn set_memory(&mut self, id: BlockId, memory: Option<KvBlock>) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        self.memory_bytes -= node.memory.as_ref().map_or(0, KvBlock::n_bytes);
        self.memory_bytes += memory.as_ref().map_or(0, KvBlock::n_bytes);
        node.memory = memory;
        self.n_changes += 1;
    }

    /// Notes that a block's file was written. If the block is gone meanwhile, nobody needs it.
    pub(crate) fn set_file(&mut self, id: BlockId, file: FileName) {
        match self.nodes.get_mut(&id) {
            Some(node) => node.file = BlockFile::Named(file),
            None => self.orphans.push(file.name),
        }
    }

    /// Notes that a block has no file, and that neither it nor what continues it gets one for now.
    pub(crate) fn drop_file(&mut self, id: BlockId) {
        let mut left = vec![id];
        while let Some(next) = left.pop() {
            let Some(node) = self.nodes.get_mut(&next) else { continue };
            left.extend(&node.children);
            if next == id || node.file == BlockFile::Wanted {
                node.file = BlockFile::Dropped;
            }
        }
    }

    /// Frees the memory of the block that is worth least, but not of `kept`, nor, with `keeps_unwritten`, of one that waits to be
    /// written. One that is nowhere else is dropped, if no other needs it. Returns false if none can be freed.
    pub(crate) fn free_cheapest(&mut self, kept: Option<BlockId>, keeps_unwritten: bool) -> bool {
        let can_go = |node: &TreeNode| {
            node.memory.is_some()
                && match node.file {
                    BlockFile::Named(_) => true,
                    BlockFile::Wanted if keeps_unwritten => false,
                    BlockFile::Wanted | BlockFile::Dropped | BlockFile::Never => node.children.is_empty(),
                }
        };
        let worth = |(id, node): &(&BlockId, &TreeNode)| (node.worth, std::cmp::Reverse(node.p0), **id);
        let cheapest = self.nodes.iter().filter(|(id, node)| can_go(node) && kept != Some(**id)).min_by(|a, b| {
            let ((a, a0, a_id), (b, b0, b_id)) = (worth(a), worth(b));
            a.total_cmp(&b).then(a0.cmp(&b0)).then(a_id.cmp(&b_id))
        });
        let Some((&id, node)) = cheapest else { return false };
        self.aging.dropped(node.worth);
        match node.file {
            BlockFile::Named(_) => self.set_memory(id, None),
            BlockFile::Wanted | BlockFile::Dropped | BlockFile::Never => _ = self.remove(id),
        }
        true
    }

    /// Removes a block and all that continue it. Returns the names of their files.
    pub(crate) fn remove(&mut self, id: BlockId) -> Vec<String> {
        let Some((scope, parent)) = self.nodes.get(&id).map(|node| (node.scope, node.parent)) else {
            return Vec::new();
        };
        self.siblings(scope, parent).retain(|sibling| *sibling != id);
        // Anybody can name scopes on an endpoint without keys.
        if self.roots.get(&scope).is_some_and(Vec::is_empty) {
            self.roots.remove(&scope);
        }
        self.n_changes += 1;
        let mut files = Vec::new();
        let mut left = vec![id];
        while let Some(id) = left.pop() {
            self.used.remove(&id);
            let Some(node) = self.nodes.remove(&id) else { continue };
            self.memory_bytes -= node.memory.as_ref().map_or(0, KvBlock::n_bytes);
            left.extend(node.children);
            if let BlockFile::Named(file) = node.file {
                files.push(file.name);
            }
        }
        files
    }

    /// Removes a block and all that continue it, and leaves their files to be removed.
    pub(crate) fn discard(&mut self, id: BlockId) {
        let files = self.remove(id);
        self.orphans.extend(files);
    }

    /// Takes note that files are gone. What was nowhere else is discarded with all that continues it. Returns the number of
    /// blocks that had one.
    pub(crate) fn lose_files(&mut self, is_gone: impl Fn(&str) -> bool) -> u64 {
        let is_lost = |node: &TreeNode| matches!(&node.file, BlockFile::Named(file) if is_gone(&file.name));
        let lost: Vec<BlockId> = self.nodes.iter().filter(|(_, node)| is_lost(node)).map(|(id, _)| *id).collect();
        for id in &lost {
            match self.nodes.get(id).is_some_and(|node| node.memory.is_some()) {
                true => self.drop_file(*id),
                false => self.discard(*id),
            }
        }
        lost.len() as u64
    }

    /// Discards all blocks of a scope.
    pub(crate) fn remove_scope(&mut self, scope: CacheScope) {
        self.roots.remove(&scope).unwrap_or_default().into_iter().for_each(|id| self.discard(id));
    }

    /// All tokens up to the end of a block.
    pub(crate) fn tokens_to(&self, id: BlockId) -> Vec<Token> {
        let mut parts = Vec::new();
        let (mut next, mut end) = (Some(id), usize::MAX);
        while let Some(node) = next.and_then(|id| self.nodes.get(&id)) {
            parts.push(&node.tokens[..node.tokens.len().min(end - node.p0 as usize)]);
            (next, end) = (node.parent, node.p0 as usize);
        }
        parts.into_iter().rev().flatten().copied().collect()
    }

    /// The files of a block and of those before it, each with its block's first position.
    pub(crate) fn files_to(&self, id: BlockId) -> Vec<(u32, String)> {
        let mut files = Vec::new();
        let mut next = Some(id);
        while let Some(node) = next.and_then(|id| self.nodes.get(&id)) {
            if let BlockFile::Named(file) = &node.file {
                files.push((node.p0, file.name.clone()));
            }
            next = node.parent;
        }
        files
    }

    /// At most `limit` blocks in the `reach`, each after the one that it continues, with the index of that one.
    pub(crate) fn in_order(&self, limit: usize, reach: Reach) -> Vec<(Option<usize>, BlockId)> {
        let mut ordered = Vec::new();
        let mut left: Vec<(Option<usize>, BlockId)> = self.roots.values().flatten().map(|id| (None, *id)).collect();
        while let Some((before, id)) = left.pop().filter(|_| ordered.len() < limit) {
            let Some(node) = self.get(id).filter(|node| node.is_in(reach)) else { continue };
            let index = Some(ordered.len());
            left.extend(node.children.iter().map(|child| (index, *child)));
            ordered.push((before, id));
        }
        ordered
    }

    fn siblings(&mut self, scope: CacheScope, parent: Option<BlockId>) -> &mut Vec<BlockId> {
        match parent.and_then(|id| self.nodes.get_mut(&id)) {
            Some(node) => &mut node.children,
            None => self.roots.entry(scope).or_default(),
        }
    }
}

/// The position at which attention takes about as long as everything else of a token.
const ATTENTION_EQUALS_WEIGHTS: f64 = 16_384.0;

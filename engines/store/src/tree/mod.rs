//! The store's content: blocks under a prefix tree of their tokens. No I/O, and no clock: what was used later is worth more.
//!
//! A block continues the one before it at its end or, where prompts part within it, earlier. So no token that prompts share is
//! there twice.

mod lossless;
mod node;
mod orders;
mod paths;
mod siblings;

use std::collections::{BTreeSet, BinaryHeap, HashMap};
use std::sync::Arc;

use baton_schemas::kv::KvLayout;
use baton_schemas::{CacheScope, Token};

pub(crate) use self::node::{BlockFile, TreeNode};
use self::orders::Orders;
pub use self::paths::WantedKv;
pub(crate) use self::paths::{Path, Reach};
pub(crate) use self::siblings::BlockId;
use self::siblings::Siblings;
use super::block::{FileName, KvBlock, PlaceInPrompt, UsedFile};
use super::worth::GreedyDual;

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
    roots: HashMap<CacheScope, Siblings>,
    next: u64,
    aging: GreedyDual,
    orders: Orders,
    memory_bytes: usize,
    /// Counts what was added, moved or removed.
    n_changes: u64,
    /// Counts what was used.
    n_uses: u64,
    /// Files that no block has any more.
    orphans: Vec<String>,
    /// Blocks that were used, whose files do not show it yet.
    used: BTreeSet<BlockId>,
}

impl BlockTree {
    pub(crate) fn new(layout: Arc<KvLayout>) -> BlockTree {
        let (nodes, roots) = (HashMap::new(), HashMap::new());
        let (aging, orders) = (GreedyDual::default(), Orders::default());
        let (orphans, used) = (Vec::new(), BTreeSet::new());
        BlockTree {
            layout,
            nodes,
            roots,
            next: 0,
            aging,
            orders,
            memory_bytes: 0,
            n_changes: 0,
            n_uses: 0,
            orphans,
            used,
        }
    }

    pub(crate) fn get(&self, id: BlockId) -> Option<&TreeNode> {
        self.nodes.get(&id)
    }

    /// The first blocks of a scope's prompts.
    pub(crate) fn roots_of(&self, scope: CacheScope) -> Vec<BlockId> {
        self.roots.get(&scope).into_iter().flat_map(Siblings::all).collect()
    }

    /// The blocks that continue a block, each with its first position, in their order.
    pub(crate) fn children_of(&self, id: BlockId) -> Vec<(u32, BlockId)> {
        let children = self.nodes.get(&id).into_iter().flat_map(|node| node.children.all());
        children.filter_map(|child| Some((self.nodes.get(&child)?.p0, child))).collect()
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
        let alike: Vec<BlockId> = self.siblings(scope, parent).alike(p0, &block.tokens).collect();
        let known = alike.into_iter().find(|id| self.nodes.get(id).is_some_and(is_same));
        if let (Some(id), BlockFile::Named(file)) = (known, &block.file) {
            self.set_file(id, file.clone());
            return Some(id);
        }
        if let Some(id) = known.filter(|_| block.memory.as_ref().is_some_and(|block| !block.is_lossy))
            && self.nodes.get(&id).is_some_and(TreeNode::is_lossy)
        {
            self.replace_lossy(id, block.memory);
            return Some(id);
        }
        let NewBlock { p0, tokens: its_tokens, starts, has_state, memory, file } = block;
        let file = if self.never_has_file(parent) && file == BlockFile::Wanted { BlockFile::Never } else { file };
        let id = BlockId(self.next);
        self.next += 1;
        self.n_changes += 1;
        self.memory_bytes += memory.as_ref().map_or(0, KvBlock::n_bytes);
        let (children, wants_lossless, worth, used) = (Siblings::default(), false, 0.0, 0);
        self.siblings(scope, parent).add(p0, &its_tokens, id);
        let tokens = its_tokens;
        let node = TreeNode {
            scope,
            parent,
            children,
            p0,
            tokens,
            starts,
            has_state,
            memory,
            file,
            wants_lossless,
            worth,
            used,
        };
        self.orders.add(id, &node);
        self.nodes.insert(id, node);
        self.touch(id);
        Some(id)
    }

    /// Gives a block lossless values in the place of those that went through a lossy codec.
    fn replace_lossy(&mut self, id: BlockId, memory: Option<KvBlock>) {
        self.set_memory(id, memory);
        let parent = self.nodes.get(&id).and_then(|node| node.parent);
        if self.never_has_file(Some(id)) && !self.never_has_file(parent) {
            self.change(id, |node| node.file = BlockFile::Wanted);
        }
        self.touch(id);
    }

    /// Returns true for a block that gets no file, nor what continues it.
    fn never_has_file(&self, id: Option<BlockId>) -> bool {
        id.and_then(|id| self.nodes.get(&id)).is_some_and(|node| node.file == BlockFile::Never)
    }

    /// Notes that a block was used, and with it those before it, which are worth no less, and get files again.
    pub(crate) fn touch(&mut self, id: BlockId) {
        let mut next = Some(id);
        let mut worth = f64::NEG_INFINITY;
        self.n_uses += 1;
        let (aging, layout, n_uses) = (self.aging, Arc::clone(&self.layout), self.n_uses);
        while let Some(id) = next {
            next = self.change(id, |node| {
                worth = worth.max(aging.worth(node.cost(&layout), node.n_bytes(&layout)));
                (node.worth, node.used) = (worth, n_uses);
                if node.file == BlockFile::Dropped {
                    node.file = BlockFile::Wanted;
                }
            });
        }
    }

    /// Changes a block's memory, file or worth, and its place in the orders with it. Returns the block before it, if there is one.
    fn change(&mut self, id: BlockId, change: impl FnOnce(&mut TreeNode)) -> Option<BlockId> {
        let node = self.nodes.get_mut(&id)?;
        self.orders.remove(id, node);
        change(node);
        self.orders.add(id, node);
        node.parent
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
        let can_be = |node: &TreeNode| node.memory.is_some() && node.parent.is_none_or(has_file);
        self.orders.unwritten().find(|id| self.nodes.get(id).is_some_and(can_be))
    }

    /// Gives a block's rows a place in memory, or takes it away.
    pub(crate) fn set_memory(&mut self, id: BlockId, memory: Option<KvBlock>) {
        let n_bytes = |memory: &Option<KvBlock>| memory.as_ref().map_or(0, KvBlock::n_bytes);
        let Some(node) = self.nodes.get(&id) else { return };
        self.memory_bytes = self.memory_bytes - n_bytes(&node.memory) + n_bytes(&memory);
        self.change(id, |node| node.memory = memory);
        self.n_changes += 1;
    }

    /// Notes that a block's file was written. If the block is gone meanwhile, nobody needs it.
    pub(crate) fn set_file(&mut self, id: BlockId, file: FileName) {
        match self.nodes.contains_key(&id) {
            true => _ = self.change(id, |node| node.file = BlockFile::Named(file)),
            false => self.orphans.push(file.name),
        }
    }

    /// Notes that a block has no file, and that neither it nor what continues it gets one for now.
    pub(crate) fn drop_file(&mut self, id: BlockId) {
        let mut left = vec![id];
        while let Some(next) = left.pop() {
            let Some(node) = self.nodes.get(&next) else { continue };
            left.extend(node.children.all());
            if next == id || node.file == BlockFile::Wanted {
                self.change(next, |node| node.file = BlockFile::Dropped);
            }
        }
    }

    /// Frees the memory of the block that is worth least, but not of `kept`, nor, with `keeps_unwritten`, of one that waits to be
    /// written. One that is nowhere else is dropped, if no other needs it. Returns false if none can be freed.
    pub(crate) fn free_cheapest(&mut self, kept: Option<BlockId>, keeps_unwritten: bool) -> bool {
        let can_go = |id: BlockId| {
            let node = self.nodes.get(&id).filter(|_| kept != Some(id));
            node.is_some_and(|node| matches!(node.file, BlockFile::Named(_)) || node.children.is_empty())
        };
        let cheapest = self.orders.cheapest(keeps_unwritten, can_go);
        let Some((id, node)) = cheapest.and_then(|id| Some((id, self.nodes.get(&id)?))) else { return false };
        self.aging.dropped(node.worth);
        match node.file {
            BlockFile::Named(_) => self.set_memory(id, None),
            BlockFile::Wanted | BlockFile::Dropped | BlockFile::Never => _ = self.remove(id),
        }
        true
    }

    /// Removes a block and all that continue it. Returns the names of their files.
    pub(crate) fn remove(&mut self, id: BlockId) -> Vec<String> {
        let Some(node) = self.nodes.get(&id) else { return Vec::new() };
        let (scope, parent, p0, tokens) = (node.scope, node.parent, node.p0, Arc::clone(&node.tokens));
        self.siblings(scope, parent).remove(p0, &tokens, id);
        // Anybody can name scopes on an endpoint without keys.
        if self.roots.get(&scope).is_some_and(Siblings::is_empty) {
            self.roots.remove(&scope);
        }
        self.n_changes += 1;
        let mut files = Vec::new();
        let mut left = vec![id];
        while let Some(id) = left.pop() {
            self.used.remove(&id);
            let Some(node) = self.nodes.remove(&id) else { continue };
            self.orders.remove(id, &node);
            self.memory_bytes -= node.memory.as_ref().map_or(0, KvBlock::n_bytes);
            left.extend(node.children.all());
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

    /// The scopes that have blocks.
    pub(crate) fn scopes(&self) -> Vec<CacheScope> {
        self.roots.keys().copied().collect()
    }

    /// Discards all blocks of a scope.
    pub(crate) fn remove_scope(&mut self, scope: CacheScope) {
        self.roots.remove(&scope).unwrap_or_default().all().for_each(|id| self.discard(id));
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

    /// The place of a block that has no file yet.
    pub(crate) fn place(&self, id: BlockId) -> Option<PlaceInPrompt> {
        let node = self.nodes.get(&id)?;
        Some(PlaceInPrompt { p0: node.p0, cost: node.cost(&self.layout), before: self.files_to(id) })
    }

    /// The files of a block and of those before it, the last one first.
    pub(crate) fn files_to(&self, id: BlockId) -> Vec<UsedFile> {
        let mut files = Vec::new();
        let mut next = Some(id);
        while let Some(node) = next.and_then(|id| self.nodes.get(&id)) {
            if let BlockFile::Named(file) = &node.file {
                files.push(UsedFile { p0: node.p0, name: file.name.clone(), cost: node.cost(&self.layout) });
            }
            next = node.parent;
        }
        files
    }

    /// Takes note in which order blocks were used before, the one that was used longest ago first.
    pub(crate) fn note_order(&mut self, blocks: impl Iterator<Item = BlockId>) {
        for (used, id) in (1..).zip(blocks) {
            if let Some(node) = self.nodes.get_mut(&id) {
                node.used = used;
            }
        }
    }

    /// At most `limit` blocks in the `reach`, those that were used last, each after the one that it continues, with the index of
    /// that one.
    pub(crate) fn in_order(&self, limit: usize, reach: Reach) -> Vec<(Option<usize>, BlockId)> {
        let used = |id: BlockId| self.nodes.get(&id).map_or(0, |node| node.used);
        let mut ordered = Vec::new();
        let roots = self.roots.values().flat_map(Siblings::all);
        let mut left: BinaryHeap<(u64, BlockId, Option<usize>)> = roots.map(|id| (used(id), id, None)).collect();
        while let Some((_, id, before)) = left.pop().filter(|_| ordered.len() < limit) {
            let Some(node) = self.get(id).filter(|node| node.is_in(reach)) else { continue };
            let index = Some(ordered.len());
            left.extend(node.children.all().map(|child| (used(child), child, index)));
            ordered.push((before, id));
        }
        ordered
    }

    fn siblings(&mut self, scope: CacheScope, parent: Option<BlockId>) -> &mut Siblings {
        match parent.and_then(|id| self.nodes.get_mut(&id)) {
            Some(node) => &mut node.children,
            None => self.roots.entry(scope).or_default(),
        }
    }
}

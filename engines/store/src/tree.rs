//! What the store has: blocks under a prefix tree of their tokens. No I/O, and no clock: what was used later is worth more.
//!
//! A block continues the one before it at its end or, where prompts part within it, earlier. So no token that prompts share is
//! there twice.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use baton_schemas::kv::KvLayout;
use baton_schemas::{CacheScope, Token};

use super::block::KvBlock;

/// Names a block of a tree. Never given twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BlockId(u64);

/// The blocks that hold the first tokens of a prompt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Path {
    /// In the order of their positions, without gaps. Each belongs to the prompt up to where the next one begins.
    pub(crate) blocks: Vec<BlockId>,
    /// The number of tokens that they have in common with the prompt.
    pub(crate) n_tokens: usize,
}

/// A block's file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum BlockFile {
    None,
    /// It waits to be written, so it stays in memory.
    Pending,
    Named(String),
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
    /// Rises to the worth of each block that is dropped, so that worths age (GreedyDual-Size, Cao and Irani 1997).
    level: f64,
    memory_bytes: usize,
}

impl TreeNode {
    /// One past the block's last position.
    pub(crate) fn p1(&self) -> usize {
        self.p0 as usize + self.tokens.len()
    }
}

impl BlockTree {
    pub(crate) fn new(layout: Arc<KvLayout>) -> BlockTree {
        let (nodes, roots) = (HashMap::new(), HashMap::new());
        BlockTree { layout, nodes, roots, next: 0, level: 0.0, memory_bytes: 0 }
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

    /// The blocks that hold the most first tokens of `tokens`, the last one perhaps with others behind them.
    pub(crate) fn path(&self, scope: CacheScope, tokens: &[Token]) -> Path {
        self.longest(scope, tokens, |_| true)
    }

    /// The longest path of `tokens` that `fits`. Of equal ones those that end with a block, then the newest, which have what
    /// others lack.
    fn longest(&self, scope: CacheScope, tokens: &[Token], fits: impl Fn(&Path) -> bool) -> Path {
        let rank = |path: &Path| {
            let last = path.blocks.last().copied();
            let is_whole = last.and_then(|id| self.nodes.get(&id)).is_some_and(|node| node.p1() == path.n_tokens);
            (path.n_tokens, is_whole, last)
        };
        let mut best = Path::default();
        let mut left: Vec<Path> = vec![Path::default()];
        while let Some(path) = left.pop() {
            for (id, node) in self.continuations(scope, &path) {
                let p0 = node.p0 as usize;
                let n = n_common(&node.tokens, &tokens[p0..]);
                if n == 0 {
                    continue;
                }
                let blocks = path.blocks.iter().copied().chain([id]).collect();
                let longer = Path { blocks, n_tokens: p0 + n };
                if !node.children.is_empty() && longer.n_tokens < tokens.len() {
                    left.push(longer.clone());
                }
                // A window may reach what the block before has where this one begins, and not further on.
                let before = Path { blocks: path.blocks.clone(), n_tokens: p0 };
                for found in [before, longer] {
                    if rank(&found) > rank(&best) && fits(&found) {
                        best = found;
                    }
                }
            }
        }
        best
    }

    /// The blocks that continue a path at its end, or at an earlier position of its last block.
    fn continuations(&self, scope: CacheScope, path: &Path) -> impl Iterator<Item = (BlockId, &TreeNode)> {
        let ids = match path.blocks.last() {
            Some(last) => self.nodes.get(last).map_or(&[][..], |node| &node.children),
            None => self.roots.get(&scope).map_or(&[][..], Vec::as_slice),
        };
        let n_tokens = path.n_tokens;
        let nodes = ids.iter().filter_map(|id| Some((*id, self.nodes.get(id)?)));
        nodes.filter(move |(_, node)| node.p0 as usize <= n_tokens)
    }

    /// One past the last position of each block of a path that belongs to it.
    pub(crate) fn ends(&self, path: &Path) -> impl Iterator<Item = usize> {
        let starts = path.blocks.iter().skip(1).map(|id| self.nodes.get(id).map_or(0, |node| node.p0 as usize));
        starts.chain([path.n_tokens])
    }

    /// The longest path of `tokens` at whose end a sequence can be continued.
    pub(crate) fn usable(&self, scope: CacheScope, tokens: &[Token]) -> Path {
        self.longest(scope, tokens, |path| self.is_usable(path))
    }

    /// Returns true if a path has the states of its end, and every row that the next token attends to.
    pub(crate) fn is_usable(&self, path: &Path) -> bool {
        let Some(node) = path.blocks.last().and_then(|id| self.nodes.get(id)) else { return false };
        let has_states = self.layout.states.is_empty() || (path.n_tokens == node.p1() && node.has_state);
        has_states && self.has_windows(path, path.n_tokens, path.n_tokens)
    }

    /// Returns true if the path has every windowed row before `before` that the token at `end` attends to.
    fn has_windows(&self, path: &Path, before: usize, end: usize) -> bool {
        self.layout.sections.iter().enumerate().all(|(section, shape)| {
            let Some(window) = shape.window else { return true };
            let needed_from = (end + 1).saturating_sub(window as usize);
            let mut from = before;
            for node in path.blocks.iter().rev().filter_map(|id| self.nodes.get(id)) {
                if from <= needed_from || node.p0 as usize >= from {
                    continue;
                }
                from = from.min(node.starts[section] as usize);
                if from > node.p0 as usize {
                    break;
                }
            }
            from <= needed_from
        })
    }

    /// The blocks of a conversation that need not be added again: what follows them is new. Its rows of windowed layers begin
    /// where its end needs them.
    pub(crate) fn known(&self, scope: CacheScope, tokens: &[Token]) -> Path {
        let end = tokens.len();
        self.longest(scope, tokens, |path| {
            let Some(node) = path.blocks.last().and_then(|id| self.nodes.get(id)) else { return false };
            let can_go_on = self.branches_anywhere() || path.n_tokens == node.p1();
            let lacks_state = path.n_tokens == end && !self.layout.states.is_empty() && !node.has_state;
            let is_whole = path.n_tokens == end && self.is_usable(path);
            is_whole || (can_go_on && !lacks_state && self.has_windows(path, path.n_tokens, end))
        })
    }

    /// A block may continue the first part of another one. With states it continues whole ones, so that a branch has a block
    /// that ends with the states of its beginning.
    fn branches_anywhere(&self) -> bool {
        self.layout.states.is_empty() && self.layout.sections.iter().all(|section| section.tokens_per_row == 1)
    }

    /// Adds a block of `tokens`, which has everything up to the block's end or further. Returns `None` if blocks before it are
    /// missing.
    pub(crate) fn add(&mut self, scope: CacheScope, tokens: &[Token], block: NewBlock) -> Option<BlockId> {
        let NewBlock { p0, tokens: its_tokens, starts, has_state, memory, file } = block;
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
        let id = BlockId(self.next);
        self.next += 1;
        self.memory_bytes += memory.as_ref().map_or(0, KvBlock::n_bytes);
        let (children, worth) = (Vec::new(), 0.0);
        let node = TreeNode { scope, parent, children, p0, tokens: its_tokens, starts, has_state, memory, file, worth };
        self.nodes.insert(id, node);
        self.siblings(scope, parent).push(id);
        self.touch(id);
        Some(id)
    }

    /// Notes that a block was used, and with it those before it, which are worth no less.
    pub(crate) fn touch(&mut self, id: BlockId) {
        let mut next = Some(id);
        let mut worth = f64::NEG_INFINITY;
        while let Some(node) = next.and_then(|id| self.nodes.get_mut(&id)) {
            let n_bytes = node.memory.as_ref().map_or(0, KvBlock::n_bytes).max(1);
            // What computing its tokens again costs, for each byte. A later token attends to more.
            let cost = node.tokens.len() as f64 * (1.0 + f64::from(node.p0) / ATTENTION_EQUALS_WEIGHTS);
            worth = worth.max(self.level + cost / n_bytes as f64);
            node.worth = worth;
            next = node.parent;
        }
    }

    /// Returns true if the block before this one has a file, without which that of this one would never be found.
    pub(crate) fn continues_a_file(&self, id: BlockId) -> bool {
        let parent = self.nodes.get(&id).and_then(|node| node.parent).and_then(|parent| self.nodes.get(&parent));
        parent.is_none_or(|parent| parent.file != BlockFile::None)
    }

    /// Gives a block's rows a place in memory, or takes it away.
    pub(crate) fn set_memory(&mut self, id: BlockId, memory: Option<KvBlock>) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        self.memory_bytes -= node.memory.as_ref().map_or(0, KvBlock::n_bytes);
        self.memory_bytes += memory.as_ref().map_or(0, KvBlock::n_bytes);
        node.memory = memory;
    }

    pub(crate) fn set_file(&mut self, id: BlockId, file: BlockFile) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.file = file;
        }
    }

    /// Frees the memory of the block that is worth least, but not of `kept`. One that is nowhere else is dropped, if no other
    /// needs it. Returns false if none can be freed.
    pub(crate) fn free_cheapest(&mut self, kept: Option<BlockId>) -> bool {
        let can_go = |node: &TreeNode| {
            node.memory.is_some()
                && match node.file {
                    BlockFile::Named(_) => true,
                    BlockFile::Pending => false,
                    BlockFile::None => node.children.is_empty(),
                }
        };
        let worth = |(id, node): &(&BlockId, &TreeNode)| (node.worth, std::cmp::Reverse(node.p0), **id);
        let cheapest = self.nodes.iter().filter(|(id, node)| can_go(node) && kept != Some(**id)).min_by(|a, b| {
            let ((a, a0, a_id), (b, b0, b_id)) = (worth(a), worth(b));
            a.total_cmp(&b).then(a0.cmp(&b0)).then(a_id.cmp(&b_id))
        });
        let Some((&id, node)) = cheapest else { return false };
        self.level = self.level.max(node.worth);
        match node.file {
            BlockFile::None => _ = self.remove(id),
            _ => self.set_memory(id, None),
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
        let mut files = Vec::new();
        let mut left = vec![id];
        while let Some(node) = left.pop().and_then(|id| self.nodes.remove(&id)) {
            self.memory_bytes -= node.memory.as_ref().map_or(0, KvBlock::n_bytes);
            left.extend(node.children);
            if let BlockFile::Named(name) = node.file {
                files.push(name);
            }
        }
        files
    }

    /// Takes note that files are gone. What was nowhere else is removed with all that continues it. Returns the names of the
    /// files of these.
    pub(crate) fn lose_files(&mut self, gone: &HashSet<String>) -> Vec<String> {
        let is_gone = |node: &TreeNode| matches!(&node.file, BlockFile::Named(name) if gone.contains(name));
        let lost: Vec<BlockId> = self.nodes.iter().filter(|(_, node)| is_gone(node)).map(|(id, _)| *id).collect();
        let mut files = Vec::new();
        for id in lost {
            match self.nodes.get_mut(&id) {
                Some(node) if node.memory.is_some() => node.file = BlockFile::None,
                _ => files.extend(self.remove(id)),
            }
        }
        files
    }

    /// Removes all blocks of a scope. Returns the names of their files.
    pub(crate) fn remove_scope(&mut self, scope: CacheScope) -> Vec<String> {
        let roots = self.roots.remove(&scope).unwrap_or_default();
        roots.into_iter().flat_map(|id| self.remove(id)).collect()
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
            if let BlockFile::Named(name) = &node.file {
                files.push((node.p0, name.clone()));
            }
            next = node.parent;
        }
        files
    }

    /// At most `limit` blocks, each after the one that it continues, with the index of that one.
    pub(crate) fn in_order(&self, limit: usize) -> Vec<(Option<usize>, BlockId)> {
        let mut ordered = Vec::new();
        let mut left: Vec<(Option<usize>, BlockId)> = self.roots.values().flatten().map(|id| (None, *id)).collect();
        while let Some((before, id)) = left.pop().filter(|_| ordered.len() < limit) {
            let index = Some(ordered.len());
            left.extend(self.nodes.get(&id).iter().flat_map(|node| &node.children).map(|child| (index, *child)));
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

fn n_common(a: &[Token], b: &[Token]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

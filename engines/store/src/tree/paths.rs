//! Which blocks a prompt can begin with.

use baton_schemas::{CacheScope, Token};

use super::BlockTree;
use super::node::TreeNode;
use super::siblings::BlockId;

/// The blocks that hold the first tokens of a prompt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Path {
    /// In the order of their positions, without gaps. Each belongs to the prompt up to where the next one begins.
    pub(crate) blocks: Vec<BlockId>,
    /// The number of tokens that they have in common with the prompt.
    pub(crate) n_tokens: usize,
}

/// Which blocks can be given back now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    All,
    /// Those in memory: the disk does not answer.
    Memory,
}

/// The blocks that are of use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WantedKv {
    /// All.
    Any,
    /// Only blocks that went through no lossy codec.
    Lossless,
}

impl TreeNode {
    pub(crate) fn is_in(&self, reach: Reach) -> bool {
        reach == Reach::All || self.memory.is_some()
    }
}

impl BlockTree {
    /// The blocks that hold the most first tokens of `tokens`, the last one perhaps with others behind them.
    pub(crate) fn path(&self, scope: CacheScope, tokens: &[Token]) -> Path {
        self.longest(scope, tokens, |_| true, |_| true)
    }

    /// The longest path of `tokens` that `fits`, of blocks that it `may_use`. Of equal ones those that end with a block, then the
    /// newest, which have what others lack.
    fn longest(
        &self,
        scope: CacheScope,
        tokens: &[Token],
        may_use: impl Fn(&TreeNode) -> bool,
        fits: impl Fn(&Path) -> bool,
    ) -> Path {
        let rank = |path: &Path| {
            let last = path.blocks.last().copied();
            let is_whole = last.and_then(|id| self.nodes.get(&id)).is_some_and(|node| node.p1() == path.n_tokens);
            (path.n_tokens, is_whole, last)
        };
        let mut best = Path::default();
        let mut left: Vec<Path> = vec![Path::default()];
        while let Some(path) = left.pop() {
            for (id, node) in self.continuations(scope, &path, tokens) {
                let p0 = node.p0 as usize;
                let n = n_common(&node.tokens, &tokens[p0..]);
                if n == 0 {
                    continue;
                }
                let mut keep_better = |found: Path| {
                    if rank(&found) > rank(&best) && fits(&found) {
                        best = found;
                    }
                };
                // A window may reach what the block before has where this one begins, and not further on.
                keep_better(Path { blocks: path.blocks.clone(), n_tokens: p0 });
                if !may_use(node) {
                    continue;
                }
                let blocks = path.blocks.iter().copied().chain([id]).collect();
                let longer = Path { blocks, n_tokens: p0 + n };
                if !node.children.is_empty() && longer.n_tokens < tokens.len() {
                    left.push(longer.clone());
                }
                keep_better(longer);
            }
        }
        best
    }

    /// The blocks that continue a path of `tokens` at its end, or at an earlier position of its last block.
    fn continuations<'t>(
        &'t self,
        scope: CacheScope,
        path: &Path,
        tokens: &'t [Token],
    ) -> impl Iterator<Item = (BlockId, &'t TreeNode)> {
        let siblings = match path.blocks.last() {
            Some(last) => self.nodes.get(last).map(|node| &node.children),
            None => self.roots.get(&scope),
        };
        let n_tokens = path.n_tokens;
        let ids = siblings.into_iter().flat_map(move |siblings| siblings.of_prompt(tokens, n_tokens));
        ids.filter_map(|id| Some((id, self.nodes.get(&id)?)))
    }

    /// One past the last position of each block of a path that belongs to it.
    pub(crate) fn ends(&self, path: &Path) -> impl Iterator<Item = usize> {
        let starts = path.blocks.iter().skip(1).map(|id| self.nodes.get(id).map_or(0, |node| node.p0 as usize));
        starts.chain([path.n_tokens])
    }

    /// The longest path of `tokens` at whose end a sequence can be continued, with all its blocks wanted and in the `reach`.
    pub(crate) fn usable(&self, scope: CacheScope, tokens: &[Token], reach: Reach, wanted: WantedKv) -> Path {
        let is_wanted = |node: &TreeNode| wanted == WantedKv::Any || !node.is_lossy();
        self.longest(scope, tokens, |node| node.is_in(reach) && is_wanted(node), |path| self.is_usable(path))
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
                if from <= needed_from {
                    break;
                }
                if node.p0 as usize >= from {
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
        let can_end = |path: &Path| {
            let Some(node) = path.blocks.last().and_then(|id| self.nodes.get(id)) else { return false };
            let can_go_on = self.branches_anywhere() || path.n_tokens == node.p1();
            let lacks_state = path.n_tokens == end && !self.layout.states.is_empty() && !node.has_state;
            let is_whole = path.n_tokens == end && self.is_usable(path);
            is_whole || (can_go_on && !lacks_state && self.has_windows(path, path.n_tokens, end))
        };
        self.longest(scope, tokens, |_| true, can_end)
    }

    /// Each row is that of one position, and a sequence can go on after any of them.
    pub(crate) fn is_plain(&self) -> bool {
        self.branches_anywhere() && self.layout.sections.iter().all(|section| section.window.is_none())
    }

    /// A block may continue the first part of another one. With states it continues whole ones, so that a branch has a block
    /// that ends with the states of its beginning.
    pub(super) fn branches_anywhere(&self) -> bool {
        self.layout.states.is_empty() && self.layout.sections.iter().all(|section| section.tokens_per_row == 1)
    }
}

fn n_common(a: &[Token], b: &[Token]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

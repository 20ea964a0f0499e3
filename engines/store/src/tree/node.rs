//! A block of the tree: what it holds, and where.

use std::sync::Arc;

use baton_schemas::kv::{KvLayout, Span};
use baton_schemas::{CacheScope, Token};

use super::super::block::{FileName, KvBlock};
use super::siblings::{BlockId, Siblings};

/// The position at which attention takes about as long as everything else of a token.
const ATTENTION_EQUALS_WEIGHTS: f64 = 16_384.0;

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
    pub(super) parent: Option<BlockId>,
    pub(super) children: Siblings,
    /// The block's first position.
    pub(crate) p0: u32,
    /// The block's tokens.
    pub(crate) tokens: Arc<[Token]>,
    /// The first position of each section's rows.
    pub(crate) starts: Vec<u32>,
    pub(crate) has_state: bool,
    pub(crate) memory: Option<KvBlock>,
    pub(crate) file: BlockFile,
    /// Exact KV of its tokens was looked for, and there is only other KV.
    pub(super) wants_lossless: bool,
    pub(super) worth: f64,
    /// When it was used last, by the tree's count of uses.
    pub(super) used: u64,
}

impl TreeNode {
    /// True if the rows that it gives back now went through a lossy codec.
    pub(crate) fn is_lossy(&self) -> bool {
        match (&self.memory, &self.file) {
            (Some(block), _) => block.is_lossy,
            (None, BlockFile::Named(file)) => file.is_lossy,
            (None, BlockFile::Wanted | BlockFile::Dropped | BlockFile::Never) => false,
        }
    }

    /// The bytes of its values in memory, whether they are there now or come from its file.
    pub(super) fn n_bytes(&self, layout: &KvLayout) -> usize {
        let span = Span { p0: self.p0, p1: self.p1() as u32, starts: self.starts.clone() };
        let n_state = if self.has_state { layout.state_bytes() } else { 0 };
        usize::try_from(span.n_bytes(layout)).unwrap_or(usize::MAX).saturating_add(n_state)
    }

    /// The cost of computing its tokens again, in bytes of their rows: computing a token takes longer, the more bytes its rows have, and
    /// a later token attends to more. Per byte of a file, only the depth and the size of the states count.
    pub(crate) fn cost(&self, layout: &KvLayout) -> f64 {
        let rows = self.tokens.len() as f64 * layout.bytes_per_position() as f64;
        rows * (1.0 + f64::from(self.p0) / ATTENTION_EQUALS_WEIGHTS)
    }

    /// One past the block's last position.
    pub(crate) fn p1(&self) -> usize {
        self.p0 as usize + self.tokens.len()
    }
}

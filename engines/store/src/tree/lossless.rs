//! Lossless KV in the place of KV that went through a lossy codec.

use std::ops::Range;

use baton_schemas::{CacheScope, Token};

use super::BlockTree;

impl BlockTree {
    /// Notes that lossless KV of `tokens` was looked for: blocks that have only other KV take it when it was computed. Where windows
    /// and states matter, blocks of the same tokens may have other rows, so there they do not.
    pub(crate) fn want_lossless(&mut self, scope: CacheScope, tokens: &[Token]) {
        if !self.is_plain() {
            return;
        }
        for id in self.path(scope, tokens).blocks {
            if let Some(node) = self.nodes.get_mut(&id) {
                node.wants_lossless = node.is_lossy();
            }
        }
    }

    /// The positions of `tokens` to copy next, at most `max`: a block that wants lossless KV and ends within the first `n_lossless`
    /// positions, or else what no block has. Each block that wants it is named once.
    pub(crate) fn next_to_copy(
        &mut self,
        scope: CacheScope,
        tokens: &[Token],
        n_lossless: usize,
        max: usize,
    ) -> Range<usize> {
        let known = self.known(scope, tokens);
        let ends: Vec<usize> = self.ends(&known).collect();
        for (id, end) in known.blocks.iter().zip(ends) {
            let Some(node) = self.nodes.get_mut(id) else { continue };
            let is_whole = end == node.p1() && end <= n_lossless && node.tokens.len() <= max;
            if is_whole && std::mem::take(&mut node.wants_lossless) && node.is_lossy() {
                return node.p0 as usize..end;
            }
        }
        known.n_tokens..tokens.len().min(known.n_tokens + max)
    }
}

//! What a store holds, for those who choose where a prompt goes.

use baton_schemas::held::{HeldPiece, KvTier, PieceUse};

use super::store::KvStore;
use super::tree::{BlockFile, BlockId, Path, Reach};

/// The most blocks that are told, those that were used last: a million tokens.
const MAX_PIECES: usize = 4_096;

impl KvStore {
    /// The blocks that can be given back now, each after the one that it continues.
    pub fn held(&self) -> Vec<HeldPiece> {
        let shared = self.shared();
        let reach = self.reach();
        let tree = shared.tree();
        let is_plain = tree.is_plain();
        let mut paths: Vec<Vec<BlockId>> = Vec::new();
        let mut pieces: Vec<HeldPiece> = Vec::new();
        for (before, id) in tree.in_order(MAX_PIECES, reach) {
            let Some(node) = tree.get(id) else { continue };
            let use_at = if is_plain {
                PieceUse::Anywhere
            } else {
                let mut blocks = before.map_or_else(Vec::new, |before| paths[before].clone());
                blocks.push(id);
                paths.push(blocks.clone());
                let path = Path { blocks, n_tokens: node.p1() };
                if tree.is_usable(&path) { PieceUse::AtEnd } else { PieceUse::Nowhere }
            };
            let tier = match (&node.memory, &node.file) {
                (None, BlockFile::Named(_)) => KvTier::Disk,
                _ => KvTier::Memory,
            };
            let (from, tokens) = (node.p0, node.tokens.clone());
            let is_exact = !node.is_lossy() && before.is_none_or(|before: usize| pieces[before].is_exact);
            pieces.push(HeldPiece { scope: node.scope, before, from, tokens, tier, use_at, is_exact });
        }
        pieces
    }

    /// Changes with the blocks that it holds, or where.
    pub fn version(&self) -> u64 {
        let reach = u64::from(self.reach() == Reach::All);
        (self.shared().tree().version() << 1) | reach
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use baton_schemas::kv::{
        Chunk, Dtype, Fingerprint, KvLayout, LayerRows, LayerShape, RopePairing, Rows, Section, SectionRows,
    };
    use baton_schemas::{CacheScope, Token};

    use super::*;
    use crate::{KvBlock, StoreKey, StoreOptions};

    /// A store of a model with one layer, which attends to all positions or to the last `window`.
    fn store(window: Option<u32>) -> KvStore {
        let rows = Rows { dtype: Dtype::F16, n_values: 2 };
        let layers = vec![LayerShape { k: rows, v: None }];
        let section = Section { window, n_rot: [0; 2], tokens_per_row: 1, layers };
        let layout = KvLayout { rope: RopePairing::None, sections: vec![section], states: Vec::new() };
        let model = Fingerprint { vocabulary: [1; 32], weights: [2; 32] };
        let options = StoreOptions { memory_bytes: 1 << 20, disk: None };
        KvStore::open(options, StoreKey::derive(b"secret"), &model, Arc::new(layout)).unwrap()
    }

    /// A block of the positions from `p0` to `p1`, whose rows begin at `start`.
    fn block(p0: u32, start: u32, p1: u32) -> KvBlock {
        let k = vec![7; 4 * (p1 - start) as usize].into();
        let sections = vec![SectionRows { start, layers: vec![LayerRows { k, v: Default::default() }] }];
        KvBlock { chunk: Chunk { p0, p1, sections }, state: None, is_lossy: false }
    }

    #[test]
    fn every_block_is_told_behind_the_one_that_it_continues() {
        let store = store(None);
        let tokens: Vec<Token> = (0..100).collect();
        let other: Vec<Token> = (0..40).chain(200..220).collect();
        let versions = [0, 1, 2, 3].map(|i| {
            let added = match i {
                0 => true,
                1 => store.add(CacheScope(4), &tokens[..40], block(0, 0, 40)),
                2 => store.add(CacheScope(4), &tokens, block(40, 40, 100)),
                _ => store.add(CacheScope(4), &other, block(40, 40, 60)),
            };
            assert!(added);
            store.version()
        });
        assert!(versions.windows(2).all(|pair| pair[0] != pair[1]), "{versions:?}");
        let held = store.held();
        assert_eq!((held.len(), held[0].before, &held[0].tokens[..]), (3, None, &tokens[..40]));
        for piece in &held {
            assert_eq!((piece.scope, piece.tier, piece.use_at), (CacheScope(4), KvTier::Memory, PieceUse::Anywhere));
        }
        let mut rest: Vec<_> = held[1..].iter().map(|piece| (piece.before, piece.tokens.to_vec())).collect();
        rest.sort();
        assert_eq!(rest, [(Some(0), tokens[40..].to_vec()), (Some(0), other[40..].to_vec())]);
    }

    #[test]
    fn of_more_than_can_be_told_the_blocks_that_were_used_last_are() {
        let store = store(None);
        let chat = |i: usize| [i as Token, 7];
        for i in 0..MAX_PIECES + 100 {
            assert!(store.add(CacheScope(4), &chat(i), block(0, 0, 2)));
        }
        let restored = store.restore(&store.find(CacheScope(4), &chat(0)), Arc::new(|| {}));
        drop(restored);
        assert!(store.add(CacheScope(4), &[1, 7, 8], block(2, 2, 3)));
        let held = store.held();
        let has = |token: Token| held.iter().any(|piece| piece.tokens[0] == token);
        assert_eq!(held.len(), MAX_PIECES);
        assert!([0, 1, 8].iter().all(|token| has(*token)) && !has(2), "what was used, and what continues it");
    }

    #[test]
    fn what_follows_a_lossy_block_is_not_exact() {
        let store = store(None);
        let tokens: Vec<Token> = (0..90).collect();
        for (p0, p1, is_lossy) in [(0, 30, false), (30, 60, true), (60, 90, false)] {
            assert!(store.add(CacheScope(4), &tokens[..p1 as usize], KvBlock { is_lossy, ..block(p0, p0, p1) }));
        }
        let exact: Vec<bool> = store.held().iter().map(|piece| piece.is_exact).collect();
        assert_eq!(exact, [true, false, false]);
    }

    #[test]
    fn windowed_rows_are_used_where_they_are_complete() {
        let store = store(Some(8));
        let tokens: Vec<Token> = (0..64).collect();
        // The cache has dropped the first block's rows.
        assert!(
            store.add(CacheScope(4), &tokens, block(0, 32, 32)) && store.add(CacheScope(4), &tokens, block(32, 48, 64))
        );
        let uses: Vec<PieceUse> = store.held().iter().map(|piece| piece.use_at).collect();
        assert_eq!(uses, [PieceUse::Nowhere, PieceUse::AtEnd]);
    }
}

//! Which prompts' KV a node holds: hashes of their beginnings, which an endpoint compares with those of a new prompt.
//!
//! The endpoint draws the hashes' key, so what one endpoint is told says nothing to another one, or later. A caller's scope is a
//! part of every hash, so a prompt is found only in its own scope.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::cache_scope::CacheScope;
use crate::error::EngineError;
use crate::token::Token;

/// The distance of hashes divides by so many tokens. Short, because on a slow machine each token costs milliseconds, which can
/// change a short request's route.
pub const HELD_BLOCK: u32 = 8;

/// The distance of hashes in the store, at least.
const STORED_BLOCK: u32 = 32;

/// The most hashes of blocks in each tier.
pub const MAX_HELD_HASHES: usize = 4_096;

/// The most other beginnings in each tier. Each that is no longer than a prompt costs a hash when the prompt is planned.
pub const MAX_HELD_ENDS: usize = 512;

/// Where a node keeps KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvTier {
    /// In the engine's cache.
    Slot,
    /// In the store, in the host's memory.
    Memory,
    /// In the store, on disk.
    Disk,
}

impl KvTier {
    /// All of them, the fastest first.
    pub const ALL: [KvTier; 3] = [KvTier::Slot, KvTier::Memory, KvTier::Disk];
}

/// The key of an endpoint's hashes, which asks a node what it holds.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldKey(#[serde(with = "hex")] pub [u8; 32]);

/// Tokens per second that a node's store gives back; 0 until measured.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RestoreRates {
    /// From the host's memory.
    pub memory: f64,
    /// From disk.
    pub disk: f64,
}

/// What a node holds, for one endpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldDigest {
    /// [`NodeLoad::held`](crate::node::NodeLoad::held) at that time.
    pub version: u64,
    /// What each tier holds.
    pub tiers: Vec<HeldTier>,
}

/// The hashes of one tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldTier {
    /// The tier.
    pub tier: KvTier,
    /// The distance of `blocks` in tokens, a multiple of [`HELD_BLOCK`].
    pub block: u32,
    /// Hashes of beginnings of whole blocks, at most [`MAX_HELD_HASHES`].
    pub blocks: Vec<u64>,
    /// Other beginnings: their numbers of tokens, and their hashes. At most [`MAX_HELD_ENDS`], the longest.
    pub ends: Vec<(u32, u64)>,
    /// As `blocks`, of KV that is not exact: the node uses it itself, and gives it to no other node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inexact_blocks: Vec<u64>,
    /// As `ends`, of such KV.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub inexact_ends: Vec<(u32, u64)>,
}

/// Consecutive tokens of a conversation whose KV is in one tier.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldPiece {
    /// Whose KV it is.
    pub scope: CacheScope,
    /// The index of the piece before it, which is smaller than its own. `None`: a conversation begins with it.
    pub before: Option<usize>,
    /// The position of its first token: one past the piece before it, or within that, where conversations part.
    pub from: u32,
    /// Its tokens.
    pub tokens: Arc<[Token]>,
    /// Where its KV is.
    pub tier: KvTier,
    /// Where another sequence can go on from it.
    pub use_at: PieceUse,
    /// It, and all before it, is exactly what the model's own weights compute, so other nodes may have it. What went through a
    /// lossy codec is not.
    pub is_exact: bool,
}

/// Where a sequence can go on from a piece of KV.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PieceUse {
    /// After any of its tokens.
    Anywhere,
    /// At its end, where the states of recurrent layers are kept.
    AtEnd,
    /// Only behind a later piece.
    Nowhere,
}

/// What a node holds at one moment, before it is hashed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HeldPieces {
    /// Changes with the pieces.
    pub version: u64,
    /// The pieces.
    pub pieces: Vec<HeldPiece>,
}

/// Hashes the beginnings of a sequence.
#[derive(Debug, Clone)]
pub struct HeldHasher(blake3::Hasher);

impl HeldHasher {
    /// A sequence of this scope without tokens.
    pub fn new(key: &HeldKey, scope: CacheScope) -> HeldHasher {
        let mut hasher = blake3::Hasher::new_keyed(&key.0);
        hasher.update(&scope.0.to_le_bytes());
        HeldHasher(hasher)
    }

    /// Adds the next tokens.
    pub fn extend(&mut self, tokens: &[Token]) {
        for part in tokens.chunks(16) {
            let mut bytes = [0; 64];
            bytes.chunks_exact_mut(4).zip(part).for_each(|(place, token)| place.copy_from_slice(&token.to_le_bytes()));
            self.0.update(&bytes[..4 * part.len()]);
        }
    }

    /// The hash of all tokens so far.
    pub fn hash(&self) -> u64 {
        let mut word = [0; 8];
        word.copy_from_slice(&self.0.finalize().as_bytes()[..8]);
        u64::from_le_bytes(word)
    }
}

impl HeldPieces {
    /// The hashes under a key. Takes some milliseconds for a million tokens.
    pub fn digest(&self, key: &HeldKey) -> HeldDigest {
        let mut tiers = KvTier::ALL.map(|tier| HeldTier::new(tier, self.block_of(tier)));
        // Where each piece begins.
        let mut starts: Vec<HeldHasher> = Vec::with_capacity(self.pieces.len());
        for piece in &self.pieces {
            let before = piece.before.and_then(|index| Some((self.pieces.get(index)?, starts.get(index)?)));
            let mut hasher = match before {
                None => HeldHasher::new(key, piece.scope),
                Some((before, start)) => {
                    let mut hasher = start.clone();
                    let n_shared = piece.from.saturating_sub(before.from) as usize;
                    hasher.extend(&before.tokens[..n_shared.min(before.tokens.len())]);
                    hasher
                }
            };
            starts.push(hasher.clone());
            let mut n = piece.from;
            let HeldTier { block, blocks, ends, inexact_blocks, inexact_ends, .. } = &mut tiers[piece.tier as usize];
            let (blocks, ends) = if piece.is_exact { (blocks, ends) } else { (inexact_blocks, inexact_ends) };
            let mut rest = &piece.tokens[..];
            while !rest.is_empty() {
                let to_block = (*block - n % *block) as usize;
                let step = match piece.use_at {
                    PieceUse::Anywhere => to_block.min(rest.len()),
                    PieceUse::AtEnd | PieceUse::Nowhere => rest.len(),
                };
                let (next, after) = rest.split_at(step);
                hasher.extend(next);
                n += step as u32;
                rest = after;
                let is_named = piece.use_at != PieceUse::Nowhere;
                if is_named && n.is_multiple_of(*block) {
                    blocks.push(hasher.hash());
                } else if is_named && rest.is_empty() {
                    ends.push((n, hasher.hash()));
                }
            }
        }
        for tier in &mut tiers {
            for blocks in [&mut tier.blocks, &mut tier.inexact_blocks] {
                blocks.sort_unstable();
                blocks.dedup();
                blocks.truncate(MAX_HELD_HASHES);
            }
            for ends in [&mut tier.ends, &mut tier.inexact_ends] {
                ends.sort_unstable();
                ends.dedup();
                ends.drain(..ends.len().saturating_sub(MAX_HELD_ENDS));
            }
        }
        let tiers = tiers.into_iter().filter(|tier| *tier != HeldTier::new(tier.tier, tier.block)).collect();
        HeldDigest { version: self.version, tiers }
    }

    /// The distance of a tier's hashes, so that there are not too many.
    fn block_of(&self, tier: KvTier) -> u32 {
        let pieces = self.pieces.iter().filter(|piece| piece.tier == tier && piece.use_at == PieceUse::Anywhere);
        let n_tokens: usize = pieces.map(|piece| piece.tokens.len()).sum();
        let mut block = if tier == KvTier::Slot { HELD_BLOCK } else { STORED_BLOCK };
        while n_tokens / block as usize > MAX_HELD_HASHES && block < 1 << 24 {
            block *= 2;
        }
        block
    }
}

impl HeldTier {
    /// A tier with hashes at this distance, of which there are none yet.
    fn new(tier: KvTier, block: u32) -> HeldTier {
        let (blocks, ends, inexact_blocks, inexact_ends) = Default::default();
        HeldTier { tier, block, blocks, ends, inexact_blocks, inexact_ends }
    }
}

impl HeldDigest {
    /// The digest, if it keeps the limits of [`HeldTier`]. Errors: it does not, so its sender is faulty.
    pub fn checked(self) -> Result<HeldDigest, EngineError> {
        let is_fine = |tier: &HeldTier| {
            tier.block >= HELD_BLOCK
                && tier.block.is_multiple_of(HELD_BLOCK)
                && [&tier.blocks, &tier.inexact_blocks].iter().all(|blocks| blocks.len() <= MAX_HELD_HASHES)
                && [&tier.ends, &tier.inexact_ends].iter().all(|ends| ends.len() <= MAX_HELD_ENDS)
        };
        match self.tiers.len() <= KvTier::ALL.len() && self.tiers.iter().all(is_fine) {
            true => Ok(self),
            false => Err(EngineError::internal("a node's list of what it holds is not possible")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: HeldKey = HeldKey([7; 32]);

    fn piece(before: Option<usize>, tokens: std::ops::Range<Token>, tier: KvTier, use_at: PieceUse) -> HeldPiece {
        HeldPiece {
            scope: CacheScope(3),
            before,
            from: if before.is_some() { tokens.start } else { 0 },
            tokens: tokens.collect(),
            tier,
            use_at,
            is_exact: true,
        }
    }

    fn hash_of(scope: CacheScope, n: Token) -> u64 {
        let mut hasher = HeldHasher::new(&KEY, scope);
        hasher.extend(&(0..n).collect::<Vec<_>>());
        hasher.hash()
    }

    fn digest(pieces: Vec<HeldPiece>) -> HeldDigest {
        HeldPieces { version: 1, pieces }.digest(&KEY).checked().unwrap()
    }

    #[test]
    fn a_digest_names_every_block_and_every_end_of_its_scope() {
        let held = digest(vec![
            piece(None, 0..20, KvTier::Slot, PieceUse::Anywhere),
            piece(None, 0..64, KvTier::Memory, PieceUse::Anywhere),
            piece(Some(1), 64..100, KvTier::Disk, PieceUse::Anywhere),
        ]);
        let [slot, memory, disk] = &held.tiers[..] else { panic!("{held:?}") };
        let of = |n| hash_of(CacheScope(3), n);
        let sorted = |mut hashes: Vec<u64>| {
            hashes.sort_unstable();
            hashes
        };
        assert_eq!((slot.block, &slot.blocks, &slot.ends), (8, &sorted(vec![of(8), of(16)]), &vec![(20, of(20))]));
        assert_eq!((memory.block, &memory.blocks, memory.ends.len()), (32, &sorted(vec![of(32), of(64)]), 0));
        assert_eq!((&disk.blocks, &disk.ends), (&vec![of(96)], &vec![(100, of(100))]));
        assert!(!slot.blocks.contains(&hash_of(CacheScope(4), 8)), "another scope has other hashes");
        let other = HeldPieces { version: 1, pieces: vec![piece(None, 0..8, KvTier::Slot, PieceUse::Anywhere)] };
        assert_ne!(other.digest(&HeldKey([8; 32])).tiers[0].blocks, [of(8)], "another endpoint, too");
    }

    #[test]
    fn conversations_part_within_a_piece() {
        let branch =
            HeldPiece { tokens: (500..540).collect(), ..piece(Some(0), 40..80, KvTier::Memory, PieceUse::Anywhere) };
        let held = digest(vec![piece(None, 0..64, KvTier::Memory, PieceUse::Anywhere), branch]);
        let mut hasher = HeldHasher::new(&KEY, CacheScope(3));
        hasher.extend(&(0..40).chain(500..524).collect::<Vec<_>>());
        assert!(held.tiers[0].blocks.contains(&hasher.hash()), "64 tokens of the branch");
        assert_eq!((held.tiers[0].blocks.len(), held.tiers[0].ends.len()), (3, 1));
    }

    #[test]
    fn states_can_only_be_used_where_they_are() {
        let held = digest(vec![
            piece(None, 0..64, KvTier::Memory, PieceUse::Nowhere),
            piece(Some(0), 64..100, KvTier::Memory, PieceUse::AtEnd),
        ]);
        assert!(held.tiers[0].blocks.is_empty());
        assert_eq!(held.tiers[0].ends, [(100, hash_of(CacheScope(3), 100))]);
    }

    #[test]
    fn what_is_not_exact_is_named_apart() {
        let held = digest(vec![
            piece(None, 0..64, KvTier::Memory, PieceUse::Anywhere),
            HeldPiece { is_exact: false, ..piece(Some(0), 64..100, KvTier::Memory, PieceUse::Anywhere) },
        ]);
        let of = |n| hash_of(CacheScope(3), n);
        let HeldTier { blocks, ends, inexact_blocks, inexact_ends, .. } = &held.tiers[0];
        assert_eq!((blocks.len(), ends.len()), (2, 0));
        assert_eq!((inexact_blocks, inexact_ends), (&vec![of(96)], &vec![(100, of(100))]));
        let mut told = serde_json::to_value(&held).unwrap();
        told["tiers"][0].as_object_mut().unwrap().retain(|name, _| !name.starts_with("inexact"));
        let older: HeldDigest = serde_json::from_value(told).unwrap();
        assert!(older.tiers[0].inexact_blocks.is_empty(), "nodes of earlier versions name none");
    }

    #[test]
    fn a_digest_is_bounded_however_much_is_held() {
        let many =
            (0..20).map(|i| piece(None, i * 1_000_000..i * 1_000_000 + 50_000, KvTier::Memory, PieceUse::Anywhere));
        let held = digest(many.collect());
        assert!(held.tiers[0].blocks.len() <= MAX_HELD_HASHES && held.tiers[0].blocks.len() > MAX_HELD_HASHES / 4);
        let block = HeldTier::new(KvTier::Slot, 12);
        let too_many = HeldTier { block: 8, ends: vec![(1, 1); MAX_HELD_ENDS + 1], ..block.clone() };
        let too_inexact = HeldTier { block: 8, inexact_blocks: vec![1; MAX_HELD_HASHES + 1], ..block.clone() };
        for tier in [HeldTier { block: 0, ..block.clone() }, block, too_many, too_inexact] {
            assert!(HeldDigest { version: 1, tiers: vec![tier] }.checked().is_err());
        }
    }
}

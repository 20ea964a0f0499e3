//! Which prompts' KV a node holds, so that a conversation returns to it, or its KV goes to another one.
//!
//! The node tells what it holds ([`baton_schemas::held`]); what was routed there since then is added. This is an estimate, because
//! the node may have evicted a prefix since, or tell what is not so; [`KeptPromises`] says how far it is believed. It affects only the
//! choice of the node; the node itself decides what it computes.

use std::collections::HashSet;
use std::sync::LazyLock;

use baton_planner::promises::KeptPromises;
use baton_planner::snapshot::HeldTokens;
use baton_schemas::held::{HELD_BLOCK, HeldDigest, HeldHasher, HeldKey, HeldTier, KvTier};
use baton_schemas::{CacheScope, Token};
use tokio::time::Instant;

use super::breakers::Task;
use super::routed_prefixes::RoutedPrefixes;

const BLOCK: usize = HELD_BLOCK as usize;

/// The key of this process.
static KEY: LazyLock<HeldKey> = LazyLock::new(|| HeldKey(rand::random()));

/// The key of this process, for hashes of what nodes hold.
pub(in crate::targets) fn key() -> &'static HeldKey {
    &KEY
}

/// The hashes of a prompt's beginnings, computed once for all nodes.
pub struct PromptHashes<'a> {
    scope: CacheScope,
    tokens: &'a [Token],
    /// After each whole block.
    blocks: Vec<u64>,
    /// After the last token.
    end: u64,
    /// Only KV that is exact counts.
    lossless_kv: bool,
}

impl<'a> PromptHashes<'a> {
    /// The hashes of a prompt of this scope.
    pub fn new(scope: CacheScope, tokens: &'a [Token]) -> PromptHashes<'a> {
        let mut hasher = HeldHasher::new(&KEY, scope);
        let blocks = tokens.chunks_exact(BLOCK).map(|block| {
            hasher.extend(block);
            hasher.hash()
        });
        let blocks = blocks.collect();
        hasher.extend(tokens.chunks_exact(BLOCK).remainder());
        PromptHashes { scope, tokens, blocks, end: hasher.hash(), lossless_kv: false }
    }

    /// The same for a prompt to which KV that went through a lossy codec is of use, or not.
    pub fn for_kv(self, lossless_kv: bool) -> PromptHashes<'a> {
        PromptHashes { lossless_kv, ..self }
    }

    /// The lengths of `ends`, which ascend, that are those of this prompt's beginnings.
    fn common_ends(&self, ends: &[(usize, u64)]) -> Vec<usize> {
        let mut hasher = HeldHasher::new(&KEY, self.scope);
        let (mut n, mut hash) = (0, None);
        let mut common = Vec::new();
        for (end, expected) in ends {
            let Some(next) = self.tokens.get(n..*end) else { break };
            if !next.is_empty() {
                hasher.extend(next);
                (n, hash) = (*end, Some(hasher.hash()));
            }
            common.extend((hash == Some(*expected)).then_some(n));
        }
        common
    }
}

/// The prefixes that a node probably holds.
#[derive(Debug, Default)]
pub(super) struct Prefixes {
    /// The node's last list, by [`KvTier`].
    told: [ToldTier; 3],
    /// [`HeldDigest::version`] of that list; 0 without one.
    version: u64,
    /// Prompts routed there since that list: blocks of half a million tokens at most.
    routed: RoutedPrefixes,
    /// What the node had of what these promised.
    pub(super) promises: KeptPromises,
}

/// What a node told of a tier.
#[derive(Debug, Default)]
struct ToldTier {
    block: usize,
    exact: ToldHashes,
    /// The node gives it to no other one.
    inexact: ToldHashes,
}

#[derive(Debug, Default)]
struct ToldHashes {
    blocks: HashSet<u64>,
    /// Hashes of other lengths, ascending.
    ends: Vec<(usize, u64)>,
}

impl ToldTier {
    fn new(tier: HeldTier) -> ToldTier {
        let HeldTier { tier: _, block, blocks, ends, inexact_blocks, inexact_ends } = tier;
        let (exact, inexact) = (ToldHashes::new(blocks, ends), ToldHashes::new(inexact_blocks, inexact_ends));
        ToldTier { block: block as usize, exact, inexact }
    }

    /// The lengths of the prompt's beginnings that it has for this task, ascending: as a prefill node it gives away exact KV alone,
    /// and some prompts want no other.
    fn lengths(&self, task: Task, prompt: &PromptHashes<'_>) -> Vec<usize> {
        let mut lengths = self.exact.lengths(self.block, prompt);
        match task {
            Task::Decode if !prompt.lossless_kv => lengths.extend(self.inexact.lengths(self.block, prompt)),
            Task::Decode | Task::Prefill => {}
        }
        lengths.sort_unstable();
        lengths
    }

    fn has_block(&self, hash: &u64) -> bool {
        self.exact.blocks.contains(hash) || self.inexact.blocks.contains(hash)
    }
}

impl ToldHashes {
    fn new(blocks: Vec<u64>, ends: Vec<(u32, u64)>) -> ToldHashes {
        let mut ends: Vec<(usize, u64)> = ends.into_iter().map(|(n, hash)| (n as usize, hash)).collect();
        ends.sort_unstable();
        ToldHashes { blocks: blocks.into_iter().collect(), ends }
    }

    /// The lengths of the prompt's beginnings among them. Blocks are `block` tokens apart.
    fn lengths(&self, block: usize, prompt: &PromptHashes<'_>) -> Vec<usize> {
        let mut lengths = prompt.common_ends(&self.ends);
        if !self.blocks.is_empty() {
            let hashes = (1..).zip(&prompt.blocks).map(|(i, hash)| (i * BLOCK, hash));
            let held = hashes.filter(|(n, hash)| n.is_multiple_of(block) && self.blocks.contains(hash));
            lengths.extend(held.map(|(n, _)| n));
        }
        lengths
    }
}

impl Prefixes {
    /// Remembers a sequence that was routed there.
    pub(super) fn remember(&mut self, scope: CacheScope, tokens: &[Token]) {
        let hashes = PromptHashes::new(scope, tokens);
        let end = (!tokens.len().is_multiple_of(BLOCK)).then_some(hashes.end);
        self.routed.remember(&hashes.blocks, end);
    }

    /// The node's list, in answer to a question that was asked then. It replaces what was routed there before, except for the
    /// last tokens of sequences whose blocks the node still has.
    pub(super) fn told(&mut self, digest: HeldDigest, asked: Instant) {
        let mut told: [ToldTier; 3] = Default::default();
        self.version = digest.version;
        for tier in digest.tiers {
            let place = tier.tier as usize;
            told[place] = ToldTier::new(tier);
        }
        self.told = told;
        let is_held = |hash: &u64| self.told.iter().any(|tier| tier.has_block(hash));
        self.routed.retain(|routed| routed.at >= asked || routed.whole.as_ref().is_some_and(is_held));
    }

    /// [`HeldDigest::version`] of the node's last list; 0 without one.
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Tokens at the front of a prompt that the node probably holds, as far as it can use them for this task.
    pub(super) fn held(&self, task: Task, prompt: &PromptHashes<'_>) -> HeldTokens {
        let n_routed = self.routed.n_blocks(&prompt.blocks) * BLOCK;
        let [in_slots, in_memory, on_disk] = self.told.each_ref().map(|tier| tier.lengths(task, prompt));
        let in_slot = in_slots.last().copied().unwrap_or(0).max(n_routed);
        let mut held = HeldTokens::in_slot(in_slot as u32);
        let stored = in_memory.into_iter().map(|n| (n, KvTier::Memory));
        let mut stored: Vec<_> = stored.chain(on_disk.into_iter().map(|n| (n, KvTier::Disk))).collect();
        stored.sort_unstable_by_key(|(n, tier)| (*n, *tier as usize));
        // The last tokens of a prompt that was routed there are where those before them are.
        let last = stored.last().filter(|(n, _)| *n > in_slot).map_or(KvTier::Slot, |(_, tier)| *tier);
        let n_whole = prompt.blocks.len() * BLOCK;
        if self.routed.contains(prompt.end) && in_slot.max(stored.last().map_or(0, |(n, _)| *n)) >= n_whole {
            stored.push((prompt.tokens.len(), last));
        }
        for (n, tier) in stored {
            let n_more = (n as u32).saturating_sub(held.all());
            match tier {
                KvTier::Slot => held.slot += n_more,
                KvTier::Memory => held.memory += n_more,
                KvTier::Disk => held.disk += n_more,
            }
        }
        held
    }

    /// Forgets all prefixes: the node's process has ended.
    pub(super) fn clear(&mut self) {
        *self = Prefixes { promises: self.promises, ..Prefixes::default() };
    }
}

#[cfg(test)]
mod tests {
    use baton_schemas::held::{HeldPiece, HeldPieces, PieceUse};

    use super::*;

    fn held(prefixes: &Prefixes, scope: CacheScope, tokens: &[Token]) -> HeldTokens {
        prefixes.held(Task::Decode, &PromptHashes::new(scope, tokens))
    }

    fn in_slot(prefixes: &Prefixes, scope: CacheScope, tokens: &[Token]) -> u32 {
        let HeldTokens { slot, memory: 0, disk: 0 } = held(prefixes, scope, tokens) else { panic!("it is in a slot") };
        slot
    }

    fn piece(tokens: std::ops::Range<Token>, before: Option<usize>, tier: KvTier) -> HeldPiece {
        let from = if before.is_some() { tokens.start } else { 0 };
        let (scope, use_at) = (CacheScope(7), PieceUse::Anywhere);
        HeldPiece { scope, before, from, tokens: tokens.collect(), tier, use_at, is_exact: true }
    }

    fn digest(pieces: Vec<HeldPiece>) -> HeldDigest {
        HeldPieces { version: 1, pieces }.digest(key()).checked().unwrap()
    }

    #[tokio::test]
    async fn whole_blocks_of_a_known_prefix_count() {
        let mut prefixes = Prefixes::default();
        let tokens: Vec<Token> = (0..200).collect();
        assert_eq!(in_slot(&prefixes, CacheScope::SHARED, &tokens), 0);
        prefixes.remember(CacheScope::SHARED, &tokens[..100]);
        assert_eq!(in_slot(&prefixes, CacheScope::SHARED, &tokens), 96);
        assert_eq!(in_slot(&prefixes, CacheScope::SHARED, &tokens[..70]), 64);
        let itself = in_slot(&prefixes, CacheScope::SHARED, &tokens[..100]);
        assert_eq!(itself, 100, "the sequence itself is known to the token");
        assert_eq!(in_slot(&prefixes, CacheScope(1), &tokens), 0, "prefixes are not shared between callers");
        let mut other = tokens.clone();
        other[40] = 999;
        assert_eq!(in_slot(&prefixes, CacheScope::SHARED, &other), 40);
        prefixes.clear();
        assert_eq!(in_slot(&prefixes, CacheScope::SHARED, &tokens), 0);
    }

    #[tokio::test]
    async fn a_nodes_list_says_what_is_where_and_to_which_token() {
        let mut prefixes = Prefixes::default();
        let told = vec![
            piece(0..100, None, KvTier::Slot),
            piece(0..256, None, KvTier::Memory),
            piece(256..512, Some(1), KvTier::Disk),
            piece(512..600, Some(2), KvTier::Memory),
        ];
        prefixes.told(digest(told), Instant::now());
        let tokens: Vec<Token> = (0..700).collect();
        let scope = CacheScope(7);
        assert_eq!(held(&prefixes, scope, &tokens), HeldTokens { slot: 100, memory: 244, disk: 256 });
        assert_eq!(held(&prefixes, scope, &tokens[..90]), HeldTokens { slot: 88, memory: 0, disk: 0 });
        assert_eq!(held(&prefixes, scope, &tokens[..400]), HeldTokens { slot: 100, memory: 156, disk: 128 });
        assert_eq!(held(&prefixes, CacheScope(8), &tokens), HeldTokens::default(), "nobody else's");
        assert_eq!(held(&prefixes, CacheScope::SHARED, &tokens), HeldTokens::default());
    }

    #[tokio::test]
    async fn what_is_not_exact_counts_where_it_decodes_and_not_where_it_prefills_for_others() {
        let mut prefixes = Prefixes::default();
        let told = vec![
            piece(0..256, None, KvTier::Memory),
            HeldPiece { is_exact: false, ..piece(256..512, Some(0), KvTier::Memory) },
        ];
        prefixes.told(digest(told), Instant::now());
        let tokens: Vec<Token> = (0..700).collect();
        let hashes = |lossless_kv| PromptHashes::new(CacheScope(7), &tokens).for_kv(lossless_kv);
        let held = |task, lossless_kv| prefixes.held(task, &hashes(lossless_kv)).memory;
        assert_eq!((held(Task::Decode, false), held(Task::Prefill, false)), (512, 256));
        assert_eq!(held(Task::Decode, true), 256, "of no use to a request that wants lossless KV");
    }

    #[tokio::test(start_paused = true)]
    async fn a_nodes_list_replaces_what_was_routed_there_before() {
        let mut prefixes = Prefixes::default();
        let scope = CacheScope(7);
        let (kept, evicted, new): (Vec<Token>, Vec<Token>, Vec<Token>) =
            ((0..100).collect(), (500..600).collect(), (900..1_000).collect());
        prefixes.remember(scope, &kept);
        prefixes.remember(scope, &evicted);
        tokio::time::advance(std::time::Duration::from_millis(1)).await;
        let asked = Instant::now();
        prefixes.remember(scope, &new);
        prefixes.told(digest(vec![piece(0..130, None, KvTier::Slot)]), asked);
        assert_eq!(in_slot(&prefixes, scope, &kept), 100, "a prompt whose reply is held, too, is known to the token");
        assert_eq!(in_slot(&prefixes, scope, &evicted), 0);
        assert_eq!(in_slot(&prefixes, scope, &new), 100, "it came after the question");
        let (n_routed, n_order) = prefixes.routed.sizes();
        assert_eq!(n_order, n_routed);
    }
}

//! Adds the blocks of files that other processes wrote: those that are there when a store opens its folder, and those that appear
//! later.

use std::collections::{HashMap, HashSet};

use baton_schemas::kv::PrefixHasher;
use baton_schemas::{CacheScope, Token};

use super::blocks::{ModelBlocks, hash};
use super::file::BlockLabel;
use super::folder::BlockFolder;
use super::labels::{FoundBlock, read_labels};
use super::store_folder::StoredFile;
use super::tree::{BlockFile, BlockId, NewBlock, TreeNode};

/// The most files of other processes that are taken up at one look: 262,144 tokens.
pub(crate) const MAX_NEW_FILES: usize = 1_024;

/// The most blocks that wait for the one before them, which another process may have written while the folder was listed.
const MAX_WAITING: usize = 4_096;

/// The blocks that have the last token before others, by the hash of all tokens up to there.
struct BlockEnds {
    /// Where others begin.
    wanted: HashSet<(CacheScope, u32)>,
    known: HashMap<(CacheScope, [u8; 32]), BlockId>,
}

impl BlockEnds {
    fn wanted_by(blocks: &[FoundBlock]) -> BlockEnds {
        let begins = blocks.iter().map(|FoundBlock { label, .. }| (label.scope, label.p0));
        BlockEnds { wanted: begins.filter(|(_, p0)| *p0 > 0).collect(), known: HashMap::new() }
    }

    /// Notes where tokens of a block end, the first of which is at `p0`. `hasher` gets them, and has those before them.
    fn note(&mut self, (scope, id): (CacheScope, BlockId), p0: u32, tokens: &[Token], hasher: &mut PrefixHasher) {
        for (end, token) in (p0 + 1..).zip(tokens) {
            hasher.extend(&[*token]);
            if self.wanted.contains(&(scope, end)) {
                self.known.insert((scope, hasher.hash()), id);
            }
        }
    }

    /// Notes the blocks of a store.
    fn note_all(&mut self, blocks: &ModelBlocks) {
        let scopes: HashSet<CacheScope> = self.wanted.iter().map(|(scope, _)| *scope).collect();
        for scope in scopes {
            let roots = blocks.tree().roots_of(scope);
            let mut left: Vec<(BlockId, PrefixHasher)> =
                roots.into_iter().map(|id| (id, PrefixHasher::new())).collect();
            while let Some((id, mut hasher)) = left.pop() {
                // For each block anew: the engine's thread needs the tree, too.
                let tree = blocks.tree();
                let Some(TreeNode { p0, tokens, .. }) = tree.get(id) else { continue };
                let (p0, tokens, children) = (*p0, tokens.clone(), tree.children_of(id));
                drop(tree);
                let mut tokens = &tokens[..];
                let mut noted = p0;
                for (end, child) in children {
                    let (before, after) = tokens.split_at((end - noted) as usize);
                    self.note((scope, id), noted, before, &mut hasher);
                    left.push((child, hasher.clone()));
                    (tokens, noted) = (after, end);
                }
                self.note((scope, id), noted, tokens, &mut hasher);
            }
        }
    }
}

impl ModelBlocks {
    /// Adds the blocks that are in the folder when it is opened, and removes files that no prompt can use.
    pub(crate) fn add_found(&self, files: &[StoredFile], folder: &BlockFolder) {
        let mut uses = Vec::new();
        for left in self.add_blocks(self.blocks_of(files), folder, &mut uses) {
            self.refuse(&left, folder);
        }
        uses.sort_unstable();
        self.tree().note_order(uses.into_iter().map(|(_, id)| id));
    }

    /// Adds blocks that other processes wrote since. Those whose block before them is not there yet go on waiting.
    pub(crate) fn take_up(&self, files: &[StoredFile], folder: &BlockFolder, waiting: &mut Vec<FoundBlock>) {
        if files.is_empty() {
            return;
        }
        let mut blocks = std::mem::take(waiting);
        blocks.extend(self.blocks_of(files));
        *waiting = self.add_blocks(blocks, folder, &mut Vec::new());
        if waiting.len() > MAX_WAITING {
            tracing::debug!(n = waiting.len(), "blocks of KV that continue unknown ones stay unused until a restart");
            waiting.truncate(MAX_WAITING);
        }
    }

    fn blocks_of(&self, files: &[StoredFile]) -> Vec<FoundBlock> {
        let found = read_labels(&self.key, files);
        self.count_refused(found.n_refused);
        found.blocks
    }

    /// Adds blocks, and notes when they were used. Returns those whose block before them is missing.
    fn add_blocks(
        &self,
        mut blocks: Vec<FoundBlock>,
        folder: &BlockFolder,
        uses: &mut Vec<(std::time::SystemTime, BlockId)>,
    ) -> Vec<FoundBlock> {
        // Several blocks may have the same tokens. The one with the most rows and the states comes last, so that later blocks continue it.
        blocks.sort_by(|FoundBlock { label: a, .. }, FoundBlock { label: b, .. }| {
            a.p0.cmp(&b.p0).then_with(|| b.starts.cmp(&a.starts)).then(a.has_state.cmp(&b.has_state))
        });
        let mut ends = BlockEnds::wanted_by(&blocks);
        ends.note_all(self);
        let mut left = Vec::new();
        for block in blocks {
            let label = &block.label;
            // Locked for each block anew, and until it is added: its scope may be forgotten at any time.
            let mut tree = self.tree();
            if self.forgotten().as_ref().is_some_and(|scopes| scopes.contains(&label.scope)) {
                drop(tree);
                folder.remove(&block.file.name);
                continue;
            }
            if label.model != self.model || label.span(&self.layout).is_none() {
                drop(tree);
                self.refuse(&block, folder);
                continue;
            }
            let before = match label.p0 {
                0 => Some(Vec::new()),
                n => ends.known.get(&(label.scope, label.before)).and_then(|id| {
                    let mut tokens = tree.tokens_to(*id);
                    tokens.truncate(n as usize);
                    (hash(&tokens) == label.before).then_some(tokens)
                }),
            };
            let added = before.and_then(|mut tokens| {
                let mut hasher = PrefixHasher::new();
                hasher.extend(&tokens);
                tokens.extend(&label.tokens);
                Some((tree.add(label.scope, &tokens, new_block(&block))?, hasher))
            });
            drop(tree);
            let Some((id, mut hasher)) = added else {
                left.push(block);
                continue;
            };
            uses.push((block.used, id));
            ends.note((label.scope, id), label.p0, &label.tokens, &mut hasher);
        }
        left
    }

    /// Removes a file that no prompt can use.
    fn refuse(&self, block: &FoundBlock, folder: &BlockFolder) {
        self.count_refused(1);
        tracing::warn!(
            file = block.file.name,
            "a file of the KV store is of another model or continues nothing, and is removed"
        );
        folder.remove(&block.file.name);
    }
}

fn new_block(FoundBlock { file, label, .. }: &FoundBlock) -> NewBlock {
    let BlockLabel { p0, tokens, starts, has_state, .. } = label;
    NewBlock {
        p0: *p0,
        tokens: tokens.as_slice().into(),
        starts: starts.clone(),
        has_state: *has_state,
        memory: None,
        file: BlockFile::Named(file.clone()),
    }
}

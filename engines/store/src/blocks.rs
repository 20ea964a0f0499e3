//! A model's blocks, which the threads of a store share: its tree, what is in memory, and its files.

use std::collections::HashSet;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use baton_schemas::kv::{KvLayout, PrefixHasher};
use baton_schemas::{CacheScope, Token};

use super::block::{FileName, KvBlock, PlaceInPrompt};
use super::clears::{ClearedKv, SeenClears};
use super::file::{BlockLabel, FileFault, FilePart, decode, encode};
use super::folder::{BlockFolder, BudgetKept, DiskOptions, FolderContent, FolderSizes, WrittenFile};
use super::seal::StoreKey;
use super::store_folder::WriteFault;
use super::tree::{BlockFile, BlockId, BlockTree};

/// How long the start of an engine waits for the files of the folder.
pub(super) const OPEN_WAIT: Duration = Duration::from_secs(2);

/// The most bytes beyond the memory's budget that wait to be written. Further blocks are dropped, the ends of prompts first.
const MAX_UNWRITTEN_BYTES: usize = 256 << 20;

/// What happened to a store since it was opened, as [`StoreReport`](baton_schemas::store_report::StoreReport) says.
#[derive(Debug, Default)]
pub(crate) struct StoreCounts {
    pub(crate) memory_tokens: AtomicU64,
    pub(crate) disk_tokens: AtomicU64,
    pub(crate) shared_steps: AtomicU64,
    pub(crate) most_step_tokens: AtomicU64,
    pub(crate) memory_evictions: AtomicU64,
    pub(crate) disk_evictions: AtomicU64,
    pub(crate) written_bytes: AtomicU64,
    pub(crate) failed_writes: AtomicU64,
    pub(crate) refused_files: AtomicU64,
}

/// A block to write.
pub(crate) struct WriteJob {
    pub(crate) id: BlockId,
    /// All tokens up to the block's end.
    pub(crate) tokens: Vec<Token>,
    pub(crate) scope: CacheScope,
    pub(crate) block: KvBlock,
    pub(crate) place: PlaceInPrompt,
}

/// All blocks of a model.
pub(crate) struct ModelBlocks {
    pub(crate) layout: Arc<KvLayout>,
    /// The hash of the weights, the vocabulary and the layout.
    pub(crate) model: [u8; 32],
    pub(crate) key: StoreKey,
    pub(crate) max_memory: usize,
    /// Its files say that they are not exact.
    pub(crate) writes_lossy: bool,
    pub(crate) tree: Mutex<BlockTree>,
    /// The tree has something to do for the disk's thread.
    pub(crate) has_chores: Condvar,
    /// Set once its files were found; never without a disk.
    pub(crate) folder: OnceLock<BlockFolder>,
    /// While files are read that the tree does not know yet: the scopes that were forgotten meanwhile. Locked after the tree.
    pub(crate) forgotten: Mutex<Option<HashSet<CacheScope>>>,
    pub(crate) folder_sizes: Mutex<FolderSizes>,
    pub(crate) clears: Mutex<SeenClears>,
    /// When the store was opened.
    pub(crate) opened: SystemTime,
    /// False: there is no disk, its files are not known yet, or it failed. So no block waits for it.
    pub(crate) can_write: AtomicBool,
    /// The store is being dropped.
    pub(crate) closes: AtomicBool,
    /// Called when the disk's thread has changed something.
    pub(crate) on_change: OnceLock<Arc<dyn Fn() + Send + Sync>>,
    pub(crate) counts: StoreCounts,
}

impl ModelBlocks {
    pub(crate) fn layout(&self) -> &KvLayout {
        &self.layout
    }

    pub(crate) fn tree(&self) -> MutexGuard<'_, BlockTree> {
        self.tree.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the folder, and adds the blocks of files that an earlier process wrote. From then on blocks are written. Errors: the
    /// folder cannot be used.
    pub(crate) fn open_folder(&self, options: DiskOptions) -> io::Result<()> {
        let folder = BlockFolder::open(options, &self.key, &self.model)?;
        if self.clears().begin(folder.path(), self.opened, OPEN_WAIT) {
            let mut tree = self.tree();
            tree.scopes().into_iter().for_each(|scope| tree.remove_scope(scope));
        }
        let FolderContent { new, sizes, .. } = folder.look(usize::MAX)?.unwrap_or_default();
        self.set_folder_sizes(sizes);
        // What is added can be read at once.
        let folder = self.folder.get_or_init(|| folder);
        self.add_found(&new, folder);
        // Unusable files were removed before, and push out nothing.
        match folder.keep_budget(&self.key) {
            Ok(BudgetKept { n_refused, removed, sizes }) => {
                self.set_folder_sizes(sizes);
                self.count_refused(n_refused);
                self.count_lost(self.tree().lose_files(|name| removed.contains(name)));
            }
            Err(fault) => {
                tracing::warn!(%fault, "the folder of the KV store is larger than its budget until a block is written");
            }
        }
        self.remember_forgotten(false);
        self.can_write.store(true, Ordering::Release);
        Ok(())
    }

    pub(crate) fn forgotten(&self) -> MutexGuard<'_, Option<HashSet<CacheScope>>> {
        self.forgotten.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// While files are read that the tree does not know yet, scopes that are forgotten are remembered, so that the files leave, too.
    pub(crate) fn remember_forgotten(&self, reads: bool) {
        // Locked, so that nobody forgets between the last file and this.
        let _tree = self.tree();
        let mut forgotten = self.forgotten();
        *forgotten = reads.then(|| forgotten.take().unwrap_or_default());
    }

    /// Removes the blocks of a scope, those too that the folder has, whether they are known yet or not.
    pub(crate) fn forget(&self, scope: CacheScope) {
        let mut tree = self.tree();
        self.forgotten().iter_mut().for_each(|forgotten| _ = forgotten.insert(scope));
        tree.remove_scope(scope);
    }

    pub(crate) fn clears(&self) -> MutexGuard<'_, SeenClears> {
        self.clears.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets what was cleared since the last look. Returns false if nothing was.
    pub(crate) fn forget_cleared(&self, folder: &BlockFolder) -> bool {
        // Until the end, so that whoever finds nothing also hears why.
        let mut clears = self.clears();
        let scopes = match clears.look(folder.path()) {
            None => return false,
            Some(ClearedKv::Of(scopes)) => scopes,
            Some(ClearedKv::All) => self.tree().scopes(),
        };
        scopes.into_iter().for_each(|scope| self.forget(scope));
        true
    }

    /// Frees memory until the blocks keep the budget, that of the block `newest` last. Blocks that wait to be written may take
    /// [`MAX_UNWRITTEN_BYTES`] more.
    pub(crate) fn trim(&self, tree: &mut BlockTree, newest: Option<BlockId>) {
        let can_write = self.can_write.load(Ordering::Acquire);
        let free = |tree: &mut BlockTree, keeps_unwritten: bool| {
            tree.free_cheapest(newest, keeps_unwritten) || tree.free_cheapest(None, keeps_unwritten)
        };
        while tree.memory_bytes() > self.max_memory {
            let may_wait = can_write && tree.memory_bytes() - self.max_memory <= MAX_UNWRITTEN_BYTES;
            if !((can_write && free(tree, true)) || (!may_wait && free(tree, false))) {
                return;
            }
            self.counts.memory_evictions.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn set_folder_sizes(&self, sizes: FolderSizes) {
        *self.folder_sizes.lock().unwrap_or_else(PoisonError::into_inner) = sizes;
    }

    pub(crate) fn count_refused(&self, n_files: u64) {
        self.counts.refused_files.fetch_add(n_files, Ordering::Relaxed);
    }

    pub(crate) fn count_lost(&self, n_files: u64) {
        self.counts.disk_evictions.fetch_add(n_files, Ordering::Relaxed);
    }

    /// Tells whoever wants to know that the disk's thread has changed something.
    pub(crate) fn tell(&self) {
        self.on_change.get().iter().for_each(|tell| tell());
    }

    pub(crate) fn remove_files(&self, names: &[String]) {
        if let Some(folder) = self.folder.get() {
            names.iter().for_each(|name| folder.remove(name));
        }
    }

    fn label(&self, job: &WriteJob) -> BlockLabel {
        let before = hash(&job.tokens[..job.block.chunk.p0 as usize]);
        BlockLabel::of(self.model, job.scope, before, &job.tokens, &job.block)
    }

    pub(crate) fn write(&self, job: &WriteJob) -> Result<WrittenFile, WriteFault> {
        let Some(folder) = self.folder.get() else { return Err(WriteFault::TooLarge) };
        let label = self.label(job);
        let file = encode(&self.key, &self.layout, folder.codec(), &label, &job.block)?;
        // Blocks of the same tokens may have other windowed rows.
        let content = serde_json::to_vec(&(&label, hash(&job.tokens))).map_err(io::Error::from)?;
        let written = folder.write(&self.key.name(&content), &file, &job.place)?;
        self.counts.written_bytes.fetch_add(file.len() as u64, Ordering::Relaxed);
        Ok(written)
    }

    /// A block, or that part of it, from its file. A whole one is kept in memory from now on if there is room.
    pub(crate) fn read(&self, id: BlockId, part: FilePart) -> Result<KvBlock, FileFault> {
        let gone = || FileFault::Gone;
        let folder = self.folder.get().ok_or_else(gone)?;
        let (name, label) = {
            let tree = self.tree();
            let node = tree.get(id).ok_or_else(gone)?;
            // Another restore has read it meanwhile.
            if let Some(block) = &node.memory {
                return Ok(block.clone());
            }
            let BlockFile::Named(FileName { name, .. }) = &node.file else { return Err(gone()) };
            let tokens = tree.tokens_to(id);
            let label = BlockLabel {
                model: self.model,
                scope: node.scope,
                before: hash(&tokens[..node.p0 as usize]),
                p0: node.p0,
                tokens: node.tokens.to_vec(),
                starts: node.starts.clone(),
                has_state: node.has_state,
            };
            (name.clone(), label)
        };
        let span = label.span(&self.layout).ok_or(FileFault::OtherBlock)?;
        let max_bytes = span.n_bytes(&self.layout) + self.layout.state_bytes() as u64 + MAX_EXTRA_BYTES;
        let part = if label.has_state { part } else { FilePart::All };
        let file = folder.read(&name, part, max_bytes);
        let block = file.and_then(|file| decode(&self.key, &self.layout, &label, (file, part)));
        let mut tree = self.tree();
        match block {
            Ok(block) => {
                if part == FilePart::All {
                    tree.set_memory(id, Some(block.clone()));
                    self.trim(&mut tree, None);
                }
                drop(tree);
                folder.count_hit(label.scope);
                Ok(block)
            }
            Err(fault) => {
                match &fault {
                    // To make room, or to clear the store. What continues it is of no use.
                    FileFault::Gone => self.count_lost(tree.lose_files(|lost| lost == name)),
                    // The disk, or this process, may be at fault. A later process reads it again.
                    FileFault::Read(error) => {
                        tree.remove(id);
                        tracing::warn!(file = name, error, "a file of the KV store cannot be read; it stays unused");
                    }
                    fault => {
                        tree.discard(id);
                        tracing::warn!(file = name, %fault, "a file of the KV store cannot be used; it is removed");
                        self.count_refused(1);
                    }
                }
                drop(tree);
                self.has_chores.notify_one();
                Err(fault)
            }
        }
    }
}

/// What a file has beside its values: a label of [`MAX_BLOCK_TOKENS`] tokens, and what sealing adds.
const MAX_EXTRA_BYTES: u64 = 1 << 20;

pub(crate) fn hash(tokens: &[Token]) -> [u8; 32] {
    let mut hasher = PrefixHasher::new();
    hasher.extend(tokens);
    hasher.hash()
}

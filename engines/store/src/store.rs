//! A model's store, and the thread that writes its files.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use baton_schemas::kv::{Fingerprint, KvLayout};
use baton_schemas::{CacheScope, Token};

use super::block::KvBlock;
use super::blocks::{ModelBlocks, StoreCounts, WriteJob};
use super::folder::{BlockFolder, DiskOptions, WrittenFile};
use super::restore::{Restore, WantedBlock};
use super::seal::StoreKey;
use super::tree::{BlockFile, BlockId, BlockTree, NewBlock, Path};

/// The most positions of a block.
pub const MAX_BLOCK_TOKENS: usize = 256;

/// The most blocks that wait.
const MAX_PENDING: usize = 4096;

/// How long nothing is written after the disk failed, as when it is full.
const PAUSE: Duration = Duration::from_secs(60);

/// How a store is opened.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// The most bytes in memory.
    pub memory_bytes: usize,
    /// `None`: memory alone.
    pub disk: Option<DiskOptions>,
}

/// What a store holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreSizes {
    /// Blocks in memory or on disk.
    pub n_blocks: usize,
    /// Bytes in memory.
    pub memory_bytes: usize,
    /// Bytes on disk, of all models in the folder.
    pub disk_bytes: u64,
    /// Bytes written today, by all processes that use the folder.
    pub written_today: u64,
}

/// The KV of a model's prompts. One thread adds and restores; dropping it waits until everything is written.
pub struct KvStore {
    shared: Arc<ModelBlocks>,
    writer: Option<(SyncSender<DiskJob>, JoinHandle<()>)>,
}

/// What the writing thread does.
enum DiskJob {
    Write(WriteJob),
    /// A block was used, and those before it.
    Used(BlockId),
}

impl KvStore {
    /// Opens a model's store, and finds what earlier processes have left in its folder. Errors: the folder cannot be used.
    pub fn open(
        options: StoreOptions,
        key: StoreKey,
        fingerprint: &Fingerprint,
        layout: Arc<KvLayout>,
    ) -> io::Result<KvStore> {
        let json = serde_json::to_vec(&(fingerprint, &*layout))?;
        let model = *blake3::hash(&json).as_bytes();
        let folder = options.disk.map(|disk| BlockFolder::open(disk, &key, &model)).transpose()?;
        let tree = Mutex::new(BlockTree::new(Arc::clone(&layout)));
        let (pending_bytes, counts) = (AtomicUsize::new(0), StoreCounts::default());
        let max_memory = options.memory_bytes;
        let shared = Arc::new(ModelBlocks { layout, model, key, max_memory, tree, folder, pending_bytes, counts });
        shared.find_files()?;
        let writer = match shared.folder {
            None => None,
            Some(_) => {
                let (sender, jobs) = sync_channel(MAX_PENDING);
                let writing = Arc::clone(&shared);
                let thread = std::thread::Builder::new().name("kv-store".into());
                Some((sender, thread.spawn(move || write_all(&writing, &jobs))?))
            }
        };
        Ok(KvStore { shared, writer })
    }

    /// The blocks with which a sequence of `tokens` can begin, and the number of its tokens that they hold.
    pub fn find(&self, scope: CacheScope, tokens: &[Token]) -> StoredPrefix {
        let tree = self.shared.tree();
        let path = tree.usable(scope, tokens);
        let in_memory = |id: &BlockId| tree.get(*id).is_some_and(|node| node.memory.is_some());
        let mut n_on_disk = 0;
        let mut p0 = 0;
        for (id, end) in path.blocks.iter().zip(tree.ends(&path)) {
            n_on_disk += if in_memory(id) { 0 } else { end - p0 };
            p0 = end;
        }
        StoredPrefix { path, n_on_disk }
    }

    /// The number of tokens that some stored prompt has in common with `tokens`, whether a sequence can go on there or not.
    pub fn n_common(&self, scope: CacheScope, tokens: &[Token]) -> usize {
        self.shared.tree().path(scope, tokens).n_tokens
    }

    /// The position from which on the KV of `tokens` is not in the store.
    pub fn vacant_from(&self, scope: CacheScope, tokens: &[Token]) -> usize {
        self.shared.tree().known(scope, tokens).n_tokens
    }

    /// Adds a block of the prompt `tokens`, behind the blocks before it. Returns false if one of them is missing or there is no
    /// room.
    pub fn add(&self, scope: CacheScope, tokens: &[Token], block: KvBlock) -> bool {
        let (p0, p1) = (block.chunk.p0 as usize, block.chunk.p1 as usize);
        if p1 > tokens.len() || block.check(&self.shared.layout).is_err() || block.n_bytes() > self.shared.max_memory {
            return false;
        }
        let n_bytes = block.n_bytes();
        let is_pending = self.writer.is_some() && self.shared.reserve(n_bytes);
        let new = NewBlock {
            p0: block.chunk.p0,
            tokens: tokens[p0..p1].into(),
            starts: block.chunk.sections.iter().map(|rows| rows.start).collect(),
            has_state: block.state.is_some(),
            memory: Some(block.clone()),
            file: if is_pending { BlockFile::Pending } else { BlockFile::None },
        };
        let mut tree = self.shared.tree();
        let added = tree.add(scope, tokens, new);
        let queued = match (added, &self.writer) {
            (Some(id), Some((writer, _))) if is_pending => {
                let job = WriteJob { id, tokens: tokens[..p1].to_vec(), scope, block };
                writer.try_send(DiskJob::Write(job)).is_ok()
            }
            _ => false,
        };
        if is_pending && !queued {
            self.shared.release(n_bytes);
            added.iter().for_each(|id| tree.set_file(*id, BlockFile::None));
        }
        self.shared.trim(&mut tree, added);
        added.is_some_and(|id| tree.get(id).is_some())
    }

    /// Begins to read what [`KvStore::find`] found. `wake` is called whenever a block was read from disk.
    pub fn restore(&self, prefix: &StoredPrefix, wake: Arc<dyn Fn() + Send + Sync>) -> Restore {
        self.restore_after(0, prefix, wake)
    }

    /// The same without the first `n_present` tokens. Only for a layout in which each row is that of one position, and whose
    /// layers attend to all positions and have no states.
    pub fn restore_after(&self, n_present: u32, prefix: &StoredPrefix, wake: Arc<dyn Fn() + Send + Sync>) -> Restore {
        let mut tree = self.shared.tree();
        prefix.path.blocks.last().iter().for_each(|id| tree.touch(**id));
        let wanted =
            prefix.path.blocks.iter().zip(tree.ends(&prefix.path)).filter(|(_, end)| *end > n_present as usize);
        let blocks = wanted.map(|(id, end)| {
            let memory = tree.get(*id).and_then(|node| node.memory.clone());
            WantedBlock { id: *id, memory, end: end as u32 }
        });
        let blocks = blocks.collect();
        drop(tree);
        if let (Some((writer, _)), Some(last)) = (&self.writer, prefix.path.blocks.last()) {
            // With a full queue it counts as used next time.
            _ = writer.try_send(DiskJob::Used(*last));
        }
        Restore::begin(&self.shared, blocks, n_present, wake)
    }

    /// Forgets the KV of a scope, in memory and on disk.
    pub fn forget(&self, scope: CacheScope) {
        let files = self.shared.tree().remove_scope(scope);
        self.shared.remove_files(&files);
    }

    pub(super) fn shared(&self) -> &ModelBlocks {
        &self.shared
    }

    /// What happened so far.
    pub fn counts(&self) -> &StoreCounts {
        &self.shared.counts
    }

    /// What it holds now.
    pub fn sizes(&self) -> StoreSizes {
        let (disk_bytes, written_today) = match &self.shared.folder {
            Some(folder) => (folder.total_bytes().unwrap_or(0), folder.written_today()),
            None => (0, 0),
        };
        let tree = self.shared.tree();
        StoreSizes { n_blocks: tree.len(), memory_bytes: tree.memory_bytes(), disk_bytes, written_today }
    }
}

impl Drop for KvStore {
    fn drop(&mut self) {
        if let Some((sender, thread)) = self.writer.take() {
            drop(sender);
            if thread.join().is_err() {
                tracing::error!("the thread that writes the KV store panicked");
            }
        }
    }
}

/// What a store has of a prompt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoredPrefix {
    path: Path,
    n_on_disk: usize,
}

impl StoredPrefix {
    /// The number of tokens.
    pub fn n_tokens(&self) -> usize {
        self.path.n_tokens
    }

    /// The number of its tokens that come from disk.
    pub fn n_on_disk(&self) -> usize {
        self.n_on_disk
    }
}

/// Writes blocks until the store is dropped. After a fault nothing is written for [`PAUSE`].
fn write_all(shared: &ModelBlocks, jobs: &Receiver<DiskJob>) {
    let mut paused_until = None;
    while let Ok(job) = jobs.recv() {
        let job = match job {
            DiskJob::Write(job) => job,
            DiskJob::Used(id) => {
                shared.note_use(id);
                continue;
            }
        };
        let is_paused = paused_until.is_some_and(|until| Instant::now() < until);
        let (is_wanted, can_be_found) = {
            let tree = shared.tree();
            (tree.get(job.id).is_some(), tree.continues_a_file(job.id))
        };
        let written = if is_paused || !is_wanted || !can_be_found { None } else { Some(shared.write(&job)) };
        let file = match written {
            Some(Ok(WrittenFile { name, removed })) => {
                let orphans = if removed.is_empty() { Vec::new() } else { shared.tree().lose_files(&removed) };
                shared.remove_files(&orphans);
                BlockFile::Named(name)
            }
            Some(Err(fault)) => {
                tracing::warn!(%fault, pause_s = PAUSE.as_secs(), "a block of KV cannot be written to the store");
                paused_until = Some(Instant::now() + PAUSE);
                BlockFile::None
            }
            None => BlockFile::None,
        };
        if file == BlockFile::None && is_wanted {
            shared.counts.failed_writes.fetch_add(1, Ordering::Relaxed);
        }
        shared.release(job.block.n_bytes());
        let mut tree = shared.tree();
        match (&file, tree.get(job.id).is_some()) {
            // Its scope was forgotten meanwhile.
            (BlockFile::Named(name), false) => shared.remove_files(std::slice::from_ref(name)),
            _ => tree.set_file(job.id, file),
        }
        shared.trim(&mut tree, None);
        drop(tree);
        // What continues a block is of no use without it.
        shared.note_use(job.id);
    }
}

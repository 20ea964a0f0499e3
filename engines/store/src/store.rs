//! A model's store.

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SendError, sync_channel};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use baton_schemas::kv::{Fingerprint, KvLayout};
use baton_schemas::store_report::StoreReport;
use baton_schemas::{CacheScope, Token};

use super::block::KvBlock;
use super::blocks::{ModelBlocks, OPEN_WAIT, StoreCounts};
use super::clears::ClearedKv;
use super::disk;
use super::folder::{DiskOptions, FolderSizes};
use super::reading::Readers;
use super::restore::{Restore, WantedBlock};
use super::seal::StoreKey;
use super::tree::{BlockFile, BlockId, BlockTree, NewBlock, Path, Reach, WantedKv};

/// The most positions of a block.
pub const MAX_BLOCK_TOKENS: usize = 256;

/// How long [`KvStore::close`] waits until everything is written: an engine's process that is stopped is killed after some seconds.
pub const CLOSE_DEADLINE: Duration = Duration::from_secs(2);

/// The same deadline for a store that is dropped without [`KvStore::close`]. A disk may hang.
const DROP_DEADLINE: Duration = Duration::from_secs(10);

/// How a store is opened.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// The most bytes in memory.
    pub memory_bytes: usize,
    /// `None`: memory alone.
    pub disk: Option<DiskOptions>,
}

/// The KV of a model's prompts. One thread adds and restores, and never waits for the disk. Dropping it waits until everything
/// is written, but not for long.
pub struct KvStore {
    shared: Arc<ModelBlocks>,
    disk: Option<DiskThreads>,
}

struct DiskThreads {
    readers: Readers,
    /// Closed when the thread that writes has ended.
    ended: Receiver<()>,
}

impl KvStore {
    /// Opens a model's store, and finds what earlier processes have left in its folder. If the disk takes longer than
    /// 2 s, the store holds nothing of it until it was read. Errors: the folder cannot be used.
    pub fn open(
        options: StoreOptions,
        key: StoreKey,
        fingerprint: &Fingerprint,
        layout: Arc<KvLayout>,
    ) -> io::Result<KvStore> {
        let json = serde_json::to_vec(&(fingerprint, &*layout))?;
        let model = *blake3::hash(&json).as_bytes();
        let shared = Arc::new(ModelBlocks {
            tree: Mutex::new(BlockTree::new(Arc::clone(&layout))),
            layout,
            model,
            key,
            max_memory: options.memory_bytes,
            has_chores: Condvar::new(),
            can_write: AtomicBool::new(false),
            folder: OnceLock::new(),
            writes_lossy: options.disk.as_ref().is_some_and(|disk| disk.codec.is_lossy()),
            forgotten: Mutex::new(options.disk.as_ref().map(|_| HashSet::new())),
            folder_sizes: Mutex::new(FolderSizes::default()),
            clears: Mutex::default(),
            opened: SystemTime::now(),
            closes: AtomicBool::new(false),
            on_change: OnceLock::new(),
            counts: StoreCounts::default(),
        });
        let disk = options.disk.map(|disk| DiskThreads::start(&shared, disk)).transpose()?;
        Ok(KvStore { shared, disk })
    }

    /// Calls `tell` from now on whenever the disk's thread has written or lost blocks: what the store holds is no longer the same.
    pub fn on_change(&self, tell: Arc<dyn Fn() + Send + Sync>) {
        if self.shared.on_change.set(tell).is_err() {
            tracing::error!("a KV store was given a second listener; it tells the first");
        }
    }

    /// The most bytes of a block's values.
    pub fn block_bytes(layout: &KvLayout) -> u64 {
        let rows = MAX_BLOCK_TOKENS.saturating_mul(layout.bytes_per_position());
        rows.saturating_add(layout.state_bytes()) as u64
    }

    /// Returns true if it has a disk.
    pub fn has_disk(&self) -> bool {
        self.disk.is_some()
    }

    /// Waits until everything is written that can be, for at most [`CLOSE_DEADLINE`]. From then on the store is in memory alone.
    pub fn close(&mut self) {
        self.close_within(CLOSE_DEADLINE);
    }

    fn close_within(&mut self, deadline: Duration) {
        let Some(disk) = self.disk.take() else { return };
        let tree = self.shared.tree();
        self.shared.closes.store(true, Ordering::Release);
        drop(tree);
        self.shared.has_chores.notify_one();
        if disk.ended.recv_timeout(deadline) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("not all KV could be written in time; what the disk lacks is lost if the process ends now");
        }
    }

    /// What can be given back now.
    pub(super) fn reach(&self) -> Reach {
        let hangs = self.disk.as_ref().is_some_and(|disk| disk.readers.hang());
        if hangs { Reach::Memory } else { Reach::All }
    }

    /// The blocks with which a sequence of `tokens` can begin, and the number of its tokens that they hold. While the disk does not
    /// answer, those in memory.
    pub fn find(&self, scope: CacheScope, tokens: &[Token]) -> StoredPrefix {
        self.find_kv(scope, tokens, WantedKv::Any)
    }

    /// The same, of wanted blocks only. If lossless KV is wanted and a block is lossy, [`KvStore::next_to_copy`] asks for it once it was
    /// computed.
    pub fn find_kv(&self, scope: CacheScope, tokens: &[Token], wanted: WantedKv) -> StoredPrefix {
        let mut tree = self.shared.tree();
        if wanted == WantedKv::Lossless {
            tree.want_lossless(scope, tokens);
        }
        let path = tree.usable(scope, tokens, self.reach(), wanted);
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

    /// The positions of `tokens` whose KV is to be added next, at most `max` of them; none if the store has all. They may have KV that
    /// went through a lossy codec, if lossless KV was looked for and the caller has that of the first `n_lossless` positions.
    pub fn next_to_copy(&self, scope: CacheScope, tokens: &[Token], n_lossless: usize, max: usize) -> Range<usize> {
        self.shared.tree().next_to_copy(scope, tokens, n_lossless, max)
    }

    /// Adds a block of the prompt `tokens`, behind the blocks before it. Returns false if one of them is missing or there is no
    /// room.
    pub fn add(&self, scope: CacheScope, tokens: &[Token], block: KvBlock) -> bool {
        let (p0, p1) = (block.chunk.p0 as usize, block.chunk.p1 as usize);
        if p1 > tokens.len() || block.check(&self.shared.layout).is_err() || block.n_bytes() > self.shared.max_memory {
            return false;
        }
        let new = NewBlock {
            p0: block.chunk.p0,
            tokens: tokens[p0..p1].into(),
            starts: block.chunk.sections.iter().map(|rows| rows.start).collect(),
            has_state: block.state.is_some(),
            file: if block.is_lossy && !self.shared.writes_lossy { BlockFile::Never } else { BlockFile::Wanted },
            memory: Some(block),
        };
        let mut tree = self.shared.tree();
        let added = tree.add(scope, tokens, new);
        self.shared.trim(&mut tree, added);
        self.shared.has_chores.notify_one();
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
        if let Some(id) = prefix.path.blocks.last() {
            tree.touch(*id);
            tree.show_use(*id);
        }
        let wanted =
            prefix.path.blocks.iter().zip(tree.ends(&prefix.path)).filter(|(_, end)| *end > n_present as usize);
        let blocks = wanted.map(|(id, end)| {
            let memory = tree.get(*id).and_then(|node| node.memory.clone());
            WantedBlock { id: *id, memory, end: end as u32 }
        });
        let blocks = blocks.collect();
        drop(tree);
        self.shared.has_chores.notify_one();
        let readers = self.disk.as_ref().map(|disk| disk.readers.clone());
        Restore::begin(&self.shared, readers, blocks, n_present, wake)
    }

    /// The tokens that were given back since it was opened.
    pub fn n_restored(&self) -> u64 {
        let counts = &self.shared.counts;
        counts.memory_tokens.load(Ordering::Relaxed) + counts.disk_tokens.load(Ordering::Relaxed)
    }

    /// Counts the tokens, if there are any, that were given back between two steps of streams.
    pub fn count_step(&self, n_tokens: u64) {
        let counts = &self.shared.counts;
        if n_tokens > 0 {
            counts.shared_steps.fetch_add(1, Ordering::Relaxed);
            counts.most_step_tokens.fetch_max(n_tokens, Ordering::Relaxed);
        }
    }

    /// Forgets the KV of a scope: at once in memory, and soon on disk.
    pub fn forget(&self, scope: CacheScope) {
        self.shared.forget(scope);
        self.shared.has_chores.notify_one();
    }

    /// The scopes that were cleared in the folder since the last call. The store has forgotten them already.
    pub fn take_cleared(&self) -> Option<ClearedKv> {
        self.shared.clears().take()
    }

    pub(super) fn shared(&self) -> &Arc<ModelBlocks> {
        &self.shared
    }

    /// What it holds now, and what happened to it. What is on disk was looked up some seconds ago.
    pub fn report(&self) -> StoreReport {
        let folder = *self.shared.folder_sizes.lock().unwrap_or_else(PoisonError::into_inner);
        let (blocks, memory_bytes) = {
            let tree = self.shared.tree();
            (tree.len() as u64, tree.memory_bytes() as u64)
        };
        let counts = &self.shared.counts;
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        StoreReport {
            blocks,
            memory_bytes,
            disk_bytes: folder.n_bytes,
            written_today_bytes: folder.written_today(),
            memory_tokens: of(&counts.memory_tokens),
            disk_tokens: of(&counts.disk_tokens),
            shared_steps: of(&counts.shared_steps),
            most_step_tokens: of(&counts.most_step_tokens),
            memory_evictions: of(&counts.memory_evictions),
            disk_evictions: of(&counts.disk_evictions),
            written_bytes: of(&counts.written_bytes),
            failed_writes: of(&counts.failed_writes),
            refused_files: of(&counts.refused_files),
        }
    }
}

impl DiskThreads {
    /// Errors: the folder cannot be used. A folder that takes longer than [`OPEN_WAIT`] is used once it was read, if it can be.
    fn start(shared: &Arc<ModelBlocks>, options: DiskOptions) -> io::Result<DiskThreads> {
        let readers = Readers::start(shared)?;
        let (running, ended) = sync_channel(0);
        let (opened, is_open) = sync_channel(1);
        let keeping = Arc::clone(shared);
        let thread = std::thread::Builder::new().name("kv-store".into());
        thread.spawn(move || {
            let _running = running;
            let outcome = keeping.open_folder(options);
            let is_usable = outcome.is_ok();
            if let Err(SendError(Err(error))) = opened.send(outcome) {
                tracing::error!(%error, "the disk of the KV store cannot be used; KV is kept in memory alone");
            }
            if is_usable {
                keeping.tell();
                disk::keep_files(&keeping);
            }
        })?;
        match is_open.recv_timeout(OPEN_WAIT) {
            Ok(outcome) => outcome?,
            Err(RecvTimeoutError::Timeout) => {
                tracing::warn!(
                    "the disk of the KV store is slow; until its folder is read, KV is kept in memory alone"
                );
            }
            Err(RecvTimeoutError::Disconnected) => return Err(io::Error::other("the thread of the disk has panicked")),
        }
        Ok(DiskThreads { readers, ended })
    }
}

impl Drop for KvStore {
    fn drop(&mut self) {
        self.close_within(DROP_DEADLINE);
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

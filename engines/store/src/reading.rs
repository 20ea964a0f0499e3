//! The threads that read blocks for all restores of a store.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::block::KvBlock;
use super::blocks::ModelBlocks;
use super::file::{FileFault, FilePart};
use super::tree::BlockId;

/// The threads with which a store reads: one reads while the other one decodes.
pub const READERS: usize = 2;

/// Blocks that wait for a thread.
const MAX_QUEUED: usize = 256;

/// While each thread has been busy with one block for longer, nothing is read from disk: it hangs.
const HANGS_AFTER: Duration = Duration::from_secs(3);

/// A block to read.
pub(crate) struct ReadJob {
    pub(crate) id: BlockId,
    pub(crate) part: FilePart,
    /// Nobody waits for the block any more once this is gone.
    pub(crate) wanted: Weak<()>,
    pub(crate) read: SyncSender<Result<KvBlock, FileFault>>,
    /// Called when it was sent.
    pub(crate) wake: Arc<dyn Fn() + Send + Sync>,
}

/// Since when each thread has been reading a block.
type Busy = Arc<Mutex<[Option<Instant>; READERS]>>;

/// The readers of a store. They end when it and all its restores are gone.
#[derive(Clone)]
pub(crate) struct Readers {
    jobs: SyncSender<ReadJob>,
    busy: Busy,
}

impl Readers {
    pub(crate) fn start(shared: &Arc<ModelBlocks>) -> io::Result<Readers> {
        let (jobs, queue) = sync_channel(MAX_QUEUED);
        let queue = Arc::new(Mutex::new(queue));
        let busy = Busy::default();
        for idx in 0..READERS {
            let (shared, queue, busy) = (Arc::clone(shared), Arc::clone(&queue), Arc::clone(&busy));
            let thread = std::thread::Builder::new().name("kv-restore".into());
            thread.spawn(move || read_all(&shared, &queue, |since| set(&busy, idx, since)))?;
        }
        Ok(Readers { jobs, busy })
    }

    /// Queues a block. Returns false if too many wait.
    pub(crate) fn read(&self, job: ReadJob) -> bool {
        self.jobs.try_send(job).is_ok()
    }

    /// Returns true while the disk does not answer.
    pub(crate) fn hang(&self) -> bool {
        let busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        busy.iter().all(|since| since.is_some_and(|since| since.elapsed() > HANGS_AFTER))
    }
}

fn set(busy: &Busy, idx: usize, since: Option<Instant>) {
    busy.lock().unwrap_or_else(PoisonError::into_inner)[idx] = since;
}

fn read_all(shared: &ModelBlocks, queue: &Mutex<Receiver<ReadJob>>, set_busy: impl Fn(Option<Instant>)) {
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
    while let Ok(ReadJob { id, part, wanted, read, wake }) = next() {
        if wanted.strong_count() == 0 {
            continue;
        }
        set_busy(Some(Instant::now()));
        let block = shared.read(id, part);
        set_busy(None);
        // The sequence may have ended meanwhile.
        _ = read.try_send(block);
        wake();
    }
}

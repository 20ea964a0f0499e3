//! Gives back the blocks of a prompt, in their order.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};

use baton_schemas::sequence::CachedTokens;

use super::block::KvBlock;
use super::blocks::ModelBlocks;
use super::file::{FileFault, FilePart};
use super::reading::{ReadJob, Readers};
use super::tree::BlockId;

/// Blocks that are read ahead, with the one that is used next.
const READ_AHEAD: usize = 3;

/// What a restore has now.
#[derive(Debug)]
pub enum Restored {
    /// The next block.
    Block(KvBlock),
    /// The next block is being read.
    Pending,
    /// There are no more.
    End,
    /// The rest cannot be read.
    Failed,
}

/// Blocks on their way back. Dropping it ends the reading.
pub struct Restore {
    /// In their order.
    left: VecDeque<WantedBlock>,
    /// The first of them that are not in memory: they are being read.
    asked: VecDeque<Receiver<Result<KvBlock, FileFault>>>,
    /// `None`: there is no disk.
    readers: Option<Readers>,
    wake: Arc<dyn Fn() + Send + Sync>,
    is_wanted: Arc<()>,
    /// The first position that is wanted. The first block may have earlier ones.
    start: u32,
    given: CachedTokens,
    shared: Arc<ModelBlocks>,
}

/// A block that is to come.
pub(crate) struct WantedBlock {
    pub(crate) id: BlockId,
    pub(crate) memory: Option<KvBlock>,
    /// One past its last position that is wanted.
    pub(crate) end: u32,
}

impl Restore {
    /// Begins to read those of the `blocks` that are not in memory.
    pub(crate) fn begin(
        shared: &Arc<ModelBlocks>,
        readers: Option<Readers>,
        blocks: Vec<WantedBlock>,
        start: u32,
        wake: Arc<dyn Fn() + Send + Sync>,
    ) -> Restore {
        let (left, asked) = (blocks.into(), VecDeque::new());
        let (is_wanted, given, shared) = (Arc::new(()), CachedTokens::default(), Arc::clone(shared));
        let mut restore = Restore { left, asked, readers, wake, is_wanted, start, given, shared };
        restore.ask();
        restore
    }

    /// Lets the next blocks be read that are not in memory.
    fn ask(&mut self) {
        let Some(readers) = &self.readers else { return };
        let n_left = self.left.len();
        let on_disk = self.left.iter().enumerate().filter(|(_, block)| block.memory.is_none());
        for (idx, block) in on_disk.skip(self.asked.len()).take(READ_AHEAD.saturating_sub(self.asked.len())) {
            let (read, receiver) = sync_channel(1);
            let (wanted, wake) = (Arc::downgrade(&self.is_wanted), Arc::clone(&self.wake));
            // If too many wait already, the receiver has no sender, and this restore fails.
            // The states of the last one are those that the prompt goes on with.
            let part = if idx + 1 == n_left { FilePart::All } else { FilePart::Rows };
            readers.read(ReadJob { id: block.id, part, wanted, read, wake });
            self.asked.push_back(receiver);
        }
    }

    /// The tokens of all blocks that it has given, by where they were.
    pub fn given(&self) -> CachedTokens {
        self.given
    }

    /// The next block, if it is there. Never waits.
    pub fn poll(&mut self) -> Restored {
        let Some(next) = self.left.front() else { return Restored::End };
        let (end, is_from_disk) = (next.end, next.memory.is_none());
        let block = match (&next.memory, self.asked.front()) {
            (Some(block), _) => block.clone(),
            (None, None) => return self.fail(),
            (None, Some(read)) => match read.try_recv() {
                Ok(Ok(block)) => block,
                Err(TryRecvError::Empty) => return Restored::Pending,
                Ok(Err(_)) | Err(TryRecvError::Disconnected) => return self.fail(),
            },
        };
        self.left.pop_front();
        if is_from_disk {
            self.asked.pop_front();
            self.ask();
        }
        self.give(block, end, is_from_disk)
    }

    fn fail(&mut self) -> Restored {
        self.left.clear();
        self.asked.clear();
        Restored::Failed
    }

    fn give(&mut self, block: KvBlock, end: u32, is_from_disk: bool) -> Restored {
        let block = block.up_to(end, self.shared.layout()).after(self.start);
        let n = block.chunk.n_positions();
        let counts = &self.shared.counts;
        let (given, all) = match is_from_disk {
            true => (&mut self.given.disk, &counts.disk_tokens),
            false => (&mut self.given.memory, &counts.memory_tokens),
        };
        *given += n;
        all.fetch_add(u64::from(n), Ordering::Relaxed);
        self.given.n_cached += n;
        Restored::Block(block)
    }
}

//! Gives back the blocks of a prompt, in their order.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};

use baton_schemas::sequence::CachedTokens;

use super::block::KvBlock;
use super::blocks::ModelBlocks;
use super::tree::BlockId;

/// Blocks that are read ahead of the one that is used.
const READ_AHEAD: usize = 2;

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
    /// Those that were in memory, up to the first that was not.
    ready: VecDeque<ReadBlock>,
    /// The rest, read by a thread.
    read: Option<Receiver<Option<ReadBlock>>>,
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

struct ReadBlock {
    block: KvBlock,
    end: u32,
    is_from_disk: bool,
}

impl Restore {
    /// Begins to read those of the `blocks` that are not in memory.
    pub(crate) fn begin(
        shared: &Arc<ModelBlocks>,
        blocks: Vec<WantedBlock>,
        start: u32,
        wake: Arc<dyn Fn() + Send + Sync>,
    ) -> Restore {
        let mut blocks = blocks.into_iter().peekable();
        let in_memory = std::iter::from_fn(|| {
            let WantedBlock { memory, end, .. } = blocks.next_if(|wanted| wanted.memory.is_some())?;
            memory.map(|block| ReadBlock { block, end, is_from_disk: false })
        });
        let ready = in_memory.collect();
        let rest: Vec<_> = blocks.collect();
        let read = (!rest.is_empty()).then(|| {
            let (sender, receiver) = sync_channel(READ_AHEAD);
            let reading = Arc::clone(shared);
            let thread = std::thread::Builder::new().name("kv-restore".into());
            if let Err(error) = thread.spawn(move || read_all(&reading, rest, &sender, &*wake)) {
                tracing::warn!(%error, "no thread can be started to read the KV store");
            }
            receiver
        });
        Restore { ready, read, start, given: CachedTokens::default(), shared: Arc::clone(shared) }
    }

    /// The tokens of all blocks that it has given, by where they were.
    pub fn given(&self) -> CachedTokens {
        self.given
    }

    /// The next block, if it is there. Never waits.
    pub fn poll(&mut self) -> Restored {
        if let Some(ready) = self.ready.pop_front() {
            return self.give(ready);
        }
        let Some(read) = &self.read else { return Restored::End };
        match read.try_recv() {
            Ok(Some(read)) => self.give(read),
            Ok(None) => {
                self.read = None;
                Restored::End
            }
            Err(TryRecvError::Empty) => Restored::Pending,
            Err(TryRecvError::Disconnected) => {
                self.read = None;
                Restored::Failed
            }
        }
    }

    fn give(&mut self, ReadBlock { block, end, is_from_disk }: ReadBlock) -> Restored {
        let block = block.up_to(end, self.shared.layout()).after(self.start);
        let n = block.chunk.n_positions();
        let counts = &self.shared.counts;
        let (given, all) = match is_from_disk {
            true => (&mut self.given.disk, &counts.tokens_from_disk),
            false => (&mut self.given.memory, &counts.tokens_from_memory),
        };
        *given += n;
        all.fetch_add(u64::from(n), Ordering::Relaxed);
        self.given.n_cached += n;
        Restored::Block(block)
    }
}

/// Sends blocks in their order, then `None`. Ends early if one cannot be read, or nobody wants them.
fn read_all(
    shared: &ModelBlocks,
    blocks: Vec<WantedBlock>,
    sender: &SyncSender<Option<ReadBlock>>,
    wake: &(dyn Fn() + Send + Sync),
) {
    for WantedBlock { id, memory, end } in blocks {
        let is_from_disk = memory.is_none();
        let Ok(block) = memory.map_or_else(|| shared.read(id), Ok) else { return };
        let read = ReadBlock { block, end, is_from_disk };
        if sender.send(Some(read)).is_err() {
            return;
        }
        wake();
    }
    _ = sender.send(None);
    wake();
}

//! The thread that changes a model's files: it writes blocks, removes files, shows that they were used, and looks for what other
//! processes have written and removed. No other thread waits for it, so a slow or hung disk costs neither a request nor a stream.

use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::block::{FileName, UsedFile};
use super::blocks::{ModelBlocks, WriteJob};
use super::finding::MAX_NEW_FILES;
use super::folder::{FolderContent, WrittenFile};
use super::labels::FoundBlock;
use super::store_folder::{WriteFault, today};
use super::tree::{BlockId, BlockTree};

/// How long nothing is written after the disk failed, as when it is full.
const PAUSE: Duration = Duration::from_secs(60);

/// How often it looks for what others have written and removed.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// The niceness of the thread that writes.
#[cfg(target_os = "linux")]
const WRITER_NICENESS: i32 = 10;

/// The next thing to do.
enum Chore {
    Remove(Vec<String>),
    /// The files of each prompt, the last one first.
    NoteUse(Vec<Vec<UsedFile>>),
    Look,
    Write(WriteJob),
    End,
}

/// When to do what.
struct Schedule {
    /// Nothing is written before.
    writes_at: Instant,
    looks_at: Instant,
    /// The last day on which no more might be written.
    worn_on: Option<u64>,
    /// Something has changed that nobody was told.
    has_news: bool,
}

impl Schedule {
    /// Writes nothing for a while.
    fn pause(&mut self, fault: &WriteFault) {
        self.writes_at = Instant::now() + PAUSE;
        let worn_on = matches!(fault, WriteFault::Worn).then(today);
        // A day's limit is told once.
        if worn_on.is_none() || worn_on != self.worn_on {
            tracing::warn!(%fault, pause_s = PAUSE.as_secs(), "a block of KV cannot be written to the store");
        }
        self.worn_on = worn_on.or(self.worn_on);
    }
}

/// Keeps the files of a store until it is closed and everything is written that can be.
pub(crate) fn keep_files(shared: &ModelBlocks) {
    yield_to_requests();
    let now = Instant::now();
    let mut waiting = Vec::new();
    let mut schedule = Schedule { writes_at: now, looks_at: now + LOOK_EVERY, worn_on: None, has_news: false };
    loop {
        match next(shared, &mut schedule) {
            Chore::Remove(files) => shared.remove_files(&files),
            Chore::NoteUse(prompts) => {
                let folder = shared.folder.get();
                folder.iter().for_each(|folder| prompts.iter().for_each(|files| folder.note_use(files)));
            }
            Chore::Look => {
                schedule.has_news |= look(shared, &mut waiting);
                schedule.looks_at = Instant::now() + LOOK_EVERY;
            }
            Chore::Write(job) => {
                schedule.has_news = true;
                if let Err(fault) = write(shared, job) {
                    schedule.pause(&fault);
                }
            }
            Chore::End => return,
        }
    }
}

/// Sealing and writing a long prompt's blocks takes the time of a core, which its next turn may need.
#[cfg(target_os = "linux")]
fn yield_to_requests() {
    // Linux gives each thread a niceness of its own; elsewhere it is the process's.
    if let Err(error) = rustix::process::setpriority_process(None, WRITER_NICENESS) {
        tracing::debug!(%error, "KV is written with the priority of requests");
    }
}

#[cfg(not(target_os = "linux"))]
fn yield_to_requests() {}

/// Waits until there is something to do. What is gone leaves first: a block that is added again may get a file of the same name.
fn next(shared: &ModelBlocks, schedule: &mut Schedule) -> Chore {
    let mut tree = shared.tree();
    loop {
        let orphans = tree.take_orphans();
        if !orphans.is_empty() {
            return Chore::Remove(orphans);
        }
        let used: Vec<_> = tree.take_used().into_iter().map(|id| tree.files_to(id)).collect();
        if !used.is_empty() {
            return Chore::NoteUse(used);
        }
        let closes = shared.closes.load(Ordering::Acquire);
        let now = Instant::now();
        if now >= schedule.looks_at && !closes {
            return Chore::Look;
        }
        if now >= schedule.writes_at
            && let Some(job) = tree.next_to_write().and_then(|id| job_of(&tree, id))
        {
            return Chore::Write(job);
        }
        if closes {
            return Chore::End;
        }
        if std::mem::take(&mut schedule.has_news) {
            drop(tree);
            shared.tell();
            tree = shared.tree();
            continue;
        }
        let waits_to_write = Some(schedule.writes_at).filter(|at| now < *at);
        let until = waits_to_write.map_or(schedule.looks_at, |at| at.min(schedule.looks_at));
        tree = wait(shared, tree, until.saturating_duration_since(now));
    }
}

fn wait<'t>(shared: &ModelBlocks, tree: MutexGuard<'t, BlockTree>, time: Duration) -> MutexGuard<'t, BlockTree> {
    shared.has_chores.wait_timeout(tree, time).unwrap_or_else(PoisonError::into_inner).0
}

fn job_of(tree: &BlockTree, id: BlockId) -> Option<WriteJob> {
    let node = tree.get(id)?;
    let (tokens, place) = (tree.tokens_to(id), tree.place(id)?);
    Some(WriteJob { id, tokens, scope: node.scope, block: node.memory.clone()?, place })
}

/// Writes a block. Errors: the disk's fault, so that nothing can be written for now.
fn write(shared: &ModelBlocks, job: WriteJob) -> Result<(), WriteFault> {
    let written = shared.write(&job);
    let mut tree = shared.tree();
    let outcome = match written {
        Ok(WrittenFile { name, removed, sizes }) => {
            shared.set_folder_sizes(sizes);
            if !removed.is_empty() {
                shared.count_lost(tree.lose_files(|name| removed.contains(name)));
            }
            tree.set_file(job.id, FileName { name, is_lossy: shared.writes_lossy });
            // What continues a block is of no use without it.
            tree.show_use(job.id);
            Ok(())
        }
        Err(fault) => {
            shared.counts.failed_writes.fetch_add(1, Ordering::Relaxed);
            match fault {
                WriteFault::TooLarge | WriteFault::Encode(_) => {
                    tracing::warn!(%fault, "a block of KV cannot be written to the store; it stays in memory");
                    tree.drop_file(job.id);
                    Ok(())
                }
                WriteFault::NoRoom => {
                    tracing::debug!(%fault, "a block of KV stays in memory alone");
                    tree.drop_file(job.id);
                    Ok(())
                }
                WriteFault::Worn | WriteFault::Locked | WriteFault::Io(_) => Err(fault),
            }
        }
    };
    // While nothing can be written, no memory is spent on waiting.
    shared.can_write.store(outcome.is_ok(), Ordering::Release);
    shared.trim(&mut tree, None);
    outcome
}

/// Finds what other processes have removed, to make room or to clear the store, and what they have written. Returns true if there is
/// something new. `waiting` are blocks that cannot be added yet.
fn look(shared: &ModelBlocks, waiting: &mut Vec<FoundBlock>) -> bool {
    let Some(folder) = shared.folder.get() else { return false };
    let has_forgotten = shared.forget_cleared(folder);
    shared.remember_forgotten(true);
    let content = folder.look(MAX_NEW_FILES).inspect_err(|error| {
        tracing::debug!(%error, "the folder of the KV store cannot be listed");
    });
    let content = content.unwrap_or_default();
    if let Some(FolderContent { names, new, sizes }) = &content {
        shared.set_folder_sizes(*sizes);
        let lost = shared.tree().lose_files(|name| !names.contains(name));
        shared.count_lost(lost);
        waiting.retain(|block| names.contains(&block.file.name));
        shared.take_up(new, folder, waiting);
    }
    shared.remember_forgotten(!waiting.is_empty());
    content.is_some() || has_forgotten
}

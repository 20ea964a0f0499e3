//! Usage: tokens, requests and engine seconds by key, model and day (UTC), kept in an SQLite file of the state folder.
//!
//! A request adds its usage to a batch in memory, which one thread commits about once a millisecond. The last
//! event of a reply waits for the commit of its batch, so the file has whatever a client was told, also after the process is
//! killed. A commit is in the system's cache, not yet on the disk: a power cut can cost the last seconds. A disk that is full or
//! slow delays a reply by a quarter of a second at most; the usage stays in memory until it can be written.

mod batch;
mod database;
mod keeper;
mod log_counts;
pub mod report;
mod request_usage;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::{oneshot, watch};

pub use self::batch::{KeptSeries, SecretId, UsageSums};
use self::batch::{UsageBatch, UsageRecord};
use self::database::UsageFile;
pub use self::database::UsageFileError;
pub use self::log_counts::log_counts;
pub use self::report::{UsageFilter, UsageReport};
pub use self::request_usage::RequestUsage;
use crate::account::budget::TokensSpent;

/// The end of a reply waits at most this long for its usage to be written.
const MAX_WAIT: Duration = Duration::from_millis(250);

/// Questions that wait for the thread.
const MAX_QUESTIONS: usize = 16;

/// The deadline of an answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// The end of the process waits at most this long for the last commit.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);

/// The usage of all keys. The default keeps none: its batch is never taken.
#[derive(Debug, Default)]
pub struct UsageLedger {
    shared: Arc<LedgerShared>,
    keeper: Mutex<Option<JoinHandle<()>>>,
    /// Replies whose end did not wait long enough for their usage to be written.
    n_late: AtomicU64,
}

/// State that requests and the thread share.
#[derive(Debug, Default)]
struct LedgerShared {
    pending: Mutex<PendingUsage>,
    /// Something is pending.
    wake: Condvar,
    written: watch::Sender<Written>,
    totals: Mutex<KeptTotals>,
}

/// Work that waits for the thread.
#[derive(Debug, Default)]
struct PendingUsage {
    batch: UsageBatch,
    /// The number of the batch.
    number: u64,
    /// At most [`MAX_QUESTIONS`].
    questions: Vec<UsageQuestion>,
    is_closing: bool,
}

/// The progress of the thread.
#[derive(Debug, Clone, Copy)]
struct Written {
    /// All batches below this one are in the file.
    below: u64,
    /// Nobody waits: nothing is kept in a file, or the file cannot be written.
    is_unkept: bool,
}

impl Default for Written {
    fn default() -> Written {
        Written { below: 0, is_unkept: true }
    }
}

/// Usage since the start, for the metrics.
#[derive(Debug, Default)]
struct KeptTotals {
    series: HashMap<KeptSeries, UsageSums>,
    n_failed_writes: u64,
    n_unsaved: u64,
}

/// A question to the file, which is answered after all usage before it is written.
#[derive(Debug)]
enum UsageQuestion {
    Report(UsageFilter, oneshot::Sender<Result<UsageReport, String>>),
    Spent(oneshot::Sender<Result<HashMap<String, TokensSpent>, String>>),
    LastUses(oneshot::Sender<Result<HashMap<SecretId, u64>, String>>),
}

/// The batch in which usage is written.
#[derive(Debug, Clone, Copy)]
#[must_use = "the end of the reply waits for it"]
pub struct BatchNumber(u64);

/// The usage cannot be read now: the file cannot be read, the disk is slow, or others ask, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("The usage cannot be read right now.")]
pub struct UsageUnreadable;

/// The state of the ledger, for the metrics.
#[derive(Debug, Clone, Default)]
pub struct LedgerState {
    pub series: Vec<(KeptSeries, UsageSums)>,
    /// Requests whose usage is not in the file.
    pub n_unsaved: u64,
    /// Commits that failed.
    pub n_failed_writes: u64,
    /// Replies that ended before their usage was in the file.
    pub n_late: u64,
}

impl UsageLedger {
    /// Opens the file in this folder and starts the thread; without a folder the usage is kept in memory, until the process ends.
    /// Errors: the file cannot be used.
    pub fn open(folder: Option<&Path>) -> Result<UsageLedger, UsageFileError> {
        let file = UsageFile::open(folder.map(file_in).as_deref())?;
        let shared = Arc::<LedgerShared>::default();
        shared.written.send_modify(|written| written.is_unkept = folder.is_none());
        let keeper = keeper::start(Arc::clone(&shared), file).map_err(UsageFileError::Thread)?;
        Ok(UsageLedger { shared, keeper: Mutex::new(Some(keeper)), n_late: AtomicU64::new(0) })
    }

    /// Adds the usage of a request to the next batch.
    fn record(&self, record: UsageRecord<'_>) -> BatchNumber {
        let mut pending = self.shared.pending();
        if pending.batch.is_empty() {
            self.shared.wake.notify_one();
        }
        pending.batch.add(record);
        BatchNumber(pending.number)
    }

    /// Waits until a batch is in the file, but not longer than a quarter of a second, and not while the file cannot be written.
    pub async fn written(&self, batch: BatchNumber) {
        let mut written = self.shared.written.subscribe();
        let is_done = |written: &Written| written.is_unkept || batch.0 < written.below;
        if is_done(&written.borrow_and_update()) {
            return;
        }
        if tokio::time::timeout(MAX_WAIT, written.wait_for(is_done)).await.is_err() {
            self.n_late.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the usage of past days. Errors: the file cannot be read, or not now.
    pub async fn report(&self, filter: UsageFilter) -> Result<UsageReport, UsageUnreadable> {
        let (to, answer) = oneshot::channel();
        self.ask(UsageQuestion::Report(filter, to), answer).await
    }

    /// Returns what each key has spent on this day and in this month. Errors: as of [`report`](Self::report).
    pub async fn spent(&self) -> Result<HashMap<String, TokensSpent>, UsageUnreadable> {
        let (to, answer) = oneshot::channel();
        self.ask(UsageQuestion::Spent(to), answer).await
    }

    /// Returns when each secret was last used, milliseconds since the Unix epoch. Errors: as of [`report`](Self::report).
    pub async fn last_uses(&self) -> Result<HashMap<SecretId, u64>, UsageUnreadable> {
        let (to, answer) = oneshot::channel();
        self.ask(UsageQuestion::LastUses(to), answer).await
    }

    async fn ask<T>(
        &self,
        question: UsageQuestion,
        answer: oneshot::Receiver<Result<T, String>>,
    ) -> Result<T, UsageUnreadable> {
        {
            let mut pending = self.shared.pending();
            if pending.questions.len() >= MAX_QUESTIONS || pending.is_closing {
                return Err(UsageUnreadable);
            }
            pending.questions.push(question);
            self.shared.wake.notify_one();
        }
        match tokio::time::timeout(ANSWER_WITHIN, answer).await {
            Ok(Ok(Ok(answer))) => Ok(answer),
            Ok(Ok(Err(error))) => {
                tracing::warn!(error, "the usage cannot be read");
                Err(UsageUnreadable)
            }
            Ok(Err(_)) | Err(_) => Err(UsageUnreadable),
        }
    }

    /// The usage since the start, and what could not be written.
    pub fn state(&self) -> LedgerState {
        let n_pending = self.shared.pending().batch.n_requests();
        let totals = self.shared.totals.lock().unwrap_or_else(PoisonError::into_inner);
        LedgerState {
            series: totals.series.iter().map(|(series, sums)| (series.clone(), *sums)).collect(),
            n_unsaved: totals.n_unsaved.saturating_add(n_pending),
            n_failed_writes: totals.n_failed_writes,
            n_late: self.n_late.load(Ordering::Relaxed),
        }
    }

    /// Writes what is pending and ends the thread. Usage that the disk does not take in time is lost.
    pub async fn close(&self) {
        let keeper = self.keeper.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(keeper) = keeper else { return };
        self.shared.pending().is_closing = true;
        self.shared.wake.notify_one();
        let joined = tokio::task::spawn_blocking(move || keeper.join());
        if tokio::time::timeout(CLOSE_WITHIN, joined).await.is_err() {
            tracing::warn!("the last usage could not be written: the disk does not answer");
        }
    }
}

impl LedgerShared {
    fn pending(&self) -> MutexGuard<'_, PendingUsage> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The name of the file in the state folder.
const FILE: &str = "usage.sqlite3";

/// The path of the file.
fn file_in(folder: &Path) -> PathBuf {
    folder.join(FILE)
}

#[cfg(test)]
mod tests;

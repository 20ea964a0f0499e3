//! The thread that writes the usage and answers questions about it.

use std::sync::{Arc, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{io, mem};

use super::batch::{MAX_SERIES, OTHER, UsageBatch};
use super::database::{BatchWriter, UsageFile};
use super::{LedgerShared, PendingUsage, UsageQuestion, Written};
use crate::utc_day::UtcDay;

/// After a commit the thread rests 49 times as long as the commit took, so that commits of up to 0.4 ms take a fiftieth of a core at
/// most. Requests that end meanwhile share the next commit. Their replies wait for it, so a rest has a bound.
const REST_FACTOR: u32 = 49;
const MIN_REST: Duration = Duration::from_millis(1);
const MAX_REST: Duration = Duration::from_millis(20);

/// The same where nothing is kept in a file, so no reply waits.
const MEMORY_PACE: Duration = Duration::from_millis(50);

/// After a commit that failed.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// The WAL is moved into the file after so many commits, or after a pause. They have a few kilobytes each.
const COMMITS_A_CHECKPOINT: u32 = 2_048;
const CHECKPOINT_PAUSE: Duration = Duration::from_secs(10);

/// Starts the thread, which ends when the ledger is closed.
pub(super) fn start(shared: Arc<LedgerShared>, file: UsageFile) -> io::Result<JoinHandle<()>> {
    let run = move || {
        let kept = file.writer().map(|writer| {
            let keeper = UsageKeeper {
                shared: &shared,
                file: &file,
                writer,
                unsaved: UsageBatch::default(),
                is_failing: false,
                n_commits: 0,
                today: UtcDay::today(),
            };
            keeper.run();
        });
        if let Err(error) = kept {
            tracing::error!(%error, "no usage is kept");
            shared.written.send_modify(|written| written.is_unkept = true);
        }
    };
    thread::Builder::new().name("usage".into()).spawn(run)
}

fn rest_after(took: Duration) -> Duration {
    took.saturating_mul(REST_FACTOR).clamp(MIN_REST, MAX_REST)
}

struct UsageKeeper<'k> {
    shared: &'k LedgerShared,
    file: &'k UsageFile,
    writer: BatchWriter<'k>,
    /// Usage that could not be written yet.
    unsaved: UsageBatch,
    is_failing: bool,
    /// Since the last checkpoint.
    n_commits: u32,
    today: UtcDay,
}

impl UsageKeeper<'_> {
    fn run(mut self) {
        loop {
            let PendingUsage { batch, number, questions, is_closing } = self.take();
            let began = Instant::now();
            self.count(&batch);
            self.unsaved.append(batch);
            self.commit(number);
            let took = began.elapsed();
            for question in questions {
                self.answer(question);
            }
            if is_closing {
                return self.finish();
            }
            thread::sleep(if self.file.is_in_memory() { MEMORY_PACE } else { rest_after(took) });
        }
    }

    /// Waits for something to do, and takes all of it. After a failure it waits longer, but questions are answered.
    fn take(&mut self) -> PendingUsage {
        let (pause, waits_for_usage) = match (self.is_failing, self.n_commits) {
            (true, _) => (Some(RETRY_PAUSE), false),
            (false, 0) => (None, true),
            (false, _) => (Some(CHECKPOINT_PAUSE), true),
        };
        let is_idle = |pending: &mut PendingUsage| {
            let has_usage = waits_for_usage && !pending.batch.is_empty();
            !has_usage && pending.questions.is_empty() && !pending.is_closing
        };
        let pending = self.shared.pending();
        let began = Instant::now();
        let mut pending = match pause {
            None => self.shared.wake.wait_while(pending, is_idle).unwrap_or_else(PoisonError::into_inner),
            Some(pause) => {
                let waited = self.shared.wake.wait_timeout_while(pending, pause, is_idle);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        };
        if !self.is_failing && pending.batch.is_empty() && pause.is_some_and(|pause| began.elapsed() >= pause) {
            drop(pending);
            self.checkpoint();
            pending = self.shared.pending();
        }
        let number = pending.number;
        pending.number += 1;
        PendingUsage {
            batch: mem::take(&mut pending.batch),
            number,
            questions: mem::take(&mut pending.questions),
            is_closing: pending.is_closing,
        }
    }

    fn count(&self, batch: &UsageBatch) {
        let mut totals = self.shared.totals.lock().unwrap_or_else(PoisonError::into_inner);
        for ((_, series), sums) in &batch.sums {
            let mut series = series.clone();
            if totals.series.len() >= MAX_SERIES && !totals.series.contains_key(&series) {
                series.model = OTHER.to_owned();
            }
            *totals.series.entry(series).or_default() += *sums;
        }
        totals.n_unsaved = totals.n_unsaved.saturating_add(batch.n_requests());
    }

    /// Writes what is not written yet. All batches up to this number are in it.
    fn commit(&mut self, number: u64) {
        let outcome = if self.unsaved.is_empty() { Ok(()) } else { self.writer.write(&self.unsaved) };
        let mut totals = self.shared.totals.lock().unwrap_or_else(PoisonError::into_inner);
        match outcome {
            Ok(()) => {
                if mem::take(&mut self.is_failing) {
                    tracing::warn!("the usage is written again");
                }
                self.n_commits += u32::from(!self.unsaved.is_empty());
                self.unsaved = UsageBatch::default();
                totals.n_unsaved = 0;
            }
            Err(error) => {
                if !mem::replace(&mut self.is_failing, true) {
                    tracing::warn!(%error, "the usage cannot be written; requests go on, and it is kept in memory until it can");
                }
                totals.n_failed_writes += 1;
            }
        }
        drop(totals);
        let is_failing = self.is_failing;
        let is_in_memory = self.file.is_in_memory();
        self.shared.written.send_modify(|written| {
            *written = Written {
                below: if is_failing { written.below } else { number + 1 },
                is_unkept: is_failing || is_in_memory,
            };
        });
        if self.n_commits >= COMMITS_A_CHECKPOINT {
            self.checkpoint();
        }
        let today = UtcDay::today();
        if today > self.today && !is_failing {
            self.today = today;
            if let Err(error) = self.file.remove_old(today) {
                tracing::warn!(%error, "old usage cannot be removed");
            }
        }
    }

    fn checkpoint(&mut self) {
        self.n_commits = 0;
        if let Err(error) = self.file.checkpoint() {
            tracing::warn!(%error, "the usage cannot be moved into its file; it stays in the file beside it");
        }
    }

    fn answer(&self, question: UsageQuestion) {
        // Whoever asked may have left.
        match question {
            UsageQuestion::Report(filter, to) => {
                drop(to.send(self.file.report(filter).map_err(|error| error.to_string())))
            }
            UsageQuestion::Spent(to) => drop(to.send(self.file.spent().map_err(|error| error.to_string()))),
            UsageQuestion::LastUses(to) => drop(to.send(self.file.last_uses().map_err(|error| error.to_string()))),
        }
    }

    fn finish(mut self) {
        if !self.unsaved.is_empty() {
            let n_requests = self.unsaved.n_requests();
            tracing::warn!(n_requests, "the usage of these requests is lost: it cannot be written");
        }
        self.checkpoint();
    }
}

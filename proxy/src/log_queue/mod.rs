//! The way of every line to standard error: a bounded queue, and one thread that writes.
//!
//! A reader may stop reading: a full pipe, a terminal after Ctrl-S. Then only this thread waits. Lines that do not fit
//! are dropped and counted; as soon as there is room again, a line says how many. `tracing-appender` has such a queue,
//! too. It bounds lines, not bytes, does not say what it dropped, and cannot wait for a line that may be the last.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::mem;
use std::os::fd::AsFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use anstream::adapter::strip_str;
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

/// The lines of a busy second at the level debug.
const MAX_QUEUED_BYTES: usize = 256 << 10;

/// How long the caller waits for a line that may be its last. A line takes microseconds when somebody reads.
pub const MAX_WAIT: Duration = Duration::from_millis(250);

/// The same at the end of the process, when a slow reader may still have a whole queue to read.
const MAX_WAIT_AT_EXIT: Duration = Duration::from_secs(1);

/// The pause before a write is tried again, if somebody else has made standard error non-blocking.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// The last lines that are remembered for operators: some screens.
const MAX_RECENT_LINES: usize = 200;
const MAX_RECENT_BYTES: usize = 64 << 10;

/// The queue of this process.
pub static LOG: LogQueue = LogQueue::new();

/// Makes the line that says how many lines were dropped.
pub type DropNotice = fn(n_dropped: u64) -> String;

/// Lines that wait to be written.
#[derive(Debug)]
pub struct LogQueue {
    state: Mutex<State>,
    /// There is something to write.
    filled: Condvar,
    /// A line was written.
    progress: Condvar,
}

#[derive(Debug)]
struct State {
    /// False until a thread writes: lines are then written at once.
    is_started: bool,
    lines: Vec<Vec<u8>>,
    /// The last lines, also those that were written or dropped.
    recent: VecDeque<Vec<u8>>,
    /// Bytes of `recent`.
    n_recent_bytes: usize,
    /// Bytes of `lines`.
    n_bytes: usize,
    /// Lines that were queued, and those of them that were written.
    n_queued: u64,
    n_written: u64,
    /// Lines that were dropped, and those of them that no notice has counted yet. Every one of these is newer than `lines`.
    n_dropped: u64,
    n_untold: u64,
    /// A caller has waited in vain, and the reader has not caught up since.
    is_stalled: bool,
}

impl LogQueue {
    const fn new() -> LogQueue {
        LogQueue {
            state: Mutex::new(State {
                is_started: false,
                lines: Vec::new(),
                recent: VecDeque::new(),
                n_recent_bytes: 0,
                n_bytes: 0,
                n_queued: 0,
                n_written: 0,
                n_dropped: 0,
                n_untold: 0,
                is_stalled: false,
            }),
            filled: Condvar::new(),
            progress: Condvar::new(),
        }
    }

    /// Starts the thread that writes to standard error. Errors: the system has no thread or no descriptor left.
    pub fn start(&'static self, notice: DropNotice) -> io::Result<()> {
        // Its own descriptor: a write that hangs must not hold the standard library's lock.
        let out = File::from(io::stderr().as_fd().try_clone_to_owned()?);
        self.start_with(out, notice)
    }

    fn start_with(&'static self, out: impl Write + Send + 'static, notice: DropNotice) -> io::Result<()> {
        let mut state = self.lock();
        thread::Builder::new().name("log".into()).spawn(move || self.write_all(out, notice))?;
        state.is_started = true;
        Ok(())
    }

    /// Queues a line, with its line feed. It is dropped if the queue is full.
    fn push(&self, line: &[u8]) {
        let mut state = self.lock();
        state.remember(line);
        if !state.is_started {
            // There is no other place to report an error.
            let _ = io::stderr().write_all(line);
            return;
        }
        // After a dropped line the next ones are dropped, too, so that the notice stands where the gap is.
        if state.n_untold > 0 || state.n_bytes.saturating_add(line.len()) > MAX_QUEUED_BYTES {
            state.n_dropped += 1;
            state.n_untold += 1;
        } else {
            state.n_bytes += line.len();
            state.n_queued += 1;
            state.lines.push(line.to_vec());
        }
        drop(state);
        self.filled.notify_one();
    }

    /// Queues a line that may be the last of this process, and waits a little until it is written. Does not wait while nobody
    /// reads.
    pub fn push_last(&self, line: &[u8]) {
        self.push(line);
        self.wait(MAX_WAIT);
    }

    /// Waits until all lines are written. Returns after a second at the latest.
    pub fn flush(&self) {
        self.lock().is_stalled = false;
        self.wait(MAX_WAIT_AT_EXIT);
    }

    /// The last lines that were reported, the oldest first, without their line feeds and colours. Not those of child processes.
    pub fn recent(&self) -> Vec<String> {
        let recent: Vec<Vec<u8>> = self.lock().recent.iter().cloned().collect();
        let text = |line: Vec<u8>| strip_str(String::from_utf8_lossy(&line).trim_end()).to_string();
        recent.into_iter().map(text).collect()
    }

    /// Lines that were dropped since the start of the process.
    pub fn n_dropped(&self) -> u64 {
        self.lock().n_dropped
    }

    fn wait(&self, most: Duration) {
        let state = self.lock();
        if state.is_stalled {
            return;
        }
        // The next line that is queued is the notice, if one is due.
        let last = state.n_queued + u64::from(state.n_untold > 0);
        let waited = self.progress.wait_timeout_while(state, most, |state| state.n_written < last);
        let (mut state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            state.is_stalled = true;
        }
    }

    /// Writes what is queued, for ever. Writes each line by itself: lines of several processes may share a pipe.
    fn write_all(&self, mut out: impl Write, notice: DropNotice) {
        loop {
            let waiting = |state: &mut State| state.lines.is_empty() && state.n_untold == 0;
            let state = self.filled.wait_while(self.lock(), waiting);
            let mut state = state.unwrap_or_else(PoisonError::into_inner);
            let mut lines = mem::take(&mut state.lines);
            state.n_bytes = 0;
            let n_untold = mem::take(&mut state.n_untold);
            if n_untold > 0 {
                lines.push(notice(n_untold).into_bytes());
                state.n_queued += 1;
            }
            drop(state);
            for line in lines {
                write_line(&mut out, &line);
                let mut state = self.lock();
                state.n_written += 1;
                state.is_stalled &= state.n_written < state.n_queued;
                drop(state);
                self.progress.notify_all();
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn remember(&mut self, line: &[u8]) {
        let line = &line[..line.len().min(MAX_RECENT_BYTES)];
        self.n_recent_bytes += line.len();
        self.recent.push_back(line.to_vec());
        while self.recent.len() > MAX_RECENT_LINES || self.n_recent_bytes > MAX_RECENT_BYTES {
            self.n_recent_bytes -= self.recent.pop_front().map_or(0, |line| line.len());
        }
    }
}

/// Ignores errors: there is no other place to report them, and the reader may have closed the pipe.
fn write_line(out: &mut impl Write, mut line: &[u8]) {
    while !line.is_empty() {
        match out.write(line) {
            Ok(n) if n > 0 => line = &line[n..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(RETRY_INTERVAL),
            Ok(_) | Err(_) => return,
        }
    }
}

impl<'a> MakeWriter<'a> for &'static LogQueue {
    type Writer = LogWriter;

    fn make_writer(&'a self) -> LogWriter {
        LogWriter { log: self, may_be_last: false }
    }

    /// The process may end after an error, without a chance to wait for the queue: the engine aborts, a worker is lost.
    fn make_writer_for(&'a self, metadata: &Metadata<'_>) -> LogWriter {
        LogWriter { log: self, may_be_last: *metadata.level() == Level::ERROR }
    }
}

/// Takes a line of the log in one write.
#[derive(Debug)]
pub struct LogWriter {
    log: &'static LogQueue,
    may_be_last: bool,
}

impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        match self.may_be_last {
            true => self.log.push_last(line),
            false => self.log.push(line),
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Ends the process after its last lines.
pub fn exit(code: i32) -> ! {
    LOG.flush();
    std::process::exit(code)
}

#[cfg(test)]
mod tests;

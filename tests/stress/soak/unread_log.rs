//! The log of an endpoint whose reader stops now and then.

use std::io::{BufRead, BufReader, PipeReader, PipeWriter, pipe};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// The time between two looks if the log is to be read again.
const PAUSE: Duration = Duration::from_millis(20);

/// The reader of a log.
#[derive(Debug, Default)]
pub(super) struct UnreadLog {
    is_stalled: AtomicBool,
    n_told: AtomicU64,
}

impl UnreadLog {
    /// A log that is read, and where to write it.
    pub(super) fn start() -> (Arc<UnreadLog>, PipeWriter) {
        let (reader, writer) = pipe().unwrap();
        let log = Arc::<UnreadLog>::default();
        let own = Arc::clone(&log);
        std::thread::spawn(move || own.read(reader));
        (log, writer)
    }

    /// Reads until the last writer has ended.
    fn read(&self, reader: PipeReader) {
        for line in BufReader::new(reader).lines() {
            while self.is_stalled.load(Ordering::Relaxed) {
                std::thread::sleep(PAUSE);
            }
            // Bytes of two processes may mix.
            let Ok(line) = line else { continue };
            self.n_told.fetch_add(n_missing(&line).unwrap_or(0), Ordering::Relaxed);
        }
    }

    pub(super) fn stall(&self) {
        self.is_stalled.store(true, Ordering::Relaxed);
    }

    pub(super) fn go_on(&self) {
        self.is_stalled.store(false, Ordering::Relaxed);
    }

    /// The missing lines of which the log has told, those of the endpoint's engines, too.
    pub(super) fn n_told(&self) -> u64 {
        self.n_told.load(Ordering::Relaxed)
    }
}

/// The lines that are missing at a line that says so.
fn n_missing(line: &str) -> Option<u64> {
    let (_, rest) = line.split_once(" ERROR the log dropped ")?;
    rest.split(' ').next()?.replace(',', "").parse().ok()
}

//! The progress of a pull: a small trait, and its implementations for a terminal and a log.

use std::io::{IsTerminal, Write, stderr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Receives a pull's progress, on any thread. Implementations must return quickly.
pub trait DownloadProgress: Send + Sync {
    /// A file starts, or starts again. `total_bytes` is `None` if the server does not report it.
    fn started(&self, name: &str, total_bytes: Option<u64>);
    /// The received bytes of the file, including those of an earlier pull.
    fn reached(&self, done_bytes: u64);
    /// The file is complete and its checksum is right.
    fn finished(&self);
    /// A notice for the operator, such as a retry or a wait. One line.
    fn notice(&self, line: &str);
}

/// Drops all progress.
#[derive(Debug, Clone, Copy)]
pub struct Silent;

impl DownloadProgress for Silent {
    fn started(&self, _name: &str, _total_bytes: Option<u64>) {}
    fn reached(&self, _done_bytes: u64) {}
    fn finished(&self) {}
    fn notice(&self, _line: &str) {}
}

/// A progress bar if standard error is a terminal, otherwise plain lines at intervals.
pub fn to_stderr() -> Box<dyn DownloadProgress> {
    if stderr().is_terminal() { Box::new(TerminalBar::new()) } else { Box::new(LogLines::new(stderr())) }
}

struct TerminalBar {
    bar: ProgressBar,
    /// Bytes of this file were reported. Those of an earlier pull come first, and tell nothing of the speed.
    has_begun: AtomicBool,
}

impl TerminalBar {
    fn new() -> Self {
        // Nothing is drawn before a file starts.
        TerminalBar {
            bar: ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::hidden()),
            has_begun: AtomicBool::new(false),
        }
    }
}

impl DownloadProgress for TerminalBar {
    fn started(&self, name: &str, total_bytes: Option<u64>) {
        let template = match total_bytes {
            Some(_) => "{msg} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            None => "{msg} {spinner} {bytes} {bytes_per_sec}",
        };
        // Every change of it would be drawn.
        self.bar.set_draw_target(ProgressDrawTarget::hidden());
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.bar.set_style(style);
        }
        match total_bytes {
            Some(total) => self.bar.set_length(total),
            None => self.bar.unset_length(),
        }
        self.bar.set_message(name.to_owned());
        self.bar.reset();
        self.has_begun.store(false, Ordering::Relaxed);
        self.bar.set_draw_target(ProgressDrawTarget::stderr());
    }

    fn reached(&self, done_bytes: u64) {
        self.bar.set_position(done_bytes);
        if !self.has_begun.swap(true, Ordering::Relaxed) {
            self.bar.reset_eta();
        }
    }

    fn finished(&self) {
        // A line stays on the screen, and the bar makes room for the next file.
        self.bar.finish_and_clear();
        let _ = writeln!(stderr(), "{}: done", self.bar.message());
    }

    fn notice(&self, line: &str) {
        self.bar.suspend(|| {
            let _ = writeln!(stderr(), "{line}");
        });
    }
}

/// The shortest time between two lines.
const LINE_INTERVAL: Duration = Duration::from_secs(10);
/// The smallest progress between two lines.
const LINE_PERCENT: u64 = 10;

/// Progress as plain lines.
struct LogLines<W> {
    state: Mutex<LogState<W>>,
}

struct LogState<W> {
    out: W,
    name: String,
    total_bytes: Option<u64>,
    last_line: Instant,
    last_percent: u64,
}

impl<W: Write> LogLines<W> {
    fn new(out: W) -> Self {
        let state =
            LogState { out, name: String::new(), total_bytes: None, last_line: Instant::now(), last_percent: 0 };
        LogLines { state: Mutex::new(state) }
    }

    fn with(&self, tell: impl FnOnce(&mut LogState<W>)) {
        tell(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl<W: Write + Send> DownloadProgress for LogLines<W> {
    fn started(&self, name: &str, total_bytes: Option<u64>) {
        self.with(|state| {
            state.name = name.to_owned();
            state.total_bytes = total_bytes;
            state.last_line = Instant::now();
            state.last_percent = 0;
            // A failed write to the log must not stop the pull, here and below.
            let _ = match total_bytes {
                Some(total) => writeln!(state.out, "{name}: {} to get", mebibytes(total)),
                None => writeln!(state.out, "{name}: size unknown"),
            };
        });
    }

    fn reached(&self, done_bytes: u64) {
        self.with(|state| {
            let percent = done_bytes.saturating_mul(100).checked_div(state.total_bytes.unwrap_or(0)).unwrap_or(0);
            let far_enough = state.total_bytes.is_none() || percent >= state.last_percent + LINE_PERCENT;
            if far_enough && state.last_line.elapsed() >= LINE_INTERVAL {
                state.last_line = Instant::now();
                state.last_percent = percent;
                let _ = match state.total_bytes {
                    Some(_) => writeln!(state.out, "{}: {percent} %", state.name),
                    None => writeln!(state.out, "{}: {}", state.name, mebibytes(done_bytes)),
                };
            }
        });
    }

    fn finished(&self) {
        self.with(|state| {
            let _ = writeln!(state.out, "{}: done", state.name);
        });
    }

    fn notice(&self, line: &str) {
        self.with(|state| {
            let _ = writeln!(state.out, "{line}");
        });
    }
}

fn mebibytes(n_bytes: u64) -> String {
    format!("{:.1} MiB", n_bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_gets_few_lines_however_many_steps_there_are() {
        let lines = LogLines::new(Vec::new());
        lines.started("a.gguf", Some(5 << 20));
        (0..1000).for_each(|i| lines.reached(i * 5000));
        lines.notice("trying again");
        lines.finished();
        let out = String::from_utf8(lines.state.into_inner().unwrap().out).unwrap();
        assert_eq!(out, "a.gguf: 5.0 MiB to get\ntrying again\na.gguf: done\n");
    }

    #[test]
    fn an_empty_file_has_no_percentage() {
        let lines = LogLines::new(Vec::new());
        lines.started("a", Some(0));
        lines.reached(0);
        lines.finished();
    }
}

//! Output of commands. `println!` would panic, and end a server, when the reader has closed the pipe.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::mpsc;
use std::thread;

use baton_proxy::log_queue::{LOG, MAX_WAIT};
use tracing::Level;

use super::log::{self, LogFormat};

/// Writes to standard output. Returns false if the reader has closed the pipe, which is no error: `head` has read enough.
/// Errors: the system's, such as a full disk.
pub(super) fn print(text: impl Display) -> io::Result<bool> {
    let mut out = io::stdout().lock();
    match write!(out, "{text}").and_then(|()| out.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error),
    }
}

/// Writes a line to standard output. Errors: as of [`print`].
pub(super) fn print_line(text: impl Display) -> io::Result<()> {
    print(format_args!("{text}\n")).map(drop)
}

/// Writes a line to standard output for a server, which must go on when nobody reads it: after a moment this returns, and
/// a thread waits.
pub(super) fn announce(text: String) {
    let (done, is_done) = mpsc::channel();
    let write = move || {
        if let Err(error) = print_line(text) {
            tracing::debug!(%error, "a message could not be written: standard output is closed");
        }
        // Nobody may wait any more.
        let _ = done.send(());
    };
    match thread::Builder::new().name("output".into()).spawn(write) {
        Ok(_) => drop(is_done.recv_timeout(MAX_WAIT)),
        Err(error) => tracing::warn!(%error, "a message could not be written"),
    }
}

/// Writes a line to standard error, in the log's format: as it is, or as a JSON object.
pub(super) fn note(text: impl Display) {
    write_note(Level::INFO, &text.to_string());
}

/// The same for why this command ends.
pub(super) fn note_failure(text: impl Display) {
    write_note(Level::ERROR, &text.to_string());
}

fn write_note(level: Level, text: &str) {
    let line = match log::format() {
        LogFormat::Text => format!("{text}\n"),
        LogFormat::Json => LogFormat::Json.line(level, text),
    };
    LOG.push_last(line.as_bytes());
}

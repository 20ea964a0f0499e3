//! Output of commands. `println!` would panic, and end a server, when the reader has closed the pipe.

use std::fmt::Display;
use std::io::{self, Write};

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

/// Writes a line to standard error. Ignores errors: there is no other place to report them.
pub(super) fn note(text: impl Display) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// The text with `?` for control characters: text from another machine must not control this terminal.
pub(super) fn without_controls(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

//! Output of commands. `println!` panics when the reader has closed the pipe, and would end a server with it.

use std::fmt::Display;
use std::io::{self, Write};

/// Writes a line to standard output. Errors: the system's; a server goes on without its reader.
pub(super) fn print_line(text: impl Display) -> io::Result<()> {
    write_line(io::stdout().lock(), text)
}

/// Writes a line to standard error, if anybody reads it.
pub(super) fn note(text: impl Display) {
    // There is nowhere else to complain.
    let _ = write_line(io::stderr().lock(), text);
}

fn write_line(mut to: impl Write, text: impl Display) -> io::Result<()> {
    writeln!(to, "{text}")?;
    to.flush()
}

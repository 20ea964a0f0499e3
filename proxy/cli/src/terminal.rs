//! Output of commands. `println!` would panic, and end a server, when the reader has closed the pipe.

use std::fmt::Display;
use std::io::{self, Write};

/// Writes a line to standard output. Errors: the system's; a server goes on without its reader.
pub(super) fn print_line(text: impl Display) -> io::Result<()> {
    write_line(io::stdout().lock(), text)
}

/// Writes a line to standard error. Ignores errors: there is no other place to report them.
pub(super) fn note(text: impl Display) {
    let _ = write_line(io::stderr().lock(), text);
}

fn write_line(mut to: impl Write, text: impl Display) -> io::Result<()> {
    writeln!(to, "{text}")?;
    to.flush()
}

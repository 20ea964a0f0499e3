//! Reads small text files with a limit on their size.

use std::io::{self, Read};
use std::path::Path;

/// Reads a text of at most `most` bytes. Errors: the system's, no regular file, or a longer text.
pub(crate) fn read_text(path: &Path, most: u64) -> io::Result<String> {
    // Reading a pipe or a device may never end.
    let metadata = std::fs::metadata(path)?;
    if !metadata.is_file() && !metadata.is_dir() {
        return Err(io::Error::other("it is no regular file"));
    }
    let mut text = String::new();
    std::fs::File::open(path)?.take(most + 1).read_to_string(&mut text)?;
    match text.len() as u64 > most {
        true => Err(io::Error::other(format!("it is larger than {most} bytes"))),
        false => Ok(text),
    }
}

//! Opens a folder's files, and reads whole files of bounded length.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;

use super::error::FolderError;

/// The most values of a JSON file, by its punctuation. The largest tokenizers have some two million.
const MAX_VALUES: usize = 6 << 20;

/// Opens a file to read it.
pub(super) fn open(path: &Path) -> Result<File, FolderError> {
    let unreadable = |source| FolderError::unreadable(path, source);
    // Reading a device or a pipe might never end, or never begin.
    match std::fs::metadata(path).map_err(unreadable)?.is_file() {
        true => File::open(path).map_err(unreadable),
        false => Err(unreadable(io::Error::other("it is no regular file"))),
    }
}

/// Reads a JSON file of at most `max_bytes`.
pub(super) fn read_json<T: DeserializeOwned>(path: &Path, max_bytes: u64) -> Result<T, FolderError> {
    parse_json(path, &read(path, max_bytes)?)
}

/// Parses the JSON of a file.
pub(super) fn parse_json<T: DeserializeOwned>(path: &Path, text: &[u8]) -> Result<T, FolderError> {
    // Some fields become trees, in which a value of two bytes takes a hundred.
    let n_values = text.iter().filter(|byte| matches!(byte, b',' | b'[' | b'{')).count();
    if n_values > MAX_VALUES {
        return Err(FolderError::malformed(path, format!("it has more than {MAX_VALUES} values")));
    }
    serde_json::from_slice(text).map_err(|source| FolderError::Json { path: path.to_owned(), source })
}

/// Reads a file of at most `max_bytes`.
pub(super) fn read(path: &Path, max_bytes: u64) -> Result<Vec<u8>, FolderError> {
    let unreadable = |source| FolderError::unreadable(path, source);
    let mut text = Vec::new();
    open(path)?.take(max_bytes + 1).read_to_end(&mut text).map_err(unreadable)?;
    if text.len() as u64 > max_bytes {
        return Err(FolderError::TooLong { path: path.to_owned(), max_bytes });
    }
    Ok(text)
}

/// The path of a file that may be missing.
pub(super) fn existing(folder: &Path, name: &str) -> Option<PathBuf> {
    Some(folder.join(name)).filter(|path| path.exists())
}

//! Opens files without waiting and without being led elsewhere. Several users may share a cache folder, and any of them
//! may put a link or a pipe where a file is expected.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::OFlags;

/// The longest of the small files next to a model.
const MAX_TEXT_BYTES: u64 = 64 << 10;

const MAX_BUNDLE_BYTES: u64 = 4 << 20;

/// Opens one of this crate's own files. Errors: the system's; a link; no regular file.
pub(super) fn open_own(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    open(path, options, OFlags::NOFOLLOW | OFlags::NONBLOCK)
}

/// Opens a file to read it. It may be a link, because users link models into the cache. Errors: the system's; no regular
/// file.
pub(super) fn open_to_read(path: &Path) -> io::Result<File> {
    open(path, File::options().read(true), OFlags::NONBLOCK)
}

fn open(path: &Path, options: &mut OpenOptions, flags: OFlags) -> io::Result<File> {
    let file = options.custom_flags(flags.bits() as i32).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is no regular file")),
    }
}

/// Reads a file that the user names: a bundle of certificates has half a megabyte.
pub(super) fn read_bytes(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_to_read(path)?.take(MAX_BUNDLE_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Writes one of this crate's own files.
pub(super) fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    open_own(path, File::options().write(true).create(true).truncate(true))?.write_all(content)
}

/// Reads one of this crate's own small files. Errors: also a longer file.
pub(super) fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    open_own(path, File::options().read(true))?.take(MAX_TEXT_BYTES + 1).read_to_string(&mut text)?;
    match text.len() as u64 > MAX_TEXT_BYTES {
        true => Err(io::Error::other("it is too long")),
        false => Ok(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_and_pipes_in_the_place_of_own_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let victim = folder.path().join("victim");
        std::fs::write(&victim, "precious").unwrap();
        let link = folder.path().join("m.gguf.part");
        std::os::unix::fs::symlink(&victim, &link).unwrap();
        let pipe = folder.path().join("m.gguf.lock");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for path in [&link, &pipe] {
            assert!(write(path, b"x").is_err() && read_text(path).is_err(), "{}", path.display());
        }
        assert!(open_to_read(&pipe).is_err() && open_to_read(&link).is_ok());
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
    }
}

//! Files and folders that only this user may read, written whole or not at all.

use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// A file that is being written begins so. Blocks are written under the lock, so any other such file was left by a process that
/// ended.
pub(crate) const UNFINISHED: &str = ".new-";

/// Returns true for a file that a process has not finished.
pub(crate) fn is_unfinished(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(UNFINISHED))
}

/// Opens files for writing that only this user may read.
pub(crate) fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    options
}

/// Creates a folder, or takes the rights of others away.
pub(crate) fn create_private(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    if folder.metadata()?.mode() & 0o777 != 0o700 {
        fs::set_permissions(folder, Permissions::from_mode(0o700))?;
    }
    Ok(())
}

/// Writes a file of a folder, whole or not at all.
pub(crate) fn write_whole(folder: &Path, name: &Path, bytes: &[u8]) -> io::Result<()> {
    let unfinished = folder.join(format!("{UNFINISHED}{:016x}", rand::random::<u64>()));
    let write = || -> io::Result<()> {
        let mut file = private().create_new(true).open(&unfinished)?;
        file.write_all(bytes)?;
        file.sync_data()?;
        fs::rename(&unfinished, folder.join(name))
    };
    write().inspect_err(|_| _ = fs::remove_file(&unfinished))
}

/// [`remove`], and the log says if it fails.
pub(crate) fn remove_or_tell(path: &Path) {
    if let Err(error) = remove(path) {
        tracing::warn!(file = %path.display(), %error, "a file of the KV store cannot be removed");
    }
}

/// Removes a file; another process may have done so.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

//! The private folder of an engine's socket.
//!
//! It goes with the process that made it, unless that was killed. So it holds a file that its owner keeps locked: a
//! folder whose lock is free has lost its owner, and the next start removes it.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

const PREFIX: &str = "baton-";
const LOCK: &str = "owner.lock";

/// The longest path of a Unix socket on macOS, which allows the fewest bytes, without the closing zero.
const MAX_SOCKET_PATH_BYTES: usize = 103;

/// A folder that is removed when this is dropped.
pub(super) struct SocketFolder {
    folder: TempDir,
    _lock: File,
}

/// The reason why a folder cannot be made.
#[derive(Debug, thiserror::Error)]
pub(super) enum SocketFolderError {
    /// The folder for temporary files is missing, full or not ours to write.
    #[error(
        "cannot make a folder for the engine's socket in {}: {source}; set TMPDIR to a folder that can be written",
        parent.display()
    )]
    NotWritable {
        /// The folder for temporary files.
        parent: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A socket's address has little room.
    #[error("the path of TMPDIR ({}) is too long for a socket in it: set TMPDIR to a shorter one", parent.display())]
    PathTooLong {
        /// The folder for temporary files.
        parent: PathBuf,
    },
}

impl SocketFolder {
    /// Makes a folder for temporary files' usual place (`TMPDIR`), after removing those that dead owners left there.
    pub(super) fn create() -> Result<SocketFolder, SocketFolderError> {
        SocketFolder::create_in(&std::env::temp_dir())
    }

    fn create_in(parent: &Path) -> Result<SocketFolder, SocketFolderError> {
        let not_writable = |source| SocketFolderError::NotWritable { parent: parent.to_owned(), source };
        remove_abandoned(parent);
        // Only its owner may enter it. The socket is protected by a key as well.
        let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent).map_err(not_writable)?;
        let lock = locked_file(folder.path()).map_err(not_writable)?;
        let made = SocketFolder { folder, _lock: lock };
        if made.socket().as_os_str().len() > MAX_SOCKET_PATH_BYTES {
            return Err(SocketFolderError::PathTooLong { parent: parent.to_owned() });
        }
        Ok(made)
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.folder.path().join("engine.sock")
    }
}

/// Takes the lock before the file has its name, so that a free lock always means a dead owner.
fn locked_file(folder: &Path) -> io::Result<File> {
    let unnamed = folder.join("owner.lock.new");
    let file = File::create(&unnamed)?;
    file.lock()?;
    std::fs::rename(&unnamed, folder.join(LOCK))?;
    Ok(file)
}

/// Removes what dead owners left. A folder of another user, or one without the file, is left alone.
fn remove_abandoned(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    let ours = entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(PREFIX));
    for folder in ours.map(|entry| entry.path()) {
        let Ok(lock) = File::options().write(true).open(folder.join(LOCK)) else { continue };
        if lock.try_lock().is_ok()
            && let Err(error) = std::fs::remove_dir_all(&folder)
        {
            tracing::debug!(%error, folder = %folder.display(), "an abandoned folder could not be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_dead_owner_left_is_removed_and_nothing_else() {
        let parent = tempfile::tempdir().unwrap();
        let living = SocketFolder::create_in(parent.path()).unwrap();
        let SocketFolder { folder, _lock: lock } = SocketFolder::create_in(parent.path()).unwrap();
        let left = folder.keep();
        drop(lock);
        std::fs::write(left.join("engine.sock"), "").unwrap();
        let foreign = parent.path().join("baton-mine");
        std::fs::create_dir(&foreign).unwrap();

        let new = SocketFolder::create_in(parent.path()).unwrap();
        assert!(!left.exists());
        assert!(living.folder.path().exists() && foreign.exists() && new.folder.path().exists());
    }

    #[test]
    fn an_unusable_place_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = SocketFolder::create_in(&file.path().join("x")).err().unwrap().to_string();
        assert!(error.contains(file.path().to_str().unwrap()) && error.contains("TMPDIR"), "{error}");
        let parent = tempfile::tempdir().unwrap();
        let long = parent.path().join("x".repeat(100));
        std::fs::create_dir(&long).unwrap();
        let error = SocketFolder::create_in(&long).err().unwrap();
        assert!(matches!(error, SocketFolderError::PathTooLong { .. }), "{error}");
        assert_eq!(std::fs::read_dir(&long).unwrap().count(), 0, "nothing is left behind");
    }
}

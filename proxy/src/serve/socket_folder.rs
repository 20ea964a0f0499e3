//! The private folder of an engine's socket.
//!
//! It goes with the process that made it, unless that was killed. So it holds a file that its owner keeps locked: a
//! folder whose lock is free has lost its owner, and the next start removes it.

use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
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

/// Opens the lock of a folder if this user made both. Any user may put anything into a folder for temporary files: a link
/// could lead elsewhere, and opening a pipe could wait for ever.
fn own_lock(folder: &Path) -> Option<File> {
    let of_folder = std::fs::symlink_metadata(folder).ok()?;
    let user = rustix::process::geteuid().as_raw();
    if !of_folder.is_dir() || of_folder.uid() != user {
        return None;
    }
    let safely = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let lock = File::options().write(true).custom_flags(safely).open(folder.join(LOCK)).ok()?;
    let of_lock = lock.metadata().ok()?;
    (of_lock.is_file() && of_lock.uid() == user).then_some(lock)
}

/// Removes what dead owners left. A folder of another user, or one without the file, is left alone.
fn remove_abandoned(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    let ours = entries.flatten().filter(|entry| entry.file_name().to_string_lossy().starts_with(PREFIX));
    for folder in ours.map(|entry| entry.path()) {
        let Some(lock) = own_lock(&folder) else { continue };
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
    fn pipes_and_links_in_the_place_of_a_lock_are_left_alone() {
        let parent = tempfile::tempdir().unwrap();
        let of_pipe = parent.path().join("baton-pipe");
        std::fs::create_dir(&of_pipe).unwrap();
        let made = std::process::Command::new("mkfifo").arg(of_pipe.join(LOCK)).status().unwrap();
        assert!(made.success());
        let outside = tempfile::tempdir().unwrap();
        let kept = outside.path().join(LOCK);
        std::fs::write(&kept, "").unwrap();
        let of_link = parent.path().join("baton-link");
        std::fs::create_dir(&of_link).unwrap();
        std::os::unix::fs::symlink(&kept, of_link.join(LOCK)).unwrap();
        let link = parent.path().join("baton-linked");
        std::os::unix::fs::symlink(outside.path(), &link).unwrap();

        let (tell, made) = std::sync::mpsc::channel();
        let path = parent.path().to_owned();
        std::thread::spawn(move || tell.send(SocketFolder::create_in(&path).is_ok()));
        let made = made.recv_timeout(std::time::Duration::from_secs(60));
        assert!(made.expect("the start waits for a writer of the pipe"));
        assert!(of_pipe.exists() && of_link.exists() && link.exists() && kept.exists());
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

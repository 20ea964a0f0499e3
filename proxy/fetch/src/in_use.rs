//! Which models processes on this machine use: who runs a model holds a shared lock on its files, and who deletes one asks
//! for an exclusive one. The system releases a lock when its process ends, however it ends.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_schemas::part_name::parts_beside;

use super::files;

/// Attempts to note a use.
const N_TRIES: u32 = 100;

/// The pause between two of them.
const PAUSE: Duration = Duration::from_millis(2);

/// The files of models, in use until this is dropped. A file system without locks notes nothing.
#[derive(Debug, Default)]
pub struct FilesInUse(#[expect(dead_code, reason = "held, not read")] Vec<File>);

impl FilesInUse {
    /// Notes that this process uses these models: files, of which one part names all, or folders.
    pub fn hold<'p>(models: impl IntoIterator<Item = &'p Path>) -> FilesInUse {
        let opened = models.into_iter().flat_map(files_of).filter_map(|path| files::open_to_read(&path).ok());
        FilesInUse(opened.filter(lock_shared).collect())
    }
}

/// Somebody who looks whether the file is in use has an exclusive lock for microseconds.
fn lock_shared(file: &File) -> bool {
    for _ in 0..N_TRIES {
        match file.try_lock_shared() {
            Err(TryLockError::WouldBlock) => std::thread::sleep(PAUSE),
            outcome => return outcome.is_ok(),
        }
    }
    false
}

fn files_of(model: &Path) -> Vec<PathBuf> {
    match fs::read_dir(model) {
        Ok(entries) => entries.flatten().map(|entry| entry.path()).filter(|path| path.is_file()).collect(),
        Err(_) => parts_beside(model),
    }
}

/// Returns true if a process uses the file.
pub(super) fn is_in_use(path: &Path) -> bool {
    let Ok(file) = files::open_to_read(path) else { return false };
    let is_locked = || matches!(file.try_lock(), Err(TryLockError::WouldBlock));
    // Another look at the same moment is no use.
    is_locked() && {
        std::thread::sleep(PAUSE);
        is_locked()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_files_of_a_model_are_in_use_until_its_process_ends() {
        let folder = tempfile::tempdir().unwrap();
        let parts =
            ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "other.gguf"].map(|name| folder.path().join(name));
        parts.iter().for_each(|part| fs::write(part, "GGUF").unwrap());
        let used = || [0, 1, 2].map(|i| is_in_use(&parts[i]));
        let held = FilesInUse::hold([&*parts[0]]);
        let also_held = FilesInUse::hold([&*parts[0]]);
        assert_eq!(used(), [true, true, false]);
        drop(held);
        assert_eq!(used(), [true, true, false], "another process still does");
        drop(also_held);
        let _whole = FilesInUse::hold([folder.path()]);
        assert_eq!(used(), [true; 3]);
    }
}

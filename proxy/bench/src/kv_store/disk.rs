//! The disk below a folder: whether reads can come from it, when it has settled, and files that leave the page cache.

use std::fs::File;
use std::path::Path;

use baton_proxy::serve::CommandFailure;
use serde::Serialize;

/// Whether files can be read from the disk itself, past the system's page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ColdReads {
    /// Files can leave the page cache.
    Possible,
    /// The folder is in memory: tmpfs or ramfs.
    InMemory,
    /// This system has no way to take a file out of its page cache.
    #[cfg(not(target_os = "linux"))]
    NoWay,
}

impl ColdReads {
    /// Finds out whether files of this folder can be read past the page cache.
    #[cfg(target_os = "linux")]
    pub(super) fn of(folder: &Path) -> Result<ColdReads, CommandFailure> {
        // As in linux/magic.h.
        const TMPFS: rustix::fs::FsWord = 0x0102_1994;
        const RAMFS: rustix::fs::FsWord = 0x8584_58f6;
        let kind = rustix::fs::statfs(folder).map_err(std::io::Error::from)?.f_type;
        Ok(if [TMPFS, RAMFS].contains(&kind) { ColdReads::InMemory } else { ColdReads::Possible })
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn of(_: &Path) -> Result<ColdReads, CommandFailure> {
        Ok(ColdReads::NoWay)
    }

    /// Why there are none.
    pub(super) fn missing(self) -> Option<&'static str> {
        match self {
            ColdReads::Possible => None,
            ColdReads::InMemory => Some(
                "No cold disk: the folder is in memory (tmpfs), so the rows of disks show memory, too. --disk names another one.",
            ),
            #[cfg(not(target_os = "linux"))]
            ColdReads::NoWay => Some("No cold disk: this system has no way to take files out of its page cache."),
        }
    }
}

/// Returns once the disk has everything that was written below a folder: what it still writes would slow reads.
pub(super) fn settle(folder: &Path) -> Result<(), CommandFailure> {
    each_file(folder, &|file| file.sync_all())?;
    // The names, too.
    Ok(File::open(folder)?.sync_all()?)
}

/// Takes all files below a folder out of the page cache, so that they are read from the disk. Only where cold reads are
/// [`ColdReads::Possible`].
pub(super) fn leave_page_cache(folder: &Path) -> Result<(), CommandFailure> {
    // Pages that are not written yet would stay in the cache.
    settle(folder)?;
    each_file(folder, &leave)
}

#[cfg(target_os = "linux")]
pub(super) fn leave(file: &File) -> std::io::Result<()> {
    Ok(rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)?)
}

#[cfg(not(target_os = "linux"))]
pub(super) fn leave(_: &File) -> std::io::Result<()> {
    Ok(())
}

fn each_file(folder: &Path, work: &dyn Fn(&File) -> std::io::Result<()>) -> Result<(), CommandFailure> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        match path.is_dir() {
            true => each_file(&path, work)?,
            false => match File::open(&path) {
                Ok(file) => work(&file)?,
                // The node has given an unfinished file its name, or removed one to stay within its budget.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(error.into()),
            },
        }
    }
    Ok(())
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_folder_in_memory_is_no_disk() {
        assert_eq!(ColdReads::of(Path::new("/dev/shm")).unwrap(), ColdReads::InMemory);
        assert_eq!(ColdReads::of(Path::new("/proc")).unwrap(), ColdReads::Possible, "any other file system");
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("below")).unwrap();
        std::fs::write(folder.path().join("below/file"), "kv").unwrap();
        leave_page_cache(folder.path()).unwrap();
        assert_eq!(std::fs::read(folder.path().join("below/file")).unwrap(), b"kv");
    }
}

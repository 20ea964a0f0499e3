//! The folder of pulled models, and the lock that allows one pull of a file at a time.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::ModelError;
use super::files;
use super::progress::DownloadProgress;

/// The interval at which a waiting pull tries the lock again. A file lock cannot be awaited.
const LOCK_POLL: Duration = Duration::from_millis(200);

/// The folder for models: `$BATON_CACHE`, or `baton/models` in the platform's cache folder. Creates nothing.
///
/// Reads the environment, so call it once, at start-up.
pub fn default_folder() -> Result<PathBuf, ModelError> {
    folder_from(|name| env::var_os(name).filter(|value| !value.is_empty()))
}

fn folder_from(var: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf, ModelError> {
    if let Some(folder) = var("BATON_CACHE") {
        return Ok(folder.into());
    }
    // The XDG specification says to ignore a relative path here.
    let xdg = var("XDG_CACHE_HOME").map(PathBuf::from).filter(|folder| folder.is_absolute());
    let home = || var("HOME").map(PathBuf::from).ok_or(ModelError::NoCacheFolder);
    let caches = match xdg {
        Some(folder) => folder,
        None if cfg!(target_os = "macos") => home()?.join("Library/Caches"),
        None => home()?.join(".cache"),
    };
    Ok(caches.join("baton").join("models"))
}

/// Checks that a folder of the cache can be created and written, before any request to the network. Does not create it, so
/// that a pull that fetches nothing leaves nothing.
pub(super) fn check_writable(folder: &Path) -> Result<(), ModelError> {
    let not_writable = |source| ModelError::CacheNotWritable { folder: folder.to_owned(), source };
    let existing = folder.ancestors().find(|folder| folder.exists()).unwrap_or(Path::new("."));
    tempfile::tempfile_in(existing).map(drop).map_err(not_writable)
}

pub(super) fn create(folder: &Path) -> Result<(), ModelError> {
    fs::create_dir_all(folder).map_err(|source| ModelError::CacheNotWritable { folder: folder.to_owned(), source })
}

/// Bytes that an unprivileged user may still write into a folder, which may not exist yet. `None`: the system does not say.
pub fn free_bytes(folder: &Path) -> Option<u64> {
    let existing = folder.ancestors().find(|folder| folder.exists())?;
    let stat = rustix::fs::statvfs(existing).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Refuses a write that does not fit. A file system that does not report its free space passes.
pub(super) fn check_space(folder: &Path, needed_bytes: u64) -> Result<(), ModelError> {
    let Some(free_bytes) = free_bytes(folder) else { return Ok(()) };
    if needed_bytes > free_bytes {
        return Err(ModelError::NotEnoughSpace { folder: folder.to_owned(), needed_bytes, free_bytes });
    }
    Ok(())
}

/// The path with a suffix such as `.part`.
pub(super) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// The right to write one model's files. The system releases it when the last clone is dropped or the process ends.
///
/// Blocking tasks hold a clone: a write may still run after its pull was dropped, and the next pull must not start before
/// the write has ended.
#[derive(Debug, Clone)]
pub(super) struct PullLock(#[expect(dead_code, reason = "held, not read")] Arc<File>);

impl PullLock {
    /// Waits until no other pull, in this or another process, works on `path`.
    ///
    /// The lock file stays: deleting it would let two processes lock two different files of the same name.
    pub(super) async fn acquire(path: &Path, progress: &dyn DownloadProgress) -> Result<PullLock, ModelError> {
        let lock_path = with_suffix(path, ".lock");
        let file = files::open_own(&lock_path, File::options().create(true).truncate(false).write(true))
            .map_err(|source| ModelError::file(&lock_path, source))?;
        let mut announced = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(PullLock(Arc::new(file))),
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(source)) => return Err(ModelError::file(&lock_path, source)),
            }
            if !announced {
                progress.notice(&format!("waiting for another pull of {}", path.display()));
                announced = true;
            }
            tokio::time::sleep(LOCK_POLL).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(vars: &[(&str, &str)]) -> Option<String> {
        let var = |name: &str| vars.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value));
        folder_from(var).ok().map(|folder| folder.display().to_string())
    }

    #[test]
    fn baton_cache_wins_and_is_taken_as_it_is() {
        let vars = [("BATON_CACHE", "/models"), ("XDG_CACHE_HOME", "/xdg"), ("HOME", "/home/me")];
        assert_eq!(folder(&vars).unwrap(), "/models");
        assert_eq!(folder(&vars[1..]).unwrap(), "/xdg/baton/models");
    }

    #[test]
    fn without_either_it_lies_in_the_home_folder() {
        let below_home = if cfg!(target_os = "macos") { "Library/Caches" } else { ".cache" };
        let expected = format!("/home/me/{below_home}/baton/models");
        assert_eq!(folder(&[("HOME", "/home/me")]).unwrap(), expected);
        assert_eq!(folder(&[("XDG_CACHE_HOME", "relative"), ("HOME", "/home/me")]).unwrap(), expected);
        assert_eq!(folder(&[]), None);
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named_in_one_line() {
        // Tests may run as root, whom no permission stops; a path below a file stops everybody.
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = check_writable(&file.path().join("models")).unwrap_err();
        assert!(matches!(error, ModelError::CacheNotWritable { .. }));
        assert!(error.to_string().contains("BATON_CACHE") && !error.to_string().contains('\n'));
    }

    #[test]
    fn more_than_the_disk_holds_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let error = check_space(folder.path(), 1 << 60).unwrap_err().to_string();
        assert!(error.contains("1099511627776 MiB are needed"), "{error}");
        assert!(error.contains(folder.path().to_str().unwrap()), "{error}");
        check_space(folder.path(), 1).unwrap();
        check_writable(&folder.path().join("a/b")).unwrap();
        assert!(!folder.path().join("a").exists());
    }
}

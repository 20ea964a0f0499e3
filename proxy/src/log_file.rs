//! The log in a file of bounded size, for services without a journal, such as those of launchd.
//!
//! Standard error becomes the file, so child processes, libraries and panics write there, too, and keep it open. Therefore a full
//! file is not renamed: it is copied to `FILE.1` and emptied, as by logrotate's `copytruncate`. A line that another process
//! writes between the two is lost.

use std::fs::{File, OpenOptions, Permissions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use super::log_target::NOTICE;

/// Bytes above which the file is emptied: months of warnings, or an hour of requests at the level info.
const MAX_BYTES: u64 = 8 << 20;

/// Bytes that are copied at most: the newest. More is in the file only if it grows faster than it is looked at.
const MAX_COPIED_BYTES: u64 = 2 * MAX_BYTES;

/// The pause between two looks at the file's size.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// The log may quote prompts at the level debug.
const OWNER_ONLY: u32 = 0o600;

/// The log cannot go to a file.
#[derive(Debug, thiserror::Error)]
#[error("the log cannot be written to {}: {error}", path.display())]
pub struct LogFileError {
    /// The file.
    pub path: PathBuf,
    /// The system's reason.
    pub error: io::Error,
}

/// A file that takes the log.
#[derive(Debug)]
pub struct LogFile {
    path: PathBuf,
    file: File,
}

/// Where the lines are that no longer fit into a log file.
pub fn older_lines(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    name.into()
}

impl LogFile {
    /// Sends standard error to the end of this file, which is made if it is missing. Call it before the log starts.
    /// Errors: it is no regular file, or cannot be written.
    pub fn take_stderr(path: &Path) -> Result<LogFile, LogFileError> {
        let log = LogFile::open(path);
        let taken = log.and_then(|log| rustix::stdio::dup2_stderr(&log.file).map_err(io::Error::from).map(|()| log));
        taken.map_err(|error| LogFileError { path: path.to_owned(), error })
    }

    fn open(path: &Path) -> io::Result<LogFile> {
        // Opening a pipe would wait for its reader.
        if path.metadata().is_ok_and(|found| !found.is_file()) {
            return Err(io::Error::other("it is no regular file"));
        }
        let file = OpenOptions::new().read(true).append(true).create(true).mode(OWNER_ONLY).open(path)?;
        make_private(&file)?;
        Ok(LogFile { path: path.to_owned(), file })
    }

    /// Keeps the file within bounds, on a thread of its own. Errors: the system has no thread left.
    pub fn keep_bounded(self) -> Result<(), LogFileError> {
        let path = self.path.clone();
        match thread::Builder::new().name("log file".into()).spawn(move || self.look_for_ever()) {
            Ok(_) => Ok(()),
            Err(error) => Err(LogFileError { path, error }),
        }
    }

    fn look_for_ever(&self) {
        loop {
            self.look();
            thread::sleep(LOOK_INTERVAL);
        }
    }

    fn look(&self) {
        let older = older_lines(&self.path);
        match self.empty_if_full(&older) {
            Ok(false) => {}
            Ok(true) => {
                tracing::info!(target: NOTICE, "the log was full: its earlier lines are in {}", older.display())
            }
            Err(error) => {
                tracing::warn!(%error, "the log was full, and its earlier lines cannot be kept in {}", older.display());
            }
        }
    }

    /// Copies a file that is too large, and empties it. Returns true if it has. Errors: it cannot be copied; it is emptied all the
    /// same.
    fn empty_if_full(&self, older: &Path) -> io::Result<bool> {
        if !self.is_full()? {
            return Ok(false);
        }
        // Another Baton with the same file copies it right now. On a file system without locks each copies it.
        if matches!(self.file.try_lock(), Err(TryLockError::WouldBlock)) {
            return Ok(false);
        }
        let emptied = self.is_full().and_then(|is_full| {
            let copied = if is_full { self.copy_end(older) } else { return Ok(false) };
            self.file.set_len(0)?;
            copied.map(|()| true)
        });
        let _ = self.file.unlock();
        emptied
    }

    fn is_full(&self) -> io::Result<bool> {
        Ok(self.file.metadata()?.len() > MAX_BYTES)
    }

    fn copy_end(&self, older: &Path) -> io::Result<()> {
        let mut copy = OpenOptions::new().write(true).create(true).truncate(true).mode(OWNER_ONLY).open(older)?;
        make_private(&copy)?;
        let mut at = self.file.metadata()?.len().saturating_sub(MAX_COPIED_BYTES);
        let end = at + MAX_COPIED_BYTES;
        let mut buffer = vec![0; 64 << 10];
        // Also what is written meanwhile.
        while at < end {
            match self.file.read_at(&mut buffer, at)? {
                0 => break,
                n => {
                    copy.write_all(&buffer[..n])?;
                    at += n as u64;
                }
            }
        }
        Ok(())
    }
}

/// Takes the rights of others away: whatever starts services may have made the file for all to read.
fn make_private(file: &File) -> io::Result<()> {
    if file.metadata()?.permissions().mode() & 0o077 == 0 {
        return Ok(());
    }
    match file.set_permissions(Permissions::from_mode(OWNER_ONLY)) {
        // It is another user's, who knows who may read it.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A log with this many bytes, and the place of its older lines.
    fn log_of(folder: &Path, n_bytes: u64) -> (LogFile, PathBuf) {
        let path = folder.join("baton.log");
        // Lines of 16 bytes, which tell where they stood.
        let text: String = (0..n_bytes.div_ceil(16)).map(|n| format!("{n:>15}\n")).collect();
        fs::write(&path, &text.as_bytes()[..n_bytes as usize]).unwrap();
        (LogFile::open(&path).unwrap(), older_lines(&path))
    }

    fn len(path: &Path) -> u64 {
        fs::metadata(path).unwrap().len()
    }

    #[test]
    fn a_log_is_emptied_above_its_bound_and_what_it_had_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let (log, older) = log_of(folder.path(), MAX_BYTES);
        assert!(!log.empty_if_full(&older).unwrap() && !older.exists());
        // As a child process does, which has the same open file.
        let mut child = log.file.try_clone().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&log.path), OWNER_ONLY, "it was made with the usual rights");
        fs::write(&older, "yesterday").unwrap();
        child.write_all(b"more\n").unwrap();
        assert!(log.empty_if_full(&older).unwrap());
        assert_eq!((len(&log.path), len(&older), mode(&older)), (0, MAX_BYTES + 5, OWNER_ONLY));
        assert!(fs::read_to_string(&older).unwrap().ends_with("\nmore\n"));
        child.write_all(b"new\n").unwrap();
        assert_eq!(fs::read_to_string(&log.path).unwrap(), "new\n", "no hole where the earlier lines were");
        assert!(!log.empty_if_full(&older).unwrap());
    }

    #[test]
    fn of_a_flood_the_newest_lines_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let (log, older) = log_of(folder.path(), MAX_COPIED_BYTES + 1_600);
        assert!(log.empty_if_full(&older).unwrap());
        assert_eq!(len(&older), MAX_COPIED_BYTES);
        assert!(fs::read_to_string(&older).unwrap().starts_with(&format!("{:>15}\n", 100)));
    }

    #[test]
    fn a_log_is_emptied_although_nothing_can_be_kept() {
        let folder = tempfile::tempdir().unwrap();
        let (log, older) = log_of(folder.path(), MAX_BYTES + 1);
        fs::create_dir(&older).unwrap();
        log.empty_if_full(&older).unwrap_err();
        assert_eq!(len(&log.path), 0);
    }

    #[test]
    fn of_two_processes_with_one_log_a_single_one_empties_it() {
        let folder = tempfile::tempdir().unwrap();
        let (log, older) = log_of(folder.path(), MAX_BYTES + 1);
        let other = LogFile::open(&log.path).unwrap();
        other.file.lock().unwrap();
        assert!(!log.empty_if_full(&older).unwrap() && !older.exists());
        other.file.unlock().unwrap();
        assert!(log.empty_if_full(&older).unwrap());
        assert!(!other.empty_if_full(&older).unwrap());
        assert_eq!(len(&older), MAX_BYTES + 1);
    }

    #[test]
    fn a_log_that_is_no_regular_file_is_refused() {
        for path in ["/dev/null", "/"] {
            let error = LogFile::take_stderr(Path::new(path)).unwrap_err().to_string();
            assert_eq!(error, format!("the log cannot be written to {path}: it is no regular file"));
        }
        let error = LogFile::take_stderr(Path::new("/nowhere/baton.log")).unwrap_err().to_string();
        assert!(error.starts_with("the log cannot be written to /nowhere/baton.log: No such file"), "{error}");
    }
}

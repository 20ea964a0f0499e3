//! Checks what a configuration says of KV stores: folders, budgets, and the key of what is on disk.

use std::path::{Path, PathBuf};

use baton_engines::engine_options::WrittenOptions;
use baton_model::gguf::Gguf;
use baton_store::{MAX_BLOCK_TOKENS, check_folder};

use super::super::failure::CommandFailure;
use super::super::store_secret;
use super::{FileKey, LocalModel, ModelTable};
use crate::config::{ConfigProblem, RawConfig};
use crate::targets::model_loading::total_memory;

/// Sizes of a folder, about which all tables that name it must agree.
const SIZES_OF_FOLDER: [&str; 2] = ["kv_store.disk_budget", "kv_store.disk_writes"];

impl LocalModel<'_> {
    /// Checks what does not depend on the model.
    pub(super) fn check_store(&mut self) {
        let Some(store) = &self.engine.kv_store else { return };
        let unusable = |disk: &Path| match check_folder(disk) {
            Err(error) => Some(error.to_string()),
            Ok(()) if disk.exists() => None,
            Ok(()) => {
                store_secret::check_makable(&std::path::absolute(disk).ok()?).err().map(|error| error.to_string())
            }
        };
        if let Some(error) = store.disk.as_deref().and_then(unusable) {
            self.problem(FileKey::Option("kv_store.disk"), format!("cannot be used: {error}"));
        }
        let most = total_memory().unwrap_or(u64::MAX);
        if let Some(wanted) = store.memory_bytes().filter(|wanted| *wanted > most) {
            let message = format!("must be at most {most} bytes, which is all memory of this machine, not {wanted}");
            self.problem(FileKey::Option("kv_store.memory"), message);
        }
    }

    /// Checks that a block of this model's KV has room.
    pub(super) fn check_block(&mut self, header: &Gguf) {
        let types = self.kind().cache_types(self.engine.cache_types(), header);
        let store = self.engine.kv_store.as_ref().zip(header.kv_bytes(types, MAX_BLOCK_TOKENS));
        for (key, message) in store.into_iter().flat_map(|(store, block_bytes)| store.too_small(block_bytes)) {
            self.problem(FileKey::Option(key), message);
        }
    }
}

/// A folder that a table names, and its sizes there.
struct FolderUse {
    table: ModelTable,
    folder: PathBuf,
    /// In the order of [`SIZES_OF_FOLDER`].
    sizes: [u64; 2],
}

impl FolderUse {
    fn of(named: &LocalModel) -> Option<FolderUse> {
        let store = named.engine.kv_store.as_ref()?;
        Some(FolderUse {
            table: named.table,
            folder: folder(named.engine)?,
            sizes: [store.disk_bytes(), store.disk_writes_a_day()],
        })
    }
}

/// Adds a problem to tables that name one folder and disagree about its sizes: the smaller budget would remove what the other one
/// keeps.
pub(super) fn refuse_two_budgets(named: &mut [LocalModel]) {
    let uses: Vec<Option<FolderUse>> = named.iter().map(FolderUse::of).collect();
    for (one, own) in named.iter_mut().zip(&uses) {
        let Some(own) = own else { continue };
        let of_folder = || uses.iter().flatten().filter(|other| other.folder == own.folder);
        for (idx, key) in SIZES_OF_FOLDER.into_iter().enumerate() {
            let size = own.sizes[idx];
            if let Some(other) = of_folder().find(|other| other.sizes[idx] != size) {
                let (table, of_other) = (other.table, other.sizes[idx]);
                let message = format!(
                    "is {size} bytes, but {of_other} in {table}, for the same folder: write one number in both"
                );
                one.problem(FileKey::Option(key), message);
            }
        }
    }
}

/// The folder of an engine's store, however it is written.
fn folder(engine: &WrittenOptions) -> Option<PathBuf> {
    let disk = engine.kv_store.as_ref()?.disk.as_deref()?;
    // Before the first start it is not there.
    Some(disk.canonicalize().or_else(|_| std::path::absolute(disk)).unwrap_or_else(|_| disk.to_owned()))
}

/// The reason why KV on disk has no key. An endpoint then keeps KV in memory alone.
pub fn key_problem(raw: &RawConfig) -> Option<ConfigProblem> {
    let has_disk = |engine: &WrittenOptions| folder(engine).is_some();
    let of_model = raw.has_own_engine() && has_disk(&raw.model.engine);
    let of_models = || raw.models.iter().position(|own| has_disk(&own.engine)).map(ModelTable::Models);
    let table = of_model.then_some(ModelTable::Model).or_else(of_models)?;
    let CommandFailure(error) = store_secret::check(&raw.transport()).err()?;
    let key = format!("{table}.engine.kv_store.disk");
    Some(ConfigProblem { flag: key.clone(), key, message: format!("cannot be used: {error}") })
}

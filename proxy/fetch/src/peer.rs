//! Fetches a model from another machine that has it, over the node protocol. The caller has found the way there and may send
//! the key; what the other machine says about its files is checked here.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use baton_schemas::machine_models::{FileOnDisk, MAX_MODEL_FILES, MAX_NAME_BYTES, ModelOnDisk, is_sha256};
use reqwest::{Client, Url};

use super::ModelError;
use super::cache::{self, PullLock};
use super::download::DownloadSource;
use super::hub::HubFile;
use super::options::PullOptions;
use super::part_file::sha256_of;
use super::recheck;
use super::search::MAX_DEPTH;
use super::spec::{self, HubModel, ModelSpec, ends_in_gguf, is_projector, is_relative_path};
use super::{fetch_files, hub, hub_folder, remember_choice};

/// Advice after a 401. The operator's keys of the two machines differ.
const DENIED_HINT: &str = "the other machine has another cluster key";

/// A machine that has the model.
pub struct ModelPeer {
    /// A client that may call it.
    pub client: Client,
    /// The call that sends a file; `model` and `file` are added to its query.
    pub files_url: Url,
    /// The cluster key.
    pub key: String,
}

/// Copies the model that `asked` names and `offer` describes into the cache folder, and returns its file or folder.
///
/// Nothing that is here is replaced: a file with the right checksum stays, and one with other content is an error. Like a pull,
/// a copy continues from the bytes of an earlier one, its files get their names when they are verified, and dropping the future
/// stops it.
pub async fn copy(
    asked: &ModelSpec,
    offer: &ModelOnDisk,
    peer: &ModelPeer,
    options: &PullOptions,
) -> Result<PathBuf, ModelError> {
    let bad = |what| ModelError::BadOffer { name: offer.name.clone(), what };
    let offered = ModelSpec::named(&offer.name)?;
    let plan = plan(asked, &offered, offer, &options.cache_dir).map_err(bad)?;
    cache::check_writable(&plan.folder)?;
    let final_path = plan.final_path();
    cache::create(if plan.first.is_some() { final_path.parent().unwrap_or(&plan.folder) } else { &final_path })?;
    for file in &plan.files {
        if let Some(parent) = plan.folder.join(&file.path).parent() {
            cache::create(parent)?;
        }
    }
    let lock = PullLock::acquire(&final_path, &*options.progress).await?;
    for file in &plan.files {
        check_present(offer, file, &plan.folder.join(&file.path)).await?;
    }
    let files: Option<Vec<HubFile>> = plan.files.iter().map(|file| peer.file(&offer.name, file)).collect();
    let files = files.ok_or_else(|| bad("a file has no checksum"))?;
    fetch_files(&files, &plan.folder, &lock, &peer.client, options).await?;
    if let (ModelSpec::Hub(model), Some(first)) = (asked, &plan.first) {
        remember_choice(model, first, &plan.folder)?;
    }
    Ok(final_path)
}

impl ModelPeer {
    fn file(&self, model: &str, file: &FileOnDisk) -> Option<HubFile> {
        let mut url = self.files_url.clone();
        url.query_pairs_mut().append_pair("model", model).append_pair("file", &file.path);
        let source = DownloadSource {
            url,
            name: format!("{model} ({})", file.path),
            bearer: Some(self.key.clone()),
            size_bytes: Some(file.n_bytes),
            sha256: Some(file.sha256.clone()?),
            denied_hint: DENIED_HINT,
        };
        Some(HubFile { path: file.path.clone(), source })
    }
}

/// Checks a file that may be here. Errors: it has other content.
async fn check_present(offer: &ModelOnDisk, file: &FileOnDisk, path: &Path) -> Result<(), ModelError> {
    let Ok(found) = std::fs::metadata(path) else { return Ok(()) };
    let differs = || ModelError::Differs { name: offer.name.clone(), file: file.path.clone() };
    if !found.is_file() || found.len() != file.n_bytes {
        return Err(differs());
    }
    let sha256 = Some(sha256_of(path).await?);
    if sha256 != file.sha256 {
        return Err(differs());
    }
    recheck::remember(path, sha256.as_deref())
}

/// The files to fetch, and where they go.
struct CopyPlan {
    folder: PathBuf,
    /// The file that is the model's path; `None`: the folder is.
    first: Option<String>,
    /// In the order in which they are fetched: what makes the model complete comes last.
    files: Vec<FileOnDisk>,
}

impl CopyPlan {
    fn final_path(&self) -> PathBuf {
        self.first.as_ref().map_or_else(|| self.folder.clone(), |first| self.folder.join(first))
    }
}

/// Checks an offer against what was asked for. Errors: what is wrong with it.
fn plan(
    asked: &ModelSpec,
    offered: &ModelSpec,
    offer: &ModelOnDisk,
    cache_dir: &Path,
) -> Result<CopyPlan, &'static str> {
    check_files(&offer.files)?;
    match (asked, offered) {
        (ModelSpec::Catalogue(asked), ModelSpec::Catalogue(offered)) if asked.name == offered.name => {
            let pinned = FileOnDisk {
                path: asked.file.to_owned(),
                n_bytes: asked.size_bytes,
                sha256: Some(asked.sha256.to_owned()),
            };
            match offer.files == [pinned] {
                true => Ok(CopyPlan {
                    folder: cache_dir.to_owned(),
                    first: Some(asked.file.to_owned()),
                    files: offer.files.clone(),
                }),
                false => Err("its file is not the catalogue's"),
            }
        }
        (ModelSpec::Hub(asked), ModelSpec::Hub(offered)) if asked.repo_id() == offered.repo_id() => {
            of_repository(offered, offer, hub_folder(offered, cache_dir))
        }
        _ => Err("it is another model"),
    }
}

/// Returns true for a file that the list of this machine's models would find.
fn is_reached(path: &str) -> bool {
    path.len() <= MAX_NAME_BYTES && path.matches('/').count() <= MAX_DEPTH
}

/// Checks what holds for the files of every model.
fn check_files(files: &[FileOnDisk]) -> Result<(), &'static str> {
    let paths: BTreeSet<&str> = files.iter().map(|file| &*file.path).collect();
    match files {
        [] => Err("it has no files"),
        files if files.len() > MAX_MODEL_FILES => Err("it has too many files"),
        files if paths.len() < files.len() => Err("a file is there twice"),
        files if !files.iter().all(|file| is_relative_path(&file.path)) => Err("a file lies outside its folder"),
        files if !files.iter().all(|file| is_reached(&file.path)) => Err("a file lies too deep in its folder"),
        files if !files.iter().all(|file| file.sha256.as_deref().is_some_and(is_sha256)) => {
            Err("a file has no checksum")
        }
        files => files
            .iter()
            .try_fold(0_u64, |sum, file| sum.checked_add(file.n_bytes))
            .map(drop)
            .ok_or("its files are larger than any disk"),
    }
}

fn of_repository(model: &HubModel, offer: &ModelOnDisk, folder: PathBuf) -> Result<CopyPlan, &'static str> {
    let mut files = offer.files.clone();
    match &model.selector {
        Some(first) if ends_in_gguf(first) => {
            let weights = spec::paths_of(first).ok_or("it has too many parts")?;
            let is_own = |file: &FileOnDisk| weights.contains(&file.path);
            if !weights.iter().all(|path| files.iter().any(|file| file.path == *path)) {
                return Err("a part is missing");
            }
            if !files.iter().all(|file| is_own(file) || (is_projector(&file.path) && ends_in_gguf(&file.path))) {
                return Err("it has files that do not belong to it");
            }
            files.sort_by_key(is_own);
            Ok(CopyPlan { folder, first: Some(first.clone()), files })
        }
        None => {
            let is_last = |file: &FileOnDisk| file.path == recheck::LAST_FILE;
            if !files.iter().all(|file| is_last(file) || (!file.path.contains('/') && hub::is_of_folder(&file.path))) {
                return Err("it has files that do not belong to it");
            }
            files.sort_by_key(is_last);
            match files.last().is_some_and(is_last) {
                true => Ok(CopyPlan { folder, first: None, files }),
                false => Err("its config.json is missing"),
            }
        }
        Some(_) => Err("its name has no file"),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;

    use tempfile::TempDir;

    use super::*;
    use crate::client;
    use crate::fake_server::{FakeServer, ServerFault, noise, sha256, short_limits};
    use crate::progress::Silent;
    use crate::stored;

    const SIZE: usize = 300_000;
    const NAME: &str = "me/one:a.gguf";

    fn file(path: &str) -> FileOnDisk {
        FileOnDisk { path: path.into(), n_bytes: SIZE as u64, sha256: Some(sha256(&noise(SIZE))) }
    }

    fn offer(name: &str, files: Vec<FileOnDisk>) -> ModelOnDisk {
        let n_bytes = files.iter().map(|file| file.n_bytes).sum();
        ModelOnDisk { name: name.into(), quantization: None, n_bytes, fits: true, in_use: false, files }
    }

    struct Machines {
        cache: TempDir,
        sender: FakeServer,
    }

    async fn machines(faults: &[ServerFault]) -> Machines {
        let sender = FakeServer::serving(&noise(SIZE)).await.with_faults(faults);
        Machines { cache: tempfile::tempdir().unwrap(), sender }
    }

    impl Machines {
        async fn copy(&self, asked: &str, offer: &ModelOnDisk) -> Result<PathBuf, ModelError> {
            let limits = short_limits();
            let peer = ModelPeer {
                client: client::build(&limits, None).unwrap(),
                files_url: self.sender.url("/node/v1/models/file"),
                key: "key".into(),
            };
            let options = PullOptions { limits, ..PullOptions::from_env(self.cache.path(), Arc::new(Silent)) };
            copy(&ModelSpec::named(asked).unwrap(), offer, &peer, &options).await
        }

        fn path(&self, file: &str) -> PathBuf {
            self.cache.path().join("hub/me/one").join(file)
        }
    }

    #[tokio::test]
    async fn a_copy_that_is_cut_goes_on_from_its_bytes_and_each_byte_comes_once() {
        let cuts: Vec<ServerFault> = [1, 70_000, 100_000].map(ServerFault::CutAfter).to_vec();
        let machines = machines(&cuts).await;
        let offer = offer(NAME, vec![file("a.gguf")]);
        let mut n_failed = 0;
        while let Err(error) = machines.copy("me/one:Q8_0", &offer).await {
            assert!(matches!(error, ModelError::Network { .. }), "{error}");
            n_failed += 1;
            assert!(n_failed < 5 && stored::find(NAME, machines.cache.path()).is_err());
        }
        assert!(fs::read(machines.path("a.gguf")).unwrap() == noise(SIZE));
        let seen = machines.sender.seen();
        assert_eq!(seen.len(), 4);
        assert!(seen[1..].iter().all(|request| request.range.as_deref().is_some_and(|range| range != "bytes=0-")));
        assert!(seen.iter().all(|request| request.authorization.as_deref() == Some("Bearer key")));
        let known = crate::locate("me/one:q8_0", machines.cache.path()).unwrap();
        assert!(
            matches!(known, crate::Located::File(path) if path == machines.path("a.gguf")),
            "it has the asked name"
        );
        machines.copy(NAME, &offer).await.unwrap();
        assert_eq!(machines.sender.seen().len(), 4, "what is here is not fetched again");
    }

    #[tokio::test]
    async fn a_flipped_bit_is_refused() {
        let machines = machines(&[ServerFault::FlipBit, ServerFault::FlipBit]).await;
        let error = machines.copy(NAME, &offer(NAME, vec![file("a.gguf")])).await.unwrap_err();
        assert!(matches!(error, ModelError::ChecksumMismatch { .. }), "{error}");
        assert!(!machines.path("a.gguf").exists() && !machines.path("a.gguf.part").exists());
    }

    #[tokio::test]
    async fn nothing_that_is_here_is_replaced() {
        let machines = machines(&[]).await;
        fs::create_dir_all(machines.path("")).unwrap();
        fs::write(machines.path("mmproj.gguf"), "mine").unwrap();
        let offer = offer(NAME, vec![file("a.gguf"), file("mmproj.gguf")]);
        let error = machines.copy(NAME, &offer).await.unwrap_err();
        assert!(matches!(error, ModelError::Differs { .. }), "{error}");
        assert_eq!(fs::read(machines.path("mmproj.gguf")).unwrap(), b"mine");
        assert!(machines.sender.seen().is_empty() && !machines.path("a.gguf").exists());
    }

    #[tokio::test]
    async fn more_than_the_disk_holds_is_refused_before_a_byte_comes() {
        let machines = machines(&[]).await;
        let huge = FileOnDisk { n_bytes: 1 << 60, ..file("a.gguf") };
        let error = machines.copy(NAME, &offer(NAME, vec![huge])).await.unwrap_err();
        assert!(matches!(error, ModelError::NotEnoughSpace { .. }) && machines.sender.seen().is_empty(), "{error}");
    }

    #[tokio::test]
    async fn an_endless_file_costs_what_was_offered() {
        let machines = machines(&[ServerFault::NoLength]).await;
        let short = FileOnDisk { n_bytes: 1_000, ..file("a.gguf") };
        let error = machines.copy(NAME, &offer(NAME, vec![short])).await.unwrap_err();
        assert!(matches!(error, ModelError::SizeMismatch { .. }), "{error}");
    }

    #[test]
    fn a_description_that_is_not_of_the_model_is_refused() {
        let check = |asked: &str, offer: ModelOnDisk, expected: &str| {
            let (asked, offered) = (ModelSpec::named(asked).unwrap(), ModelSpec::named(&offer.name).unwrap());
            let problem = plan(&asked, &offered, &offer, Path::new("/cache")).err().unwrap_or_default();
            assert_eq!(problem, expected, "{offer:?}");
        };
        check(NAME, offer(NAME, vec![file("a.gguf"), file("mmproj-x.gguf")]), "");
        check(NAME, offer(NAME, Vec::new()), "it has no files");
        check(NAME, offer(NAME, vec![file("a.gguf"); 2]), "a file is there twice");
        check(NAME, offer(NAME, vec![file("b.gguf")]), "a part is missing");
        check(NAME, offer(NAME, vec![file("a.gguf"), file("b.gguf")]), "it has files that do not belong to it");
        check(NAME, offer(NAME, vec![file("a.gguf"), file(".choice-")]), "a file lies outside its folder");
        for path in ["../a.gguf", "/etc/a.gguf", "x/../../a.gguf", "mmproj/../../x.gguf", "mmproj\\..\\x.gguf"] {
            check(NAME, offer(NAME, vec![file("a.gguf"), file(path)]), "a file lies outside its folder");
        }
        let deep = format!("{}mmproj.gguf", "a/".repeat(MAX_DEPTH + 1));
        check(NAME, offer(NAME, vec![file("a.gguf"), file(&deep)]), "a file lies too deep in its folder");
        let unhashed = FileOnDisk { sha256: None, ..file("a.gguf") };
        check(NAME, offer(NAME, vec![unhashed]), "a file has no checksum");
        let endless = FileOnDisk { n_bytes: u64::MAX, ..file("a.gguf") };
        check(NAME, offer(NAME, vec![endless, file("mmproj.gguf")]), "its files are larger than any disk");
        check("me/two", offer(NAME, vec![file("a.gguf")]), "it is another model");
        check("smollm2", offer(NAME, vec![file("a.gguf")]), "it is another model");
        check("smollm2", offer("smollm2", vec![file("a.gguf")]), "its file is not the catalogue's");
        check("me/st", offer("me/st", vec![file("config.json"), file("model.safetensors")]), "");
        check("me/st", offer("me/st", vec![file("model.safetensors")]), "its config.json is missing");
        check(
            "me/st",
            offer("me/st", vec![file("config.json"), file("x.py")]),
            "it has files that do not belong to it",
        );
        check("me/st", offer("me/st:Q8_0", vec![file("a.gguf")]), "its name has no file");
    }
}

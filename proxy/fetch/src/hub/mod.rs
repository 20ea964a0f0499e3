//! Finds the files of an `owner/repo[:file]` model on the hub: their URLs, sizes and checksums.
//!
//! `hf-hub` builds the hub's URLs and headers. Its own download does not check the sha256, so [`super::download`] fetches
//! the bytes.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::io;
use std::time::Duration;

use baton_schemas::part_name::PartName;
use hf_hub::api::tokio::{Api, ApiBuilder, ApiError};
use hf_hub::{Cache, Repo, RepoType};
use reqwest::{Response, Url};
use serde::Deserialize;

use super::ModelError;
use super::client::{self, DownloadLimits, one_line, root_cause};
use super::download::DownloadSource;
use super::hub_access::HubAccess;
use super::model_choice::PREFERRED_QUANTIZATION;
use super::options::{ModelForm, PullOptions};
use super::progress::DownloadProgress;
use super::recheck::LAST_FILE;
use super::spec::{HubModel, ends_in_gguf, is_projector, is_relative_path};

mod choices;
#[cfg(test)]
mod tests;

pub(super) use self::choices::choices;

const DENIED_HINT: &str = "check the repository's name; if it is private or gated, set HF_TOKEN and accept its terms";

/// A file of a repository, with its source.
#[derive(Debug)]
pub(super) struct HubFile {
    /// Its path in the repository, which is checked to stay in its folder.
    pub path: String,
    pub source: DownloadSource,
}

/// The files of a repository that make a model.
#[derive(Debug)]
pub(super) enum HubFiles {
    /// A GGUF file, or all parts of a split one in order.
    Gguf(Vec<HubFile>),
    /// The files of a folder of safetensors, `config.json` last: without it a folder is not complete.
    Folder(Vec<HubFile>),
}

/// Asks the hub for the files of a repository.
async fn list(
    repo_id: &str,
    PullOptions { hub: access, limits, progress, .. }: &PullOptions,
) -> Result<(Api, HubListing), ModelError> {
    check_endpoint(access)?;
    let api = connect(access, repo_id)?;
    let main = api.model(repo_id.to_owned());
    let host = Url::parse(&main.url("")).map_or_else(|_| "an invalid address".to_owned(), |url| client::host(&url));
    let listing = ask_with_retries(limits, &**progress, HubQuestion { repo: repo_id, host: &host }, || async {
        let response = main.info_request().query(&[("blobs", "true")]).send().await?.error_for_status()?;
        read_listing(response).await
    });
    Ok((api, listing.await?))
}

/// The longest list of a repository's files, in bytes: of some ten thousand files.
const MAX_LISTING_BYTES: usize = 8 << 20;

async fn read_listing(mut response: Response) -> Result<HubListing, ApiError> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        if body.len() + chunk.len() > MAX_LISTING_BYTES {
            return Err(ApiError::IoError(io::Error::other("its list of files is longer than 8 MiB")));
        }
        body.extend_from_slice(&chunk);
    }
    serde_json::from_slice(&body).map_err(|error| ApiError::IoError(error.into()))
}

/// Finds what `model` names.
pub(super) async fn find(model: &HubModel, options: &PullOptions) -> Result<HubFiles, ModelError> {
    let PullOptions { hub: access, limits, form, .. } = options;
    let repo_id = model.repo_id();
    let (api, listing) = list(&repo_id, options).await?;
    // Fetch by commit, so that a push after this listing cannot mix two versions.
    let revision = listing.sha.clone().unwrap_or_else(|| "main".to_owned());
    let repo = api.repo(Repo::with_revision(repo_id.clone(), RepoType::Model, revision));
    let describe_one = async |file: &Sibling| {
        let url = file_url(&repo.url(""), &file.rfilename).ok_or_else(|| ModelError::HubReply {
            repo: repo_id.clone(),
            what: "the endpoint is not a URL".to_owned(),
        })?;
        let (size_bytes, sha256) = match (file.size, &file.lfs) {
            (Some(size), Some(lfs)) => (Some(size), sha256_like(&lfs.sha256)),
            _ => ask_for_metadata(&api, &url, limits).await,
        };
        let source = DownloadSource {
            name: format!("{repo_id}:{}", file.rfilename),
            url,
            bearer: access.token.clone(),
            size_bytes,
            sha256,
            denied_hint: DENIED_HINT,
        };
        Ok(HubFile { path: file.rfilename.clone(), source })
    };
    let describe = async |files: &[&Sibling]| {
        let mut described = Vec::with_capacity(files.len());
        for file in files {
            described.push(describe_one(file).await?);
        }
        Ok::<_, ModelError>(described)
    };
    let none = match form {
        ModelForm::Folder if model.selector.is_none() => ModelError::NoFolder { repo: repo_id.clone() },
        ModelForm::File | ModelForm::Folder | ModelForm::Any => match choose(model, &listing.siblings) {
            Ok(files) => return Ok(HubFiles::Gguf(describe(&files).await?)),
            Err(none) => none,
        },
    };
    let folder = match (&none, form) {
        (ModelError::NoFolder { .. }, _) | (ModelError::NoGguf { .. }, ModelForm::Any) => folder(&listing.siblings),
        _ => None,
    };
    let folder = folder.ok_or(none)?;
    let following = folder.iter().filter_map(|file| Some(PartName::parse(&file.rfilename)?.following()));
    if let Some(file) = following.into_iter().find(|name| !folder.iter().any(|file| file.rfilename == *name)) {
        return Err(ModelError::MissingPart { repo: repo_id.clone(), file });
    }
    Ok(HubFiles::Folder(describe(&folder).await?))
}

/// The most files of a folder that are fetched. The largest models have some hundred.
const MAX_FILES: usize = 1_000;

/// The small files beside the weights, apart from `config.json`.
const DESCRIPTIONS: [&str; 4] =
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors.index.json"];

/// Returns true for the names of the files that a folder needs or may have, apart from `config.json`.
pub(super) fn is_of_folder(name: &str) -> bool {
    DESCRIPTIONS.contains(&name) || is_weights(name)
}

/// Returns true for the names of the files of weights that mlx-lm loads.
fn is_weights(name: &str) -> bool {
    name.starts_with("model") && name.ends_with(".safetensors") && is_relative_path(name)
}

/// The files of a model of safetensors, as mlx-lm names them. `None`: the repository has no such model.
fn folder(siblings: &[Sibling]) -> Option<Vec<&Sibling>> {
    let at_top = |s: &&Sibling| !s.rfilename.contains('/');
    let weights: Vec<&Sibling> = siblings.iter().filter(at_top).filter(|s| is_weights(&s.rfilename)).collect();
    let config = siblings.iter().find(|s| s.rfilename == LAST_FILE)?;
    let others = siblings.iter().filter(|s| DESCRIPTIONS.contains(&&*s.rfilename));
    let is_whole = !weights.is_empty() && weights.len() <= MAX_FILES;
    is_whole.then(|| others.chain(weights).chain([config]).collect())
}

/// The hub's answer about a repository. A mirror may omit the sizes and checksums.
#[derive(Deserialize)]
struct HubListing {
    sha: Option<String>,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
}

/// Refuses an address that no retry makes right.
fn check_endpoint(access: &HubAccess) -> Result<(), ModelError> {
    let is_address =
        |text: &String| Url::parse(text).is_ok_and(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
    access.endpoint.as_ref().is_none_or(is_address).then_some(()).ok_or(ModelError::WrongHubAddress)
}

fn connect(access: &HubAccess, repo: &str) -> Result<Api, ModelError> {
    // hf-hub requires a cache folder, which is never used here; but it reads a token next to it. Its default would panic
    // without a home folder, and a temporary folder could hold another user's file or pipe. Nothing is below /dev/null.
    let mut builder = ApiBuilder::from_cache(Cache::new("/dev/null/hub".into())).with_progress(false);
    if let Some(endpoint) = &access.endpoint {
        builder = builder.with_endpoint(endpoint.trim_end_matches('/').to_owned());
    }
    let built = builder.with_token(access.token.clone()).build();
    // The error may quote the token's bytes.
    built.map_err(|_| ModelError::HubReply { repo: repo.to_owned(), what: "HF_TOKEN is not a token".to_owned() })
}

/// Asks until an answer comes, a failure is final, or the attempts are used up. Sets the deadlines that hf-hub lacks.
async fn ask_with_retries<T, F>(
    limits: &DownloadLimits,
    progress: &dyn DownloadProgress,
    asked: HubQuestion<'_>,
    ask: impl Fn() -> F,
) -> Result<T, ModelError>
where
    F: Future<Output = Result<T, ApiError>>,
{
    let mut n_failed = 0;
    loop {
        let reason = match within(limits.idle, ask()).await {
            Ok(answer) => return Ok(answer),
            Err(HubTrouble::Final(error)) => return Err(error.about(asked)),
            Err(HubTrouble::Passing(reason)) => reason,
        };
        n_failed += 1;
        if n_failed >= limits.max_attempts {
            return Err(ModelError::Network { name: asked.repo.to_owned(), reason, n_attempts: n_failed });
        }
        progress.notice(&format!("{}: {reason}; trying again", asked.repo));
        tokio::time::sleep(limits.pause(n_failed)).await;
    }
}

/// The repository and the host of a question, for error messages.
#[derive(Clone, Copy)]
struct HubQuestion<'a> {
    repo: &'a str,
    host: &'a str,
}

enum HubTrouble {
    Passing(String),
    Final(HubRefusal),
}

/// A refusal, before the repository's name is added.
enum HubRefusal {
    Status(u16),
    Reply(String),
    Unreachable(String),
}

impl HubRefusal {
    fn about(self, asked: HubQuestion<'_>) -> ModelError {
        let name = asked.repo.to_owned();
        match self {
            // The hub also answers 401 for a repository that does not exist.
            HubRefusal::Status(status @ (401 | 403)) => ModelError::AccessDenied { name, status, hint: DENIED_HINT },
            HubRefusal::Status(status @ (404 | 410)) => ModelError::NotFound { name, status },
            HubRefusal::Status(status) => ModelError::HttpStatus { name, status },
            HubRefusal::Reply(what) => ModelError::HubReply { repo: name, what },
            HubRefusal::Unreachable(reason) => ModelError::HubUnreachable { host: asked.host.to_owned(), name, reason },
        }
    }
}

async fn within<T>(deadline: Duration, ask: impl Future<Output = Result<T, ApiError>>) -> Result<T, HubTrouble> {
    let error = match tokio::time::timeout(deadline, ask).await {
        Ok(Ok(answer)) => return Ok(answer),
        Ok(Err(error)) => error,
        Err(_) => return Err(HubTrouble::Passing("the hub did not answer in time".to_owned())),
    };
    Err(match error {
        // No such host, no network, or no server. A retry would not help.
        ApiError::RequestError(error) if error.is_connect() && !error.is_timeout() => {
            HubTrouble::Final(HubRefusal::Unreachable(root_cause(&error)))
        }
        ApiError::RequestError(error) if error.is_decode() => HubTrouble::Final(HubRefusal::Reply(root_cause(&error))),
        ApiError::RequestError(error) => match error.status().map(|status| status.as_u16()) {
            Some(status @ (408 | 425 | 429 | 500..)) => HubTrouble::Passing(format!("the hub answered HTTP {status}")),
            Some(status) => HubTrouble::Final(HubRefusal::Status(status)),
            None => HubTrouble::Passing(root_cause(&error)),
        },
        other => HubTrouble::Final(HubRefusal::Reply(one_line(&other.to_string()))),
    })
}

/// Reads size and sha256 from the file's own headers. A mirror that reports neither can still serve the file; then only the
/// length that the server announces is checked.
async fn ask_for_metadata(api: &Api, url: &Url, limits: &DownloadLimits) -> (Option<u64>, Option<String>) {
    match within(limits.idle, api.metadata(url.as_str())).await {
        Ok(metadata) => (u64::try_from(metadata.size()).ok(), sha256_like(metadata.etag())),
        Err(_) => (None, None),
    }
}

/// Returns the text if it looks like a sha256: the hub's ETag is the sha256 only for large files.
fn sha256_like(text: &str) -> Option<String> {
    (text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit())).then(|| text.to_ascii_lowercase())
}

/// Appends the path by segments, so that a space or a `#` in a file's name is escaped.
fn file_url(base: &str, path: &str) -> Option<Url> {
    let mut url = Url::parse(base).ok()?;
    url.path_segments_mut().ok()?.pop_if_empty().extend(path.split('/'));
    Some(url)
}

/// A model of a repository: a GGUF file, or the parts of a split one.
struct RepoModel<'a> {
    /// The file's path, or that of the first part.
    path: String,
    /// In order, up to a part that the repository lacks.
    files: Vec<&'a Sibling>,
    missing: Option<String>,
}

fn gguf_models(siblings: &[Sibling]) -> Vec<RepoModel<'_>> {
    // A name from the network becomes a path here, so it is checked like an operator's input.
    let ggufs = siblings.iter().filter(|s| ends_in_gguf(&s.rfilename) && is_relative_path(&s.rfilename));
    let listed: HashMap<&str, &Sibling> = ggufs.clone().map(|s| (&*s.rfilename, s)).collect();
    let mut seen = HashSet::new();
    let mut models = Vec::new();
    for file in ggufs {
        let Some(name) = PartName::parse(&file.rfilename) else {
            models.push(RepoModel { path: file.rfilename.clone(), files: vec![file], missing: None });
            continue;
        };
        if seen.insert(name.sibling(1)) {
            let missing = name.all().find(|part| !listed.contains_key(&**part));
            let files = name.all().map_while(|part| listed.get(&*part).copied()).collect();
            models.push(RepoModel { path: name.sibling(1), files, missing });
        }
    }
    models
}

/// Selects the files of a model: the named one, the only one, or the only one of the preferred quantization.
fn choose<'a>(model: &HubModel, siblings: &'a [Sibling]) -> Result<Vec<&'a Sibling>, ModelError> {
    let models = gguf_models(siblings);
    let RepoModel { files, missing, .. } = match model.selector.as_deref() {
        Some(selector) => choose_named(model, selector, models)?,
        None => choose_obvious(model, models)?,
    };
    missing.map_or(Ok(files), |file| Err(ModelError::MissingPart { repo: model.repo_id(), file }))
}

fn choose_named<'a>(model: &HubModel, selector: &str, models: Vec<RepoModel<'a>>) -> Result<RepoModel<'a>, ModelError> {
    let files = paths(&models);
    // Any part names the whole model.
    let first = PartName::parse(selector).map_or_else(|| selector.to_owned(), |part| part.sibling(1));
    let is_named = |found: &RepoModel| match ends_in_gguf(selector) {
        true => found.path == first,
        false => has_quantization(&found.path, selector),
    };
    let named: Vec<RepoModel> = models.into_iter().filter(is_named).collect();
    if named.is_empty() {
        return Err(ModelError::NoSuchRepoFile { repo: model.repo_id(), file: selector.to_owned(), files });
    }
    only(named).map_err(|files| ModelError::SeveralGgufs { repo: model.repo_id(), files })
}

fn choose_obvious<'a>(model: &HubModel, models: Vec<RepoModel<'a>>) -> Result<RepoModel<'a>, ModelError> {
    // A projector for images is not a model.
    let mut models: Vec<RepoModel> = models.into_iter().filter(|found| !is_projector(&found.path)).collect();
    if models.is_empty() {
        return Err(ModelError::NoGguf { repo: model.repo_id() });
    }
    let is_preferred = |found: &RepoModel| has_quantization(&found.path, PREFERRED_QUANTIZATION);
    let is_whole = |found: &RepoModel| PartName::parse(&found.path).is_none();
    for is_better in [&is_preferred as &dyn Fn(&RepoModel) -> bool, &is_whole] {
        if models.iter().filter(|found| is_better(found)).count() == 1 {
            models.retain(|found| is_better(found));
        }
    }
    only(models).map_err(|files| ModelError::SeveralGgufs { repo: model.repo_id(), files })
}

/// Errors: the paths of several.
fn only(mut models: Vec<RepoModel<'_>>) -> Result<RepoModel<'_>, Vec<String>> {
    match (models.pop(), models.is_empty()) {
        (Some(only), true) => Ok(only),
        (last, _) => {
            models.extend(last);
            Err(paths(&models))
        }
    }
}

fn paths(models: &[RepoModel]) -> Vec<String> {
    models.iter().map(|found| found.path.clone()).collect()
}

/// Returns true if a file's name has the quantization as a whole word: `x-Q4_K_M.gguf` is not of `Q4_K`.
pub(super) fn has_quantization(path: &str, quantization: &str) -> bool {
    let wanted = quantization.to_ascii_lowercase();
    file_name(path).to_ascii_lowercase().split(['-', '.']).any(|word| word == wanted)
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

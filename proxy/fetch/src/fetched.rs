//! The models of the cache folder that endpoints serve without a line in their configuration: those that an operator has fetched
//! through an endpoint. The list is a small file in the folder, so it outlives the processes, and belongs to all of them.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

use baton_schemas::printable::printable;
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

use super::ModelError;
use super::cache::{self, PullLock};
use super::files;
use super::progress::Silent;

/// The most models in the list: each may have a process.
pub const MAX_FETCHED: usize = 256;

/// The most names of one model.
pub const MAX_NAMES: usize = 32;

/// The largest list has 256 models with 32 names of 200 characters.
const MAX_BYTES: u64 = 8 << 20;

/// A model that is served because it was fetched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FetchedModel {
    /// As [`CachedModel::name`](super::stored::CachedModel) has it.
    pub source: String,
    /// The names under which it was fetched or copied, at least one. The first is its public name.
    pub names: Vec<String>,
}

/// The whole file.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FetchedList {
    models: Vec<FetchedModel>,
}

/// Returns true if a model can have this name: it can be printed, and has no spaces.
pub fn is_model_name(name: &str) -> bool {
    !name.is_empty() && printable(name) == name && !name.contains(char::is_whitespace)
}

/// The list. Without a file it is empty. Errors: the file cannot be read, or is no such list.
pub fn read(cache_dir: &Path) -> Result<Vec<FetchedModel>, ModelError> {
    let path = path_in(cache_dir);
    let file = match files::open_own(&path, File::options().read(true)) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(ModelError::file(&path, source)),
    };
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|source| ModelError::file(&path, source))?;
    let bad = |what: &str| ModelError::BadFetchedList { path: path.clone(), what: what.to_owned() };
    if bytes.len() as u64 > MAX_BYTES {
        return Err(bad("it is too long"));
    }
    let list: FetchedList = serde_json::from_slice(&bytes).map_err(|error| bad(&error.to_string()))?;
    check(&list.models).map_err(bad)?;
    Ok(list.models)
}

/// Changes the list, and returns the new one. Errors: `change` makes a list that is not allowed, or the file cannot be read or
/// written; it is as before then.
pub async fn change(
    cache_dir: &Path,
    change: impl FnOnce(&mut Vec<FetchedModel>),
) -> Result<Vec<FetchedModel>, ModelError> {
    let path = path_in(cache_dir);
    cache::create(cache_dir)?;
    let _lock = PullLock::acquire(&path, &Silent).await?;
    let mut models = read(cache_dir)?;
    change(&mut models);
    check(&models).map_err(|what| ModelError::BadFetchedList { path: path.clone(), what: what.to_owned() })?;
    let list = FetchedList { models };
    write(&path, cache_dir, &list).map_err(|source| ModelError::file(&path, source))?;
    Ok(list.models)
}

/// Replaces the file as a whole: whoever reads it sees the old list or the new one.
fn write(path: &Path, cache_dir: &Path, list: &FetchedList) -> std::io::Result<()> {
    let mut file = NamedTempFile::new_in(cache_dir)?;
    file.write_all(&serde_json::to_vec_pretty(list)?)?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    fs::File::open(cache_dir)?.sync_all()
}

fn path_in(cache_dir: &Path) -> PathBuf {
    cache_dir.join("fetched.json")
}

fn check(models: &[FetchedModel]) -> Result<(), &'static str> {
    if models.len() > MAX_FETCHED {
        return Err("it has more than 256 models: delete one");
    }
    let is_sound = |model: &FetchedModel| (1..=MAX_NAMES).contains(&model.names.len());
    if !models.iter().all(is_sound) {
        return Err("a model has no name, or more than 32");
    }
    match models.iter().flat_map(|model| &model.names).all(|name| is_model_name(name)) {
        true => Ok(()),
        false => Err("a model has a name that cannot be used"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(name: &str) -> FetchedModel {
        FetchedModel { source: format!("me/{name}:a.gguf"), names: vec![name.to_owned()] }
    }

    #[tokio::test]
    async fn a_change_is_there_for_the_next_process_and_a_wrong_one_changes_nothing() {
        let cache = tempfile::tempdir().unwrap();
        let folder = cache.path().join("models");
        assert!(read(&folder).unwrap().is_empty());
        change(&folder, |list| list.push(model("one"))).await.unwrap();
        change(&folder, |list| list.push(model("two"))).await.unwrap();
        assert_eq!(read(&folder).unwrap(), [model("one"), model("two")]);
        for wrong in [model(""), model("a b"), model("\u{1b}[2J"), model(&"x".repeat(201))] {
            assert!(change(&folder, |list| list.push(wrong)).await.is_err());
        }
        assert!(change(&folder, |list| list[0].names.clear()).await.is_err());
        let full = |list: &mut Vec<FetchedModel>| list.resize(MAX_FETCHED + 1, model("x"));
        assert!(change(&folder, full).await.unwrap_err().to_string().contains("delete one"));
        assert_eq!(read(&folder).unwrap().len(), 2);
    }

    #[tokio::test]
    async fn a_file_that_is_no_list_is_an_error_and_is_not_replaced() {
        let cache = tempfile::tempdir().unwrap();
        let path = path_in(cache.path());
        for content in ["", "[]", r#"{"models":[{"source":"a/b"}]}"#, r#"{"models":[{"source":"a/b","names":[]}]}"#] {
            fs::write(&path, content).unwrap();
            assert!(matches!(read(cache.path()), Err(ModelError::BadFetchedList { .. })), "{content}");
            assert!(change(cache.path(), |_| ()).await.is_err(), "{content}");
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
        }
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
        assert!(read(cache.path()).is_err(), "a link");
    }

    #[tokio::test]
    async fn changes_at_once_wait_for_each_other() {
        let cache = tempfile::tempdir().unwrap();
        let add = |name: String| {
            let folder = cache.path().to_owned();
            async move { change(&folder, |list| list.push(model(&name))).await.map(drop) }
        };
        let all = futures::future::join_all((0..6).map(|i| add(format!("m{i}")))).await;
        assert!(all.into_iter().all(|added| added.is_ok()));
        assert_eq!(read(cache.path()).unwrap().len(), 6);
    }
}

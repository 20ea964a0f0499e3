//! Parses an operator's `--model`.

use std::fmt;
use std::path::{Path, PathBuf};

use baton_schemas::machine_models::{MAX_MODEL_FILES, MAX_NAME_BYTES};
use baton_schemas::part_name::PartName;
use baton_schemas::printable::{one_line, printable};

use super::ModelError;
use super::catalogue::{self, CatalogueModel};

/// A model that an operator named. It may not exist.
#[derive(Debug, Clone)]
pub enum ModelSpec {
    /// A file that exists.
    File(PathBuf),
    /// A folder with a model as the Hugging Face hub has it.
    Folder(PathBuf),
    /// A name of the catalogue.
    Catalogue(&'static CatalogueModel),
    /// A file of a hub's repository.
    Hub(HubModel),
}

/// `owner/repo`, `owner/repo:FILE.gguf` or `owner/repo:QUANTIZATION`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubModel {
    /// A user or an organisation.
    pub owner: String,
    /// The repository's own name.
    pub repo: String,
    /// A file name that ends in `.gguf`, or the name of a quantization such as `Q8_0`.
    pub selector: Option<String>,
}

impl ModelSpec {
    /// Reads what an operator wrote. A file that exists wins over a name.
    pub fn parse(text: &str) -> Result<ModelSpec, ModelError> {
        if text.trim().is_empty() {
            return Err(ModelError::NoName);
        }
        let path = Path::new(text);
        if path.is_file() {
            return Ok(ModelSpec::File(path.to_owned()));
        }
        if let Some(model) = catalogue::find(text) {
            return Ok(ModelSpec::Catalogue(model));
        }
        // What makes a folder a model.
        if path.join("config.json").is_file() {
            return Ok(ModelSpec::Folder(path.to_owned()));
        }
        if path.is_dir() {
            return Err(ModelError::IsFolder { path: path.to_owned() });
        }
        if text.contains("://") {
            return Err(ModelError::IsUrl { url: text.to_owned() });
        }
        if looks_like_a_path(text) {
            return Err(ModelError::NoSuchFile { path: path.to_owned() });
        }
        match HubModel::parse(text) {
            Some(model) => Ok(ModelSpec::Hub(model)),
            None => Err(ModelError::UnknownModel { name: text.to_owned(), nearest: catalogue::nearest(text) }),
        }
    }
}

impl ModelSpec {
    /// Reads a name that another machine or a client has given: of the catalogue, or of a repository, and never a path of this
    /// machine. Errors: it is neither.
    pub fn named(text: &str) -> Result<ModelSpec, ModelError> {
        let unusable = || ModelError::NotAName { name: one_line(text) };
        if text.len() > MAX_NAME_BYTES {
            return Err(unusable());
        }
        let of_catalogue = catalogue::find(text).map(ModelSpec::Catalogue);
        of_catalogue.or_else(|| HubModel::parse(text).map(ModelSpec::Hub)).ok_or_else(unusable)
    }
}

/// The paths of all files of the weights whose first file is at `first`, in order. `None`: they are too many.
pub(super) fn paths_of(first: &str) -> Option<Vec<String>> {
    match PartName::parse(first) {
        Some(part) if part.n_parts as usize > MAX_MODEL_FILES => None,
        Some(part) => Some(part.all().collect()),
        None => Some(vec![first.to_owned()]),
    }
}

/// Returns true for the file of a projector for images, which is no model.
pub(super) fn is_projector(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    name.to_ascii_lowercase().starts_with("mmproj")
}

/// Returns true for `a/b.gguf`, which is more likely a mistyped path than a repository. `a/b:c.gguf` is a repository's file.
fn looks_like_a_path(text: &str) -> bool {
    let rooted = text.starts_with(['/', '.', '~', '\\']);
    rooted || (ends_in_gguf(text) && !text.contains(':'))
}

pub(super) fn ends_in_gguf(name: &str) -> bool {
    name.len() >= 5 && name.as_bytes()[name.len() - 5..].eq_ignore_ascii_case(b".gguf")
}

impl HubModel {
    fn parse(text: &str) -> Option<HubModel> {
        let (repo, selector) = match text.split_once(':') {
            Some((repo, selector)) => (repo, Some(selector)),
            None => (text, None),
        };
        let (owner, repo) = repo.split_once('/')?;
        // These become folder names below the cache, so they must not leave it.
        let valid = is_name(owner) && is_name(repo) && selector.is_none_or(is_relative_path);
        valid.then(|| HubModel {
            owner: owner.to_owned(),
            repo: repo.to_owned(),
            selector: selector.map(str::to_owned),
        })
    }

    /// `owner/repo`.
    pub fn repo_id(&self) -> String {
        format!("{}/{}", self.owner, self.repo)
    }
}

pub(super) fn is_name(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !text.is_empty() && text.len() <= 200 && text.chars().all(plain) && !text.starts_with('.')
}

/// Returns true for `a/b.gguf`, and false for a path that could leave its folder, is hidden, or would be shown as another one.
pub(super) fn is_relative_path(text: &str) -> bool {
    let safe = |part: &str| !part.is_empty() && part.len() <= 200 && !part.starts_with('.');
    let is_shown_as_it_is = |part: &str| printable(part) == part;
    !text.contains(['\\', ':']) && text.split('/').all(|part| safe(part) && is_shown_as_it_is(part))
}

impl fmt::Display for ModelSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ModelSpec::File(path) | ModelSpec::Folder(path) => path.display().fmt(f),
            ModelSpec::Catalogue(model) => f.write_str(model.name),
            ModelSpec::Hub(model) => model.fmt(f),
        }
    }
}

impl fmt::Display for HubModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.repo)?;
        match &self.selector {
            Some(selector) => write!(f, ":{selector}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(text: &str) -> Option<(String, Option<String>)> {
        match ModelSpec::parse(text) {
            Ok(ModelSpec::Hub(model)) => Some((model.repo_id(), model.selector)),
            _ => None,
        }
    }

    #[test]
    fn an_existing_file_is_itself() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let spec = ModelSpec::parse(file.path().to_str().unwrap()).unwrap();
        assert!(matches!(spec, ModelSpec::File(path) if path == file.path()));
        let folder = file.path().parent().unwrap().to_str().unwrap();
        assert!(matches!(ModelSpec::parse(folder), Err(ModelError::IsFolder { .. })));
    }

    #[test]
    fn a_folder_with_a_configuration_is_a_model() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), "{}").unwrap();
        let spec = ModelSpec::parse(folder.path().to_str().unwrap()).unwrap();
        assert!(matches!(spec, ModelSpec::Folder(path) if path == folder.path()));
    }

    #[test]
    fn a_catalogue_name_in_any_case() {
        assert!(matches!(ModelSpec::parse("SMOLLM2"), Ok(ModelSpec::Catalogue(model)) if model.name == "smollm2"));
    }

    #[test]
    fn a_repository_with_or_without_a_file() {
        assert_eq!(hub("me/models"), Some(("me/models".into(), None)));
        assert_eq!(hub("me/models:Q8_0"), Some(("me/models".into(), Some("Q8_0".into()))));
        assert_eq!(hub("me/models:sub/a b.gguf"), Some(("me/models".into(), Some("sub/a b.gguf".into()))));
    }

    #[test]
    fn nothing_climbs_out_of_the_cache() {
        for text in ["me/..", "me/.git", "a/b:../c.gguf", "a/b:/etc/x.gguf", "a/b:c/.part", "a/b:", "a/b:c//d", "a/b/c"]
        {
            assert_eq!(hub(text), None, "{text}");
        }
        for text in ["a/b:c\n.gguf", "a/b:c\u{202e}fugg.gguf", "a/b:c\u{200b}.gguf"] {
            assert_eq!(hub(text), None, "{text:?} would look like another file");
        }
    }

    #[test]
    fn a_mistyped_path_is_not_taken_for_a_name() {
        for text in ["./model", "/no/such/model.gguf", "models/tiny.gguf", "tiny.GGUF", "~/x"] {
            assert!(matches!(ModelSpec::parse(text), Err(ModelError::NoSuchFile { .. })), "{text}");
        }
    }

    #[test]
    fn an_unknown_name_brings_the_nearest_known_one() {
        let error = ModelSpec::parse("smolm2").unwrap_err().to_string();
        assert!(error.contains("did you mean \"smollm2\"?"), "{error}");
        assert!(matches!(ModelSpec::parse(" "), Err(ModelError::NoName)));
    }

    #[test]
    fn an_address_is_not_a_name() {
        for text in ["https://hub.example/me/models", "http://x/a.gguf", "ftp://x"] {
            let error = ModelSpec::parse(text).unwrap_err();
            assert!(matches!(error, ModelError::IsUrl { .. }) && error.to_string().contains("owner/repo"), "{error}");
        }
    }
}

//! How a pull fetches a model, and of which form.

use std::env;
use std::path::PathBuf;
use std::sync::Arc;

use super::client::DownloadLimits;
use super::hub_access::HubAccess;
use super::progress::DownloadProgress;

/// The form of the models that an engine runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelForm {
    /// A GGUF file.
    File,
    /// A folder of safetensors.
    Folder,
    /// A GGUF file, or else a folder.
    Any,
}

/// How a pull fetches a model.
#[derive(Clone)]
pub struct PullOptions {
    /// See [`default_folder`](super::cache::default_folder).
    pub cache_dir: PathBuf,
    /// Receives the pull's progress.
    pub progress: Arc<dyn DownloadProgress>,
    /// For `owner/repo` models.
    pub hub: HubAccess,
    /// The form that is fetched of an `owner/repo` without a file's name.
    pub form: ModelForm,
    /// The interpreter whose pip is asked for catalogue models.
    pub python: PathBuf,
    /// A PEM file of certificates that are trusted in addition to the system's.
    pub extra_roots: Option<PathBuf>,
    /// Timeouts and retries.
    pub limits: DownloadLimits,
}

impl PullOptions {
    /// The usual options; `HF_ENDPOINT`, `HF_TOKEN` and `PIP_CERT` are read from the environment, now.
    pub fn from_env(cache_dir: impl Into<PathBuf>, progress: Arc<dyn DownloadProgress>) -> Self {
        PullOptions {
            cache_dir: cache_dir.into(),
            progress,
            hub: HubAccess::from_env(),
            form: ModelForm::Any,
            python: "python3".into(),
            extra_roots: env::var_os("PIP_CERT").filter(|path| !path.is_empty()).map(PathBuf::from),
            limits: DownloadLimits::default(),
        }
    }
}

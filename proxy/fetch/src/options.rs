//! How a pull fetches a model, and of which form.

use std::env;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

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
    /// How long the download rests after so many bytes, so that more urgent traffic goes first.
    pub pause_after: fn(u64) -> Duration,
}

impl PullOptions {
    /// The usual options; `HF_ENDPOINT`, `HF_TOKEN` and `PIP_CERT` are read from the environment, now.
    pub fn from_env(cache_dir: impl Into<PathBuf>, progress: Arc<dyn DownloadProgress>) -> Self {
        PullOptions {
            cache_dir: cache_dir.into(),
            progress,
            hub: HubAccess::from_env(),
            form: ModelForm::Any,
            python: env::current_exe()
                .ok()
                .and_then(|program| python_beside(&program))
                .unwrap_or_else(|| "python3".into()),
            extra_roots: env::var_os("PIP_CERT").filter(|path| !path.is_empty()).map(PathBuf::from),
            limits: DownloadLimits::default(),
            pause_after: |_| Duration::ZERO,
        }
    }
}

/// The interpreter of the environment that this program is installed in as a wheel (pipx, uv, venv): its pip is there, while the
/// user's `python3` may have none.
fn python_beside(program: &Path) -> Option<PathBuf> {
    let program = program.canonicalize().ok()?;
    let package = program.parent()?.parent()?;
    // In `bin`, or where the wheel with CUDA puts it: lib/python3.…/site-packages/baton_serve_cuda/bin.
    let environment =
        if package.ends_with("site-packages/baton_serve_cuda") { package.ancestors().nth(4)? } else { package };
    if !environment.join("pyvenv.cfg").is_file() {
        return None;
    }
    Some(environment.join("bin/python3")).filter(|python| python.is_file())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_program_of_a_python_environment_asks_the_pip_of_that_environment() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let bin = root.join("bin");
        fs::create_dir(&bin).unwrap();
        for file in ["baton", "python3"] {
            fs::write(bin.join(file), "").unwrap();
        }
        // As in /usr.
        assert_eq!(python_beside(&bin.join("baton")), None);
        fs::write(root.join("pyvenv.cfg"), "").unwrap();
        // pipx and uv link to the program.
        std::os::unix::fs::symlink(bin.join("baton"), root.join("link")).unwrap();
        assert_eq!(python_beside(&root.join("link")), Some(bin.join("python3")));
        let with_cuda = root.join("lib/python3.13/site-packages/baton_serve_cuda/bin");
        fs::create_dir_all(&with_cuda).unwrap();
        fs::write(with_cuda.join("baton"), "").unwrap();
        assert_eq!(python_beside(&with_cuda.join("baton")), Some(bin.join("python3")));
        fs::remove_file(bin.join("python3")).unwrap();
        assert_eq!(python_beside(&bin.join("baton")), None);
    }
}

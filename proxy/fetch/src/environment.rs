//! A Python environment of Baton's own, with exact versions of packages, in a folder of the cache.
//!
//! The operator's own pip installs them, like [`pull`](super::pull) it is configured for the user's index already.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::process::Command;

use super::ModelError;
use super::cache::{self, PullLock};
use super::progress::DownloadProgress;

/// The list that is installed. Written last, so that an interrupted installation is noticed.
const INSTALLED: &str = "installed.txt";

/// The oldest Python that the packages support.
const MIN_PYTHON: (u32, u32) = (3, 11);

/// Python says its version at once.
const MAX_QUESTION: Duration = Duration::from_secs(20);

/// Some hundred megabytes through a slow line.
const MAX_INSTALL: Duration = Duration::from_secs(3_600);

/// Why an environment cannot be made or used. Each message is one line for the operator.
#[derive(Debug, thiserror::Error)]
pub enum EnvironmentError {
    /// The cache's folder cannot be used.
    #[error(transparent)]
    Cache(#[from] ModelError),
    /// There is no such Python.
    #[error("cannot run {}: {source}. Install Python {}.{} or newer, or name one with --python", python.display(), MIN_PYTHON.0, MIN_PYTHON.1)]
    NoPython {
        python: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// The Python is too old, or none.
    #[error("{} is {version}; Python {}.{} or newer is needed: name one with --python", python.display(), MIN_PYTHON.0, MIN_PYTHON.1)]
    OldPython {
        python: PathBuf,
        /// What it says about itself.
        version: String,
    },
    /// A step failed. Python's own messages are on standard error.
    #[error("{step} failed ({status}); see the messages above")]
    Failed {
        /// What was run, in words.
        step: &'static str,
        status: ExitStatus,
    },
    /// A step took too long.
    #[error("{step} took more than {} seconds", deadline.as_secs())]
    TooLong {
        /// What was run, in words.
        step: &'static str,
        deadline: Duration,
    },
}

/// An environment, which may not exist yet.
#[derive(Debug, Clone)]
pub struct PythonEnvironment {
    folder: PathBuf,
}

impl PythonEnvironment {
    /// The environment of this name in the cache.
    pub fn new(cache_dir: &Path, name: &str) -> Self {
        PythonEnvironment { folder: cache_dir.join(name) }
    }

    /// Its interpreter.
    pub fn python(&self) -> PathBuf {
        self.folder.join("bin").join("python")
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns true if exactly these packages were installed.
    pub fn has(&self, requirements: &str) -> bool {
        // The interpreter is a link to the system's, which may be gone.
        self.python().is_file()
            && fs::read_to_string(self.folder.join(INSTALLED)).is_ok_and(|installed| installed == requirements)
    }

    /// Installs packages: a list in pip's format. An environment with another list is made anew, with `python`. Python's and
    /// pip's own messages go to standard error. Dropping the future ends them.
    pub async fn install(
        &self,
        python: &Path,
        requirements: &str,
        progress: &dyn DownloadProgress,
    ) -> Result<(), EnvironmentError> {
        if self.has(requirements) {
            return Ok(());
        }
        check_version(python).await?;
        cache::check_writable(&self.folder)?;
        cache::create(&self.folder)?;
        let _lock = PullLock::acquire(&self.folder, progress).await?;
        // Another process may have installed it meanwhile.
        if self.has(requirements) {
            return Ok(());
        }
        progress.notice(&format!("installing Python packages into {}", self.folder.display()));
        let mut venv = Command::new(python);
        venv.args(["-I", "-m", "venv", "--clear"]).arg(&self.folder);
        run(venv, "making a Python environment", MAX_INSTALL).await?;
        let wanted = self.folder.join("requirements.txt");
        let write = |path: &Path| fs::write(path, requirements).map_err(|source| ModelError::file(path, source));
        write(&wanted)?;
        let mut pip = Command::new(self.python());
        pip.args([
            "-I",
            "-m",
            "pip",
            "install",
            "--no-input",
            "--disable-pip-version-check",
            "--only-binary=:all:",
            "-r",
        ]);
        pip.arg(&wanted);
        run(pip, "installing the packages", MAX_INSTALL).await?;
        write(&self.folder.join(INSTALLED))?;
        Ok(())
    }

    /// Runs a program in the environment. Its messages go to standard error.
    pub async fn run<A: AsRef<OsStr>>(
        &self,
        step: &'static str,
        program: &str,
        args: impl IntoIterator<Item = A>,
        deadline: Duration,
    ) -> Result<(), EnvironmentError> {
        let mut python = Command::new(self.python());
        python.args(["-I", "-c", program]).args(args);
        run(python, step, deadline).await
    }
}

async fn run(mut command: Command, step: &'static str, deadline: Duration) -> Result<(), EnvironmentError> {
    // Standard output may be the answer to the caller's own caller.
    let status = command.stdin(Stdio::null()).stdout(io::stderr()).kill_on_drop(true).status();
    match tokio::time::timeout(deadline, status).await {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => Err(EnvironmentError::Failed { step, status }),
        Ok(Err(source)) => Err(EnvironmentError::NoPython { python: command.as_std().get_program().into(), source }),
        Err(_) => Err(EnvironmentError::TooLong { step, deadline }),
    }
}

/// Refuses a Python that is too old.
async fn check_version(python: &Path) -> Result<(), EnvironmentError> {
    let mut command = Command::new(python);
    command.args(["-I", "-c", "import sys; print(*sys.version_info[:2])"]);
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output();
    let output = match tokio::time::timeout(MAX_QUESTION, output).await {
        Ok(output) => output.map_err(|source| EnvironmentError::NoPython { python: python.to_owned(), source })?,
        Err(_) => {
            return Err(EnvironmentError::TooLong { step: "asking Python for its version", deadline: MAX_QUESTION });
        }
    };
    let said = String::from_utf8_lossy(&output.stdout);
    let mut numbers = said.split_whitespace().map(|number| number.parse::<u32>().ok());
    let found = match (numbers.next().flatten(), numbers.next().flatten()) {
        (Some(major), Some(minor)) => Some((major, minor)),
        _ => None,
    };
    match found {
        Some(version) if version >= MIN_PYTHON => Ok(()),
        found => {
            let version = found.map_or_else(|| "no Python".into(), |(major, minor)| format!("Python {major}.{minor}"));
            Err(EnvironmentError::OldPython { python: python.to_owned(), version })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_python::FakePython;
    use crate::progress;

    /// Installs `numbers` with a Python that says it is this version; its venv has a copy of it as interpreter.
    async fn install(folder: &Path, version: &str, then: &str, list: &str) -> Result<(), EnvironmentError> {
        let script = format!(
            r#"case "$*" in
            "-I -c"*) echo {version} ;;
            *venv*) mkdir -p "$5/bin" && cp "$0" "$5/bin/python" ;;
            *pip*) {then} ;;
            esac"#
        );
        let python = FakePython::running(&script);
        let environment = PythonEnvironment::new(folder, "mlx");
        environment.install(&python.path, list, &*progress::to_stderr()).await
    }

    #[tokio::test]
    async fn an_environment_is_complete_only_when_pip_has_succeeded() {
        let folder = tempfile::tempdir().unwrap();
        let environment = PythonEnvironment::new(folder.path(), "mlx");
        let failed = install(folder.path(), "3 11", "exit 1", "a==1").await.unwrap_err();
        assert!(failed.to_string().contains("installing the packages failed"), "{failed}");
        assert!(!environment.has("a==1"));
        install(folder.path(), "3 11", "exit 0", "a==1").await.unwrap();
        assert!(environment.has("a==1") && !environment.has("a==2") && environment.python().exists());
        // Nothing is run again.
        install(folder.path(), "3 11", "exit 1", "a==1").await.unwrap();
        assert!(install(folder.path(), "3 11", "exit 1", "a==2").await.is_err());
    }

    #[tokio::test]
    async fn a_missing_or_old_python_is_one_clear_line() {
        let folder = tempfile::tempdir().unwrap();
        let old = install(folder.path(), "3 9", "exit 0", "a==1").await.unwrap_err();
        assert!(old.to_string().contains("is Python 3.9; Python 3.11 or newer is needed"), "{old}");
        let environment = PythonEnvironment::new(folder.path(), "mlx");
        let none = environment.install(Path::new("/nowhere/python3"), "a", &*progress::to_stderr()).await.unwrap_err();
        assert!(none.to_string().contains("Install Python 3.11 or newer"), "{none}");
        assert!(!environment.folder().exists(), "nothing is left behind");
    }
}

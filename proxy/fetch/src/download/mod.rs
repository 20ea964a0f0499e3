//! Downloads one file from one URL. The file gets its final name only when it is complete and verified.
//!
//! Bytes go to `NAME.part`, and the next pull continues an interrupted one. Only a part with the expected size and sha256
//! is renamed. The caller holds the [`PullLock`].

use std::path::Path;
use std::time::Duration;

use futures::StreamExt;
use reqwest::header::{CONTENT_RANGE, ETAG, HeaderMap, IF_RANGE, RANGE};
use reqwest::{Client, Response, StatusCode, Url};

use super::ModelError;
use super::cache::{PullLock, check_space};
use super::client::{DownloadLimits, host, root_cause};
use super::part_file::{PartFile, PartIdentity};
use super::progress::DownloadProgress;

#[cfg(test)]
mod tests;

/// The file to fetch, with its expected size and checksum.
#[derive(Debug, Clone)]
pub(super) struct DownloadSource {
    pub url: Url,
    /// For messages and the progress bar.
    pub name: String,
    /// Sent only to this URL's host, not after a redirect to another host.
    pub bearer: Option<String>,
    /// `None` if it is unknown in advance; the server's size is used then.
    pub size_bytes: Option<u64>,
    /// Lower-case hex. `None` if it is unknown in advance.
    pub sha256: Option<String>,
    /// The advice to the operator after a 401 or 403.
    pub denied_hint: &'static str,
}

pub(super) struct Fetcher<'a> {
    pub client: &'a Client,
    pub limits: &'a DownloadLimits,
    pub progress: &'a dyn DownloadProgress,
    /// See [`PullOptions::pause_after`](super::PullOptions::pause_after).
    pub pause_after: fn(u64) -> Duration,
}

/// An attempt that receives this much resets the count of failures, so that a bad link with progress succeeds eventually.
const WORTHWHILE_BYTES: u64 = 1 << 20;

impl Fetcher<'_> {
    /// Fetches `source` to `final_path`. Dropping the future stops the download and keeps the received bytes for the next
    /// pull.
    pub(super) async fn fetch(
        &self,
        source: &DownloadSource,
        final_path: &Path,
        lock: &PullLock,
    ) -> Result<(), ModelError> {
        let part = PartFile::of(final_path, lock);
        let resumed = match self.receive(source, &part).await {
            Ok(resumed) => resumed,
            Err(error) => {
                // Bytes that no later pull can continue would only fill the disk.
                if usable_bytes(source, &part) == 0 {
                    part.discard()?;
                }
                return Err(error);
            }
        };
        if let Err(error) = verify(source, &part).await {
            part.discard()?;
            if !resumed {
                return Err(error);
            }
            // The part of an earlier pull may have been wrong, so fetch the whole file once more.
            self.progress.notice(&format!("{error}; fetching it again from the start"));
            self.receive(source, &part).await?;
            if let Err(error) = verify(source, &part).await {
                part.discard()?;
                return Err(error);
            }
        }
        part.publish(final_path)?;
        self.progress.finished();
        Ok(())
    }

    /// Downloads all bytes into the part, with retries. Returns true if it continued a part from before this call.
    async fn receive(&self, source: &DownloadSource, part: &PartFile) -> Result<bool, ModelError> {
        let at_start = usable_bytes(source, part);
        let mut n_failed = 0;
        loop {
            let before = usable_bytes(source, part);
            let failure = match self.attempt(source, part).await {
                Ok(()) => return Ok(at_start > 0),
                Err(AttemptFailure::Final(error)) => return Err(error),
                Err(AttemptFailure::Passing(reason)) => reason,
            };
            let gained = usable_bytes(source, part).saturating_sub(before);
            n_failed = if gained >= WORTHWHILE_BYTES { 1 } else { n_failed + 1 };
            if n_failed >= self.limits.max_attempts {
                let reason = format!("{}: {failure}", host(&source.url));
                return Err(ModelError::Network { name: source.name.clone(), reason, n_attempts: n_failed });
            }
            self.progress.notice(&format!("{}: {failure}; trying again", source.name));
            tokio::time::sleep(self.limits.pause(n_failed)).await;
        }
    }

    /// One request, and its body into the part.
    async fn attempt(&self, source: &DownloadSource, part: &PartFile) -> Result<(), AttemptFailure> {
        let have_bytes = usable_bytes(source, part);
        if have_bytes > 0 && source.size_bytes == Some(have_bytes) {
            self.progress.started(&source.name, source.size_bytes);
            return Ok(());
        }
        let response = self.request(source, part, have_bytes).await?;
        let start = match response.status() {
            StatusCode::PARTIAL_CONTENT => continued_at(response.headers(), have_bytes),
            StatusCode::OK => Some(0),
            // The file has become shorter, or the server is faulty. The part cannot be used.
            StatusCode::RANGE_NOT_SATISFIABLE => None,
            status => return Err(refusal(source, status)),
        };
        let Some(start) = start else {
            part.discard().map_err(AttemptFailure::Final)?;
            return Err(AttemptFailure::Passing("the server does not continue the file".to_owned()));
        };
        let total_bytes = announced_bytes(&response, start);
        if let (Some(expected_bytes), Some(found_bytes)) = (source.size_bytes, total_bytes)
            && expected_bytes != found_bytes
        {
            part.discard().map_err(AttemptFailure::Final)?;
            return Err(AttemptFailure::Final(wrong_size(source, expected_bytes, found_bytes)));
        }
        if start == 0 {
            let identity = PartIdentity { etag: strong_etag(response.headers()), sha256: source.sha256.clone() };
            part.begin(&identity).map_err(AttemptFailure::Final)?;
        }
        let total_bytes = total_bytes.or(source.size_bytes);
        if let (Some(total), Some(folder)) = (total_bytes, part.path().parent()) {
            check_space(folder, total.saturating_sub(start)).map_err(AttemptFailure::Final)?;
        }
        self.progress.started(&source.name, total_bytes);
        self.progress.reached(start);
        self.copy_body(source, part, AcceptedResponse { response, start, total_bytes }).await
    }

    async fn request(
        &self,
        source: &DownloadSource,
        part: &PartFile,
        have_bytes: u64,
    ) -> Result<Response, AttemptFailure> {
        let mut request = self.client.get(source.url.clone());
        if let Some(token) = &source.bearer {
            request = request.bearer_auth(token);
        }
        if have_bytes > 0 {
            request = request.header(RANGE, format!("bytes={have_bytes}-"));
            if let Some(etag) = part.left_behind().and_then(|(_, identity)| identity.etag) {
                // If the file has changed, the server sends all of it.
                request = request.header(IF_RANGE, etag);
            }
        }
        // Not every client has a deadline for silence.
        let sent = tokio::time::timeout(self.limits.connect + self.limits.idle, request.send()).await;
        sent.map_err(|_| silent())?.map_err(|error| AttemptFailure::Passing(root_cause(&error)))
    }

    async fn copy_body(
        &self,
        source: &DownloadSource,
        part: &PartFile,
        body: AcceptedResponse,
    ) -> Result<(), AttemptFailure> {
        let total_bytes = body.total_bytes;
        let mut chunks = body.response.bytes_stream();
        let appender = part.append();
        let mut done_bytes = body.start;
        let outcome = loop {
            let chunk = match tokio::time::timeout(self.limits.idle, chunks.next()).await {
                Ok(Some(Ok(chunk))) => chunk,
                Ok(Some(Err(error))) => break Err(AttemptFailure::Passing(root_cause(&error))),
                Ok(None) => break Ok(()),
                Err(_) => break Err(silent()),
            };
            let n_bytes = chunk.len() as u64;
            done_bytes += n_bytes;
            // A body without an announced length could otherwise fill the disk.
            if let Some(expected_bytes) = total_bytes.filter(|total| done_bytes > *total) {
                break Err(AttemptFailure::Final(wrong_size(source, expected_bytes, done_bytes)));
            }
            if total_bytes.is_none() && done_bytes > self.limits.most_unannounced {
                let (name, most_bytes) = (source.name.clone(), self.limits.most_unannounced);
                break Err(AttemptFailure::Final(ModelError::Endless { name, most_bytes }));
            }
            if !appender.push(chunk).await {
                break Ok(());
            }
            self.progress.reached(done_bytes);
            let pause = (self.pause_after)(n_bytes);
            if !pause.is_zero() {
                tokio::time::sleep(pause).await;
            }
        };
        // Even after a failed transfer: the received bytes must be on the disk before the part's size is read.
        appender.finish().await.map_err(AttemptFailure::Final)?;
        if matches!(outcome, Err(AttemptFailure::Final(ModelError::Endless { .. }))) {
            part.discard().map_err(AttemptFailure::Final)?;
        }
        outcome?;
        match total_bytes {
            Some(total) if done_bytes < total => Err(AttemptFailure::Passing("the transfer ended early".to_owned())),
            _ => Ok(()),
        }
    }
}

fn silent() -> AttemptFailure {
    AttemptFailure::Passing("the server did not answer in time".to_owned())
}

/// A response whose head has been accepted.
struct AcceptedResponse {
    response: Response,
    /// The body's offset in the file.
    start: u64,
    /// The whole file's size, if known.
    total_bytes: Option<u64>,
}

/// Why an attempt ended.
enum AttemptFailure {
    /// Another attempt may succeed.
    Passing(String),
    /// No other attempt can succeed.
    Final(ModelError),
}

/// Bytes of the file at `final_path` that an earlier pull has received.
pub(super) fn received_bytes(source: &DownloadSource, final_path: &Path, lock: &PullLock) -> u64 {
    usable_bytes(source, &PartFile::of(final_path, lock))
}

/// Bytes at the start of the file that need not be fetched again.
fn usable_bytes(source: &DownloadSource, part: &PartFile) -> u64 {
    match part.left_behind() {
        // Without a checksum or an ETag the part may belong to another version of the file.
        Some((_, identity)) if identity.sha256.is_none() && identity.etag.is_none() => 0,
        Some((_, identity)) if identity.sha256 != source.sha256 => 0,
        Some((n_bytes, _)) if source.size_bytes.is_some_and(|size| n_bytes > size) => 0,
        Some((n_bytes, _)) => n_bytes,
        None => 0,
    }
}

/// The offset at which a 206 begins; `None` if it is not the end of the part.
fn continued_at(headers: &HeaderMap, have_bytes: u64) -> Option<u64> {
    let (start, _) = content_range(headers)?;
    (start == have_bytes && have_bytes > 0).then_some(start)
}

/// `bytes START-END/TOTAL`; the total may be `*`.
fn content_range(headers: &HeaderMap) -> Option<(u64, Option<u64>)> {
    let value = headers.get(CONTENT_RANGE)?.to_str().ok()?.strip_prefix("bytes ")?;
    let (range, total) = value.split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, total.parse().ok()))
}

/// The whole file's size, if the response reports it.
fn announced_bytes(response: &Response, start: u64) -> Option<u64> {
    let from_range = content_range(response.headers()).and_then(|(_, total)| total);
    from_range.or_else(|| response.content_length()?.checked_add(start))
}

/// The response's ETag. `None` for a weak one, because `If-Range` requires a strong ETag.
fn strong_etag(headers: &HeaderMap) -> Option<String> {
    let etag = headers.get(ETAG)?.to_str().ok()?;
    etag.starts_with('"').then(|| etag.to_owned())
}

fn refusal(source: &DownloadSource, status: StatusCode) -> AttemptFailure {
    let name = source.name.clone();
    let code = status.as_u16();
    match code {
        401 | 403 => AttemptFailure::Final(ModelError::AccessDenied { name, status: code, hint: source.denied_hint }),
        404 | 410 => AttemptFailure::Final(ModelError::NotFound { name, status: code }),
        408 | 425 | 429 | 500.. => AttemptFailure::Passing(format!("the server answered HTTP {code}")),
        _ => AttemptFailure::Final(ModelError::HttpStatus { name, status: code }),
    }
}

fn wrong_size(source: &DownloadSource, expected_bytes: u64, found_bytes: u64) -> ModelError {
    ModelError::SizeMismatch { name: source.name.clone(), expected_bytes, found_bytes }
}

async fn verify(source: &DownloadSource, part: &PartFile) -> Result<(), ModelError> {
    let (found_bytes, found) = part.seal().await?;
    if let Some(expected_bytes) = source.size_bytes.filter(|expected| *expected != found_bytes) {
        return Err(wrong_size(source, expected_bytes, found_bytes));
    }
    match &source.sha256 {
        Some(expected) if !expected.eq_ignore_ascii_case(&found) => {
            Err(ModelError::ChecksumMismatch { name: source.name.clone(), expected: expected.clone(), found })
        }
        _ => Ok(()),
    }
}

//! Reads request bodies: bounded in size, time and memory, decompressed, and treated as JSON for every `Content-Type`.
//!
//! Bare `curl -d` sends `application/x-www-form-urlencoded`, so the type is ignored. The dialect parses the bytes, on
//! threads of their own and a few bodies at a time: a body may grow to a hundred times its size and take up to a
//! second. Only tiny bodies are parsed where they arrive. What a body becomes is charged to its key while it is held.
//! Every error here uses the JSON envelope, because clients print its message.

pub(super) mod parser_threads;
pub(super) mod unread_body;

use std::io::{self, Read};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::body::HttpBody as _;
use axum::extract::{FromRequest, Request};
use baton_link::awake;
use baton_schemas::openai::{ErrorBody, ErrorKind, InvalidRequest};
use baton_schemas::request::{BodyNotes, MeasuredParse, measured};
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, StatusCode, header};
use http_body_util::BodyExt;
use parser_threads::ParserThreads;
use tokio::time::{Instant, timeout_at};

use super::reply::request_steps::is_stopping;
use super::{HttpFailure, HttpState};
use crate::account::Account;
use crate::account::request_memory::{MemoryCharge, MemoryFull, ORDINARY_BODY, RequestHold};
use crate::request::caller::Caller;
use crate::request::warnings::{Warning, Warnings};

/// A body brings [`PROGRESS_BYTES`] in each of these periods until it ends, so that stalled ones do not keep memory.
const PROGRESS_TIME: Duration = Duration::from_secs(10);
const PROGRESS_BYTES: usize = 64 << 10;

/// How long the rest of a refused body is read and discarded. Without this, a client that is still sending when the
/// connection closes gets a reset instead of the reply.
const DISCARD_FOR: Duration = Duration::from_secs(2);

/// How many bytes of a refused body are read and discarded. After that the connection closes.
const DISCARD_BYTES: u64 = 64 << 20;

/// A compressed body may always grow to this size.
const ALWAYS_DECODED: usize = 1 << 20;

/// How many times its size a larger body may grow. Conversations grow by 3 to 20 times, bombs by 1,000.
const MAX_RATIO: usize = 100;

/// A body up to this size is parsed where it arrived: a short question. However it is written, that takes a millisecond at
/// most, and another thread would take longer than most of them.
const TINY_BODY: usize = 2 << 10;

/// Decompressed bytes are charged in steps of this size.
const DECODE_STEP: usize = 64 << 10;

/// A body as a route takes it that words its failures itself.
pub(in crate::http) type ReadBody = Result<JsonBody, HttpFailure>;

/// A body that has arrived. The dialect parses it.
pub struct JsonBody {
    bytes: Bytes,
    encoding: ContentEncoding,
    /// The maximum size, decompressed.
    limit: usize,
    threads: ParserThreads,
    charge: MemoryCharge,
    account: Option<Arc<Account>>,
    hold: RequestHold,
    warnings: Warnings,
}

impl FromRequest<HttpState> for JsonBody {
    type Rejection = HttpFailure;

    async fn from_request(request: Request, state: &HttpState) -> Result<Self, HttpFailure> {
        let (head, mut body) = request.into_parts();
        let arrived = JsonBody::arrive(&head, &mut body, state).await;
        if let Err(failure) = &arrived {
            charge_refused(head.extensions.get().map(|caller: &Caller| &*caller.account), failure);
            // Do not read the rest of a slow body, nor of one whose client waits for '100 Continue': it would then send
            // it. If the body does not end in time, the reply closes the connection: see `unread_body`.
            if failure.status != StatusCode::REQUEST_TIMEOUT && !head.headers.contains_key(header::EXPECT) {
                unread_body::discard(&mut body, DISCARD_BYTES, DISCARD_FOR).await;
            }
        }
        arrived
    }
}

impl JsonBody {
    async fn arrive(head: &Parts, body: &mut Body, state: &HttpState) -> Result<JsonBody, HttpFailure> {
        let caller: Option<&Caller> = head.extensions.get();
        if let Some(caller) = caller {
            caller.account.check_rates().map_err(|error| HttpFailure::of_request(&error, &caller.request_id))?;
        }
        let encoding = ContentEncoding::of(&head.headers)?;
        let limit = state.config.max_body_bytes;
        let account = caller.map(|caller| Arc::clone(&caller.account));
        let of_key = account.as_ref().and_then(|account| account.memory.clone());
        let mut charge = MemoryCharge::new(Arc::clone(&state.config.memory), of_key);
        let bytes = read(body, limit, state.config.body_deadline, &mut charge).await?;
        let hold = caller.map(|caller| caller.memory.clone()).unwrap_or_default();
        let warnings = caller.map(|caller| caller.warnings.clone()).unwrap_or_default();
        Ok(JsonBody { bytes, encoding, limit, threads: state.parser_threads.clone(), charge, account, hold, warnings })
    }

    /// Parses the body with the dialect's parser, and drops its bytes.
    ///
    /// Errors: the body is refused, which counts as a request of its key; or the server has no room for it now.
    pub async fn parse<T: Send + 'static>(
        self,
        parse: impl FnOnce(&[u8]) -> Result<T, InvalidRequest> + Send + 'static,
    ) -> Result<T, HttpFailure> {
        let account = self.account.clone();
        let outcome = self.parse_uncharged(parse).await;
        if let Err(failure) = &outcome {
            charge_refused(account.as_deref(), failure);
        }
        outcome
    }

    async fn parse_uncharged<T: Send + 'static>(
        self,
        parse: impl FnOnce(&[u8]) -> Result<T, InvalidRequest> + Send + 'static,
    ) -> Result<T, HttpFailure> {
        let JsonBody { mut bytes, encoding, limit, threads, mut charge, hold, warnings, .. } = self;
        let arrived_at = Instant::now();
        let deadline = ParserThreads::deadline();
        if encoding != ContentEncoding::Identity {
            let thread = threads.decoder(deadline).await?;
            let decode = move || -> Result<_, HttpFailure> {
                let _thread = thread;
                let mut decoded = charge.another();
                let max_bytes = encoding.max_decoded(bytes.len(), limit);
                let bytes = encoding.decode(&bytes, max_bytes, &mut decoded);
                Ok((bytes.map_err(|error| error.failure(max_bytes, limit))?, decoded))
            };
            (bytes, charge) = off_runtime(decode).await?;
        }
        let (value, charge, notes) = if bytes.len() <= TINY_BODY {
            parse_charged(&bytes, charge, parse)?
        } else {
            let thread = threads.thread(bytes.len(), deadline).await?;
            // If the client leaves meanwhile, the thread and the memory stay charged until the parser ends.
            let parse = move || {
                let _thread = thread;
                parse_charged(&bytes, charge, parse)
            };
            off_runtime(parse).await?
        };
        hold.keep(charge, arrived_at.elapsed());
        if !notes.ignored.is_empty() {
            warnings.add(Warning::Ignored(notes));
        }
        Ok(value)
    }
}

/// Parses a body, and charges what it became. Its texts take as much as its bytes at most.
fn parse_charged<T>(
    bytes: &[u8],
    mut charge: MemoryCharge,
    parse: impl FnOnce(&[u8]) -> Result<T, InvalidRequest>,
) -> Result<(T, MemoryCharge, BodyNotes), HttpFailure> {
    let MeasuredParse { value, n_bytes, notes } = measured(|| parse(bytes));
    let value = value?;
    charge.grow_to(bytes.len() + n_bytes)?;
    Ok((value, charge, notes))
}

/// Runs this on a thread where it may take long.
async fn off_runtime<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, HttpFailure> + Send + 'static,
) -> Result<T, HttpFailure> {
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        // As if it had run here.
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_cancelled) => Err(HttpFailure::from(&is_stopping())),
        },
    }
}

/// Counts a body that is refused for what it is as a request of its key.
fn charge_refused(account: Option<&Account>, failure: &HttpFailure) {
    let is_limited = failure.status == StatusCode::TOO_MANY_REQUESTS;
    if let Some(account) = account.filter(|_| failure.status.is_client_error() && !is_limited) {
        // If that exceeds the rate, the next request is refused.
        let _ = account.take_request();
    }
}

/// Reads the whole body. Errors: it exceeds `limit` bytes, ends early, is slow, or there is no memory for it.
async fn read(
    body: &mut Body,
    limit: usize,
    max_time: Duration,
    charge: &mut MemoryCharge,
) -> Result<Bytes, HttpFailure> {
    if body.size_hint().lower() > limit as u64 {
        return Err(too_large(limit));
    }
    let mut deadline = Instant::now() + max_time;
    let n_declared = body.size_hint().exact().map_or(0, |n_bytes| n_bytes as usize);
    let mut bytes = Vec::new();
    let mut progress_due = Instant::now() + PROGRESS_TIME;
    let mut n_due = PROGRESS_BYTES;
    loop {
        let due = deadline.min(progress_due);
        let frame = match timeout_at(due, body.frame()).await {
            Ok(Some(frame)) => frame.map_err(|_broken| cut_off())?,
            Ok(None) => return Ok(bytes.into()),
            // Bytes that came while this process was stopped are not read yet.
            Err(_elapsed) if awake::has_overslept(due) => {
                progress_due = Instant::now() + PROGRESS_TIME;
                deadline = progress_due.max(deadline + due.elapsed());
                continue;
            }
            Err(_elapsed) => return Err(too_slow()),
        };
        // A trailers frame carries no data.
        let Ok(data) = frame.into_data() else { continue };
        if bytes.len() + data.len() > limit {
            return Err(too_large(limit));
        }
        charge.grow_to(bytes.len() + data.len())?;
        append(&mut bytes, &data, n_declared);
        if bytes.len() >= n_due {
            n_due = bytes.len() + PROGRESS_BYTES;
            progress_due = Instant::now() + PROGRESS_TIME;
        }
    }
}

/// Appends bytes of a body that declares `n_declared` bytes in all, or 0.
///
/// A body that has brought little may never bring the rest, so it first gets the space of an ordinary body at most.
/// Then it gets all its space, because growing by steps would copy and take more. The system gives memory only as it is
/// written, and that is charged.
fn append(bytes: &mut Vec<u8>, data: &[u8], n_declared: usize) {
    if bytes.len() + data.len() > bytes.capacity() {
        let n_bytes = if bytes.is_empty() { n_declared.min(ORDINARY_BODY) } else { n_declared };
        bytes.reserve_exact(n_bytes.saturating_sub(bytes.len()));
    }
    bytes.extend_from_slice(data);
}

/// The compression of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ContentEncoding {
    Identity,
    Zstd,
    Gzip,
    Deflate,
}

impl ContentEncoding {
    /// Reads `Content-Encoding`. Stacked encodings are refused like unknown ones: no client sends them.
    fn of(headers: &HeaderMap) -> Result<Self, HttpFailure> {
        let mut found = ContentEncoding::Identity;
        let values = headers.get_all(header::CONTENT_ENCODING).into_iter();
        for word in values.flat_map(|value| value.as_bytes().split(|&byte| byte == b',')) {
            let encoding = match word.trim_ascii().to_ascii_lowercase().as_slice() {
                b"" | b"identity" => continue,
                b"zstd" => ContentEncoding::Zstd,
                b"gzip" | b"x-gzip" => ContentEncoding::Gzip,
                b"deflate" => ContentEncoding::Deflate,
                _ => return Err(unknown_encoding()),
            };
            if std::mem::replace(&mut found, encoding) != ContentEncoding::Identity {
                return Err(unknown_encoding());
            }
        }
        Ok(found)
    }

    /// Returns the most bytes that a body of `n_bytes` may have after decompression.
    fn max_decoded(self, n_bytes: usize, limit: usize) -> usize {
        match self {
            ContentEncoding::Identity => n_bytes,
            _ => n_bytes.saturating_mul(MAX_RATIO).max(ALWAYS_DECODED).min(limit),
        }
    }

    /// Decompresses to at most `max_bytes`, so that a decompression bomb fails before it fills the memory.
    fn decode(self, bytes: &Bytes, max_bytes: usize, charge: &mut MemoryCharge) -> Result<Bytes, DecodeError> {
        let compressed = &bytes[..];
        match self {
            ContentEncoding::Identity => Ok(bytes.clone()),
            ContentEncoding::Zstd => bounded(zstd_reader(compressed, max_bytes)?, max_bytes, charge),
            ContentEncoding::Gzip => bounded(flate2::read::MultiGzDecoder::new(compressed), max_bytes, charge),
            ContentEncoding::Deflate if has_zlib_header(compressed) => {
                bounded(flate2::read::ZlibDecoder::new(compressed), max_bytes, charge)
            }
            ContentEncoding::Deflate => bounded(flate2::read::DeflateDecoder::new(compressed), max_bytes, charge),
        }
    }
}

/// Why a body cannot be decompressed.
#[derive(Debug)]
enum DecodeError {
    TooLong,
    Corrupt,
    NoMemory(MemoryFull),
}

impl From<io::Error> for DecodeError {
    fn from(_: io::Error) -> Self {
        DecodeError::Corrupt
    }
}

impl DecodeError {
    fn failure(self, max_bytes: usize, limit: usize) -> HttpFailure {
        match self {
            DecodeError::Corrupt => corrupt(),
            DecodeError::NoMemory(full) => full.into(),
            DecodeError::TooLong if max_bytes < limit => grows_too_much(),
            DecodeError::TooLong => too_large(limit),
        }
    }
}

/// Limits the window, whose size the client chooses, to the largest size that a body within `limit` can use.
fn zstd_reader(compressed: &[u8], limit: usize) -> io::Result<impl Read> {
    /// zstd's minimum window, and the 8 MiB that its format requires every decoder to support.
    const WINDOW_LOG: std::ops::RangeInclusive<u32> = 23..=27;
    let mut reader = zstd::stream::read::Decoder::with_buffer(compressed)?;
    let log = usize::BITS - limit.leading_zeros();
    reader.window_log_max(log.clamp(*WINDOW_LOG.start(), *WINDOW_LOG.end()))?;
    Ok(reader)
}

/// Returns true for zlib's format, which `deflate` means. Some clients send raw deflate instead.
fn has_zlib_header(compressed: &[u8]) -> bool {
    matches!(compressed, [cmf, flg, ..] if cmf & 0x0F == 8 && (u16::from(*cmf) << 8 | u16::from(*flg)) % 31 == 0)
}

fn bounded(mut reader: impl Read, max_bytes: usize, charge: &mut MemoryCharge) -> Result<Bytes, DecodeError> {
    let mut bytes = Vec::new();
    loop {
        charge.grow_to(bytes.len() + DECODE_STEP).map_err(DecodeError::NoMemory)?;
        let n = reader.by_ref().take(DECODE_STEP as u64).read_to_end(&mut bytes)?;
        if bytes.len() > max_bytes {
            return Err(DecodeError::TooLong);
        }
        // Before the next step is charged: small bodies stay within their part of the memory.
        if n < DECODE_STEP {
            charge.shrink_to(bytes.len());
            return Ok(bytes.into());
        }
    }
}

fn failure(status: StatusCode, message: impl Into<String>) -> HttpFailure {
    HttpFailure::new(status, ErrorBody::new(ErrorKind::InvalidRequest, message))
}

fn too_large(limit: usize) -> HttpFailure {
    failure(StatusCode::PAYLOAD_TOO_LARGE, format!("The request body is larger than {limit} bytes, decompressed."))
}

fn grows_too_much() -> HttpFailure {
    let message = format!(
        "The request body grows to more than {MAX_RATIO} times its size when it is decompressed. Send it uncompressed."
    );
    failure(StatusCode::PAYLOAD_TOO_LARGE, message)
}

fn too_slow() -> HttpFailure {
    failure(StatusCode::REQUEST_TIMEOUT, "The request body did not arrive in time.")
}

fn cut_off() -> HttpFailure {
    failure(StatusCode::BAD_REQUEST, "The request body ended before its declared length.")
}

fn corrupt() -> HttpFailure {
    failure(StatusCode::BAD_REQUEST, "The request body could not be decompressed as its Content-Encoding says.")
}

fn unknown_encoding() -> HttpFailure {
    failure(StatusCode::UNSUPPORTED_MEDIA_TYPE, "The Content-Encoding must be one of zstd, gzip and deflate.")
}

#[cfg(test)]
mod tests;

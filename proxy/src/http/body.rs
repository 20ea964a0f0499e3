//! Reads request bodies: bounded in size, time and memory, decompressed, and treated as JSON for every `Content-Type`.
//!
//! Bare `curl -d` sends `application/x-www-form-urlencoded`, so the type is ignored. The dialect parses the bytes. Large
//! and compressed bodies are parsed on threads of their own, a few at a time, because that takes up to a second.
//! Every error here uses the JSON envelope, because clients print its message.

use std::io::{self, Read};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::body::HttpBody as _;
use axum::extract::{FromRequest, Request};
use baton_schemas::openai::{ErrorBody, ErrorKind, InvalidRequest};
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode, header};
use http_body_util::BodyExt;

use super::body_budget::{Arrival, BodyBudget, SMALL_BODY, UntilReplyEnds};
use super::request_steps::is_stopping;
use super::{HttpFailure, HttpState, unread_body};
use crate::account::Account;
use crate::request::caller::Caller;

/// How long the rest of an oversized body is read and discarded. Without this, a client that is still sending when the
/// connection closes gets a reset instead of the 413.
const DISCARD_FOR: Duration = Duration::from_secs(2);

/// How many bytes of an oversized body are read and discarded. After that the connection closes.
const DISCARD_BYTES: u64 = 64 << 20;

/// A compressed body may always grow to this size.
const ALWAYS_DECODED: usize = 1 << 20;

/// How many times its size a larger body may grow. Conversations grow by 3 to 20 times, bombs by 1,000.
const MAX_RATIO: usize = 100;

/// A body that has arrived. The dialect parses it.
pub struct JsonBody {
    bytes: Bytes,
    encoding: ContentEncoding,
    /// The maximum size, decompressed.
    limit: usize,
    account: Option<Arc<Account>>,
    budget: BodyBudget,
    _arrival: Arrival,
    until_reply_ends: UntilReplyEnds,
}

impl FromRequest<HttpState> for JsonBody {
    type Rejection = HttpFailure;

    async fn from_request(request: Request, state: &HttpState) -> Result<Self, HttpFailure> {
        let (head, mut body) = request.into_parts();
        let caller: Option<&Caller> = head.extensions.get();
        if let Some(caller) = caller {
            caller.account.check_rates().map_err(|error| HttpFailure::of_request(&error, &caller.request_id))?;
        }
        let account = caller.map(|caller| Arc::clone(&caller.account));
        let encoding = ContentEncoding::of(&head.headers)?;
        let limit = state.config.max_body_bytes;
        let mut arrival = state.bodies.arrival();
        let read = tokio::time::timeout(state.config.body_deadline, read(&mut body, limit, &mut arrival));
        let Some(bytes) = read.await.map_err(|_elapsed| too_slow())?? else {
            // Do not read the rest: a client that waits for '100 Continue' would then send it.
            if !head.headers.contains_key(header::EXPECT) {
                // If the body does not end in time, the reply closes the connection: see `unread_body`.
                unread_body::discard(&mut body, DISCARD_BYTES, DISCARD_FOR).await;
            }
            return Err(too_large(limit));
        };
        let budget = state.bodies.clone();
        let until_reply_ends = head.extensions.get().cloned().unwrap_or_default();
        Ok(JsonBody { bytes, encoding, limit, account, budget, _arrival: arrival, until_reply_ends })
    }
}

impl JsonBody {
    /// Parses the body with the dialect's parser, and drops its bytes.
    ///
    /// Errors: the body is refused, which counts as a request of its key; or the server has no room for it now.
    pub async fn parse<T: Send + 'static>(
        self,
        parse: impl FnOnce(&[u8]) -> Result<T, InvalidRequest> + Send + 'static,
    ) -> Result<T, HttpFailure> {
        let account = self.account.clone();
        let outcome = self.parse_uncharged(parse).await;
        if let (Err(failure), Some(account)) = (&outcome, account)
            && failure.status.is_client_error()
        {
            // If that exceeds the rate, the next request is refused.
            let _ = account.take_request();
        }
        outcome
    }

    async fn parse_uncharged<T: Send + 'static>(
        self,
        parse: impl FnOnce(&[u8]) -> Result<T, InvalidRequest> + Send + 'static,
    ) -> Result<T, HttpFailure> {
        if self.encoding == ContentEncoding::Identity && self.bytes.len() <= SMALL_BODY {
            return Ok(parse(&self.bytes)?);
        }
        let max_bytes = self.encoding.max_decoded(self.bytes.len(), self.limit);
        let mut turn = self.budget.turn(self.account.as_deref(), max_bytes).await?;
        let until_reply_ends = self.until_reply_ends.clone();
        let parsed = tokio::task::spawn_blocking(move || {
            let JsonBody { bytes, encoding, limit, _arrival, .. } = self;
            let bytes = encoding.decode(bytes, max_bytes).map_err(|error| error.failure(max_bytes, limit))?;
            turn.has_size(bytes.len());
            let parsed = parse(&bytes)?;
            drop(bytes);
            Ok((parsed, turn.finish()))
        });
        match parsed.await {
            Ok(parsed) => parsed.map(|(parsed, open)| {
                until_reply_ends.keep(open);
                parsed
            }),
            // As if the parser had run here.
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_cancelled) => Err(HttpFailure::from(&is_stopping())),
            },
        }
    }
}

/// Reads the whole body. Returns `None` as soon as it exceeds `limit` bytes. Errors: the body ends early, or its bytes do
/// not fit the budget.
async fn read(body: &mut Body, limit: usize, arrival: &mut Arrival) -> Result<Option<Bytes>, HttpFailure> {
    if body.size_hint().lower() > limit as u64 {
        return Ok(None);
    }
    let mut bytes = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_broken| cut_off())?;
        // A trailers frame carries no data.
        let Ok(data) = frame.into_data() else { continue };
        if bytes.len() + data.len() > limit {
            return Ok(None);
        }
        arrival.grow_to(bytes.len() + data.len())?;
        bytes.extend_from_slice(&data);
    }
    Ok(Some(bytes.freeze()))
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
    fn decode(self, bytes: Bytes, max_bytes: usize) -> Result<Bytes, DecodeError> {
        let compressed = &bytes[..];
        match self {
            ContentEncoding::Identity => Ok(bytes),
            ContentEncoding::Zstd => bounded(zstd_reader(compressed, max_bytes)?, max_bytes),
            ContentEncoding::Gzip => bounded(flate2::read::MultiGzDecoder::new(compressed), max_bytes),
            ContentEncoding::Deflate if has_zlib_header(compressed) => {
                bounded(flate2::read::ZlibDecoder::new(compressed), max_bytes)
            }
            ContentEncoding::Deflate => bounded(flate2::read::DeflateDecoder::new(compressed), max_bytes),
        }
    }
}

/// Why a body cannot be decompressed.
#[derive(Debug)]
enum DecodeError {
    TooLong,
    Corrupt,
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

fn bounded(reader: impl Read, max_bytes: usize) -> Result<Bytes, DecodeError> {
    let mut bytes = Vec::new();
    reader.take(max_bytes as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > max_bytes { Err(DecodeError::TooLong) } else { Ok(bytes.into()) }
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
mod tests {
    use super::*;

    fn check(values: &[&str], expected: Option<ContentEncoding>) {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(header::CONTENT_ENCODING, value.parse().unwrap());
        }
        assert_eq!(ContentEncoding::of(&headers).ok(), expected, "{values:?}");
    }

    #[test]
    fn one_known_encoding_is_read() {
        check(&[], Some(ContentEncoding::Identity));
        check(&["identity"], Some(ContentEncoding::Identity));
        check(&["GZIP"], Some(ContentEncoding::Gzip));
        check(&["x-gzip"], Some(ContentEncoding::Gzip));
        check(&[" zstd , identity"], Some(ContentEncoding::Zstd));
        check(&["deflate"], Some(ContentEncoding::Deflate));
        check(&["br"], None);
        check(&["gzip, zstd"], None);
        check(&["gzip", "gzip"], None);
    }
}

//! Reads request bodies: bounded in size and time, decompressed, and treated as JSON for every `Content-Type`.
//!
//! Bare `curl -d` sends `application/x-www-form-urlencoded`, so the type is ignored. The dialect parses the bytes.
//! Every error here uses the JSON envelope, because clients print its message.

use std::io::{self, Read};
use std::time::Duration;

use axum::body::Body;
use axum::body::HttpBody as _;
use axum::extract::{FromRequest, Request};
use baton_schemas::openai::{ErrorBody, ErrorKind};
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode, header};
use http_body_util::BodyExt;

use super::{HttpFailure, HttpState, unread_body};

/// How long the rest of an oversized body is read and discarded. Without this, a client that is still sending when the
/// connection closes gets a reset instead of the 413.
const DISCARD_FOR: Duration = Duration::from_secs(2);

/// How many bytes of an oversized body are read and discarded. After that the connection closes.
const DISCARD_BYTES: u64 = 64 << 20;

/// The decompressed bytes of a body.
pub struct JsonBody(pub Bytes);

impl FromRequest<HttpState> for JsonBody {
    type Rejection = HttpFailure;

    async fn from_request(request: Request, state: &HttpState) -> Result<Self, HttpFailure> {
        let (head, mut body) = request.into_parts();
        let encoding = ContentEncoding::of(&head.headers)?;
        let limit = state.config.max_body_bytes;
        let read = tokio::time::timeout(state.config.body_deadline, read(&mut body, limit));
        let Some(bytes) = read.await.map_err(|_elapsed| too_slow())?? else {
            // Do not read the rest: a client that waits for '100 Continue' would then send it.
            if !head.headers.contains_key(header::EXPECT) {
                // If the body does not end in time, the reply closes the connection: see `unread_body`.
                unread_body::discard(&mut body, DISCARD_BYTES, DISCARD_FOR).await;
            }
            return Err(too_large(limit));
        };
        let bytes = match encoding {
            ContentEncoding::Identity => bytes,
            // Decompression takes tens of milliseconds at the size limit: too long for a thread that also writes
            // streams.
            encoding => tokio::task::spawn_blocking(move || encoding.decode(&bytes, limit))
                .await
                .map_err(|_panicked| corrupt())??,
        };
        Ok(JsonBody(bytes))
    }
}

/// Reads the whole body. Returns `None` as soon as it exceeds `limit` bytes.
async fn read(body: &mut Body, limit: usize) -> Result<Option<Bytes>, HttpFailure> {
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

    /// Decompresses to at most `limit` bytes, so that a decompression bomb fails before it fills the memory.
    fn decode(self, compressed: &[u8], limit: usize) -> Result<Bytes, HttpFailure> {
        match self {
            ContentEncoding::Identity => Ok(Bytes::copy_from_slice(compressed)),
            ContentEncoding::Zstd => bounded(zstd_reader(compressed, limit).map_err(|_| corrupt())?, limit),
            ContentEncoding::Gzip => bounded(flate2::read::MultiGzDecoder::new(compressed), limit),
            ContentEncoding::Deflate if has_zlib_header(compressed) => {
                bounded(flate2::read::ZlibDecoder::new(compressed), limit)
            }
            ContentEncoding::Deflate => bounded(flate2::read::DeflateDecoder::new(compressed), limit),
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

fn bounded(reader: impl Read, limit: usize) -> Result<Bytes, HttpFailure> {
    let mut bytes = Vec::new();
    reader.take(limit as u64 + 1).read_to_end(&mut bytes).map_err(|_| corrupt())?;
    if bytes.len() > limit { Err(too_large(limit)) } else { Ok(bytes.into()) }
}

fn failure(status: StatusCode, message: impl Into<String>) -> HttpFailure {
    HttpFailure::new(status, ErrorBody::new(ErrorKind::InvalidRequest, message))
}

fn too_large(limit: usize) -> HttpFailure {
    failure(StatusCode::PAYLOAD_TOO_LARGE, format!("The request body is larger than {limit} bytes, decompressed."))
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

//! A request's body: bounded in size and time, decompressed, and JSON whatever its `Content-Type` says.
//!
//! Bare `curl -d` sends `application/x-www-form-urlencoded`, so the type tells nothing. The bytes are parsed by the
//! dialect; every refusal here is in the JSON envelope, because clients print what they find in it.

use std::io::{self, Read};
use std::time::Duration;

use axum::body::Body;
use axum::body::HttpBody as _;
use axum::extract::{FromRequest, Request};
use baton_schemas::openai::{ErrorBody, ErrorKind};
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, StatusCode, header};
use http_body_util::BodyExt;

use super::{Failure, HttpState, unread_body};

/// How long the rest of an overlong body is read and thrown away. A client that is still sending when the connection
/// closes gets a reset instead of the 413.
const DISCARD_FOR: Duration = Duration::from_secs(2);

/// And how much of it. A body that goes on behind that has no end that anybody would want to see.
const DISCARD_BYTES: u64 = 64 << 20;

/// The body's bytes, decompressed.
pub struct JsonBody(pub Bytes);

impl FromRequest<HttpState> for JsonBody {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &HttpState) -> Result<Self, Failure> {
        let (head, mut body) = request.into_parts();
        let encoding = Encoding::of(&head.headers)?;
        let limit = state.config.max_body_bytes;
        let read = tokio::time::timeout(state.config.body_deadline, read(&mut body, limit));
        let Some(bytes) = read.await.map_err(|_elapsed| too_slow())?? else {
            // A client that waits for '100 Continue' may not have begun to send; reading would tell it to.
            if !head.headers.contains_key(header::EXPECT) {
                // If it does not end, the reply says that the connection does: see `unread`.
                unread_body::discard(&mut body, DISCARD_BYTES, DISCARD_FOR).await;
            }
            return Err(too_large(limit));
        };
        let bytes = match encoding {
            Encoding::Identity => bytes,
            // Tens of milliseconds at the limit: too long for a thread that other streams are written from.
            encoding => tokio::task::spawn_blocking(move || encoding.decode(&bytes, limit))
                .await
                .map_err(|_panicked| corrupt())??,
        };
        Ok(JsonBody(bytes))
    }
}

/// Reads to the end, or gives `None` as soon as it is more than `limit` bytes.
async fn read(body: &mut Body, limit: usize) -> Result<Option<Bytes>, Failure> {
    if body.size_hint().lower() > limit as u64 {
        return Ok(None);
    }
    let mut bytes = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_broken| cut_off())?;
        // A frame of trailers carries no bytes.
        let Ok(data) = frame.into_data() else { continue };
        if bytes.len() + data.len() > limit {
            return Ok(None);
        }
        bytes.extend_from_slice(&data);
    }
    Ok(Some(bytes.freeze()))
}

/// How a body is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Encoding {
    Identity,
    Zstd,
    Gzip,
    Deflate,
}

impl Encoding {
    /// Reads `Content-Encoding`. Stacked encodings are as unknown as any other word: nobody sends them.
    fn of(headers: &HeaderMap) -> Result<Self, Failure> {
        let mut found = Encoding::Identity;
        let values = headers.get_all(header::CONTENT_ENCODING).into_iter();
        for word in values.flat_map(|value| value.as_bytes().split(|&byte| byte == b',')) {
            let encoding = match word.trim_ascii().to_ascii_lowercase().as_slice() {
                b"" | b"identity" => continue,
                b"zstd" => Encoding::Zstd,
                b"gzip" | b"x-gzip" => Encoding::Gzip,
                b"deflate" => Encoding::Deflate,
                _ => return Err(unknown_encoding()),
            };
            if std::mem::replace(&mut found, encoding) != Encoding::Identity {
                return Err(unknown_encoding());
            }
        }
        Ok(found)
    }

    /// Decompresses to at most `limit` bytes; a bomb is noticed there and not when it has filled the memory.
    fn decode(self, compressed: &[u8], limit: usize) -> Result<Bytes, Failure> {
        match self {
            Encoding::Identity => Ok(Bytes::copy_from_slice(compressed)),
            Encoding::Zstd => bounded(zstd_reader(compressed, limit).map_err(|_| corrupt())?, limit),
            Encoding::Gzip => bounded(flate2::read::MultiGzDecoder::new(compressed), limit),
            Encoding::Deflate if has_zlib_header(compressed) => {
                bounded(flate2::read::ZlibDecoder::new(compressed), limit)
            }
            Encoding::Deflate => bounded(flate2::read::DeflateDecoder::new(compressed), limit),
        }
    }
}

/// A window larger than the whole text may be is of no use, and its size is the client's to choose.
fn zstd_reader(compressed: &[u8], limit: usize) -> io::Result<impl Read> {
    /// zstd's own least window, and the 8 MiB that its format asks every decoder to support at least.
    const WINDOW_LOG: std::ops::RangeInclusive<u32> = 23..=27;
    let mut reader = zstd::stream::read::Decoder::with_buffer(compressed)?;
    let log = usize::BITS - limit.leading_zeros();
    reader.window_log_max(log.clamp(*WINDOW_LOG.start(), *WINDOW_LOG.end()))?;
    Ok(reader)
}

/// `deflate` means zlib's format, but some clients send the bare one.
fn has_zlib_header(compressed: &[u8]) -> bool {
    matches!(compressed, [cmf, flg, ..] if cmf & 0x0F == 8 && (u16::from(*cmf) << 8 | u16::from(*flg)) % 31 == 0)
}

fn bounded(reader: impl Read, limit: usize) -> Result<Bytes, Failure> {
    let mut bytes = Vec::new();
    reader.take(limit as u64 + 1).read_to_end(&mut bytes).map_err(|_| corrupt())?;
    if bytes.len() > limit { Err(too_large(limit)) } else { Ok(bytes.into()) }
}

fn failure(status: StatusCode, message: impl Into<String>) -> Failure {
    Failure::new(status, ErrorBody::new(ErrorKind::InvalidRequest, message))
}

fn too_large(limit: usize) -> Failure {
    failure(StatusCode::PAYLOAD_TOO_LARGE, format!("The request body is larger than {limit} bytes, decompressed."))
}

fn too_slow() -> Failure {
    failure(StatusCode::REQUEST_TIMEOUT, "The request body did not arrive in time.")
}

fn cut_off() -> Failure {
    failure(StatusCode::BAD_REQUEST, "The request body ended before its declared length.")
}

fn corrupt() -> Failure {
    failure(StatusCode::BAD_REQUEST, "The request body could not be decompressed as its Content-Encoding says.")
}

fn unknown_encoding() -> Failure {
    failure(StatusCode::UNSUPPORTED_MEDIA_TYPE, "The Content-Encoding must be one of zstd, gzip and deflate.")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(values: &[&str], expected: Option<Encoding>) {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(header::CONTENT_ENCODING, value.parse().unwrap());
        }
        assert_eq!(Encoding::of(&headers).ok(), expected, "{values:?}");
    }

    #[test]
    fn one_known_encoding_is_read() {
        check(&[], Some(Encoding::Identity));
        check(&["identity"], Some(Encoding::Identity));
        check(&["GZIP"], Some(Encoding::Gzip));
        check(&["x-gzip"], Some(Encoding::Gzip));
        check(&[" zstd , identity"], Some(Encoding::Zstd));
        check(&["deflate"], Some(Encoding::Deflate));
        check(&["br"], None);
        check(&["gzip, zstd"], None);
        check(&["gzip", "gzip"], None);
    }
}

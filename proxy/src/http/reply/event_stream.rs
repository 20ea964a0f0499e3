//! The parts that all server-sent event streams share: the head, and the heartbeat comment.

use bytes::BytesMut;
use http::{HeaderMap, HeaderName, HeaderValue, header};

/// Marks a reply as an event stream that proxies must not buffer.
pub(in crate::http) fn sse_headers(headers: &mut HeaderMap) {
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // By default, nginx buffers the replies that it proxies.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
}

/// Writes a comment.
pub(super) fn write_remark(out: &mut BytesMut, text: &str) {
    out.extend_from_slice(format!(": {text}\n\n").as_bytes());
}

/// Writes a heartbeat comment, which every SSE parser skips. It shows the queue position of a request that waits for
/// admission.
pub(in crate::http) fn write_comment(out: &mut BytesMut, place: Option<usize>) {
    let comment = place.map_or_else(|| ":\n\n".to_owned(), |place| format!(": place {place} in the queue\n\n"));
    out.extend_from_slice(comment.as_bytes());
}

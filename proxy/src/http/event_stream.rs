//! What every stream of server-sent events says in its head.

use http::{HeaderMap, HeaderName, HeaderValue, header};

/// Marks a reply as an event stream that nothing on the way may hold back.
pub(super) fn sse_headers(headers: &mut HeaderMap) {
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx buffers what it proxies unless told not to.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
}

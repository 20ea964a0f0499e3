//! What streams of server-sent events have in common: their head, and the comment that breaks silence.

use http::{HeaderMap, HeaderName, HeaderValue, header};

/// Marks a reply as an event stream that nothing on the way may hold back.
pub(super) fn sse_headers(headers: &mut HeaderMap) {
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx buffers what it proxies unless told not to.
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
}

/// A comment that every reader skips. It tells the place of a request that still waits to be admitted.
pub(super) fn comment(place: Option<usize>) -> String {
    place.map_or_else(|| ":\n\n".to_owned(), |place| format!(": place {place} in the queue\n\n"))
}

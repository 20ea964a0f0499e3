//! Gives each request an id, which is in its reply and in every log line about it.

use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use http::{HeaderName, HeaderValue};
use tracing::Instrument;

use super::dialect::Dialect;

/// The header that clients and proxies read.
pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The header that Anthropic's SDKs read.
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

/// A client's id goes into our logs, so its length is bounded.
const MAX_LEN: usize = 128;

/// The id as an extension of the request.
#[derive(Debug, Clone)]
pub struct RequestId(pub HeaderValue);

impl RequestId {
    /// Returns the id as text.
    pub fn as_str(&self) -> &str {
        self.0.to_str().unwrap_or_default()
    }
}

/// Uses the client's id if it is valid, else creates one, and adds it to every reply.
pub async fn attach(mut request: Request, next: Next) -> Response {
    let id = RequestId(request.headers().get(&X_REQUEST_ID).filter(|id| is_sane(id)).cloned().unwrap_or_else(drawn));
    let span =
        tracing::info_span!("request", id = id.as_str(), method = %request.method(), path = request.uri().path());
    request.extensions_mut().insert(id.clone());
    let dialect = Dialect::of(request.uri().path());
    let mut response = next.run(request).instrument(span).await;
    if dialect == Dialect::Anthropic {
        response.headers_mut().insert(REQUEST_ID, id.0.clone());
    }
    response.headers_mut().insert(X_REQUEST_ID, id.0);
    response
}

/// Accepts visible ASCII only, so that an id cannot forge log lines.
fn is_sane(id: &HeaderValue) -> bool {
    !id.is_empty() && id.len() <= MAX_LEN && id.as_bytes().iter().all(u8::is_ascii_graphic)
}

pub(super) fn drawn() -> HeaderValue {
    let id = format!("req_{}", uuid::Uuid::new_v4().simple());
    HeaderValue::from_str(&id).expect("hexadecimal digits are a header value")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(id: &[u8], expected: bool) {
        assert_eq!(is_sane(&HeaderValue::from_bytes(id).unwrap()), expected, "{id:?}");
    }

    #[test]
    fn only_short_visible_ids_are_taken_over() {
        check(b"abc-123_{x}", true);
        check(&[b'a'; 128], true);
        check(&[b'a'; 129], false);
        check(b"", false);
        check(b"a b", false);
        check(b"a\tb", false);
        check("é".as_bytes(), false);
        assert!(is_sane(&drawn()));
    }
}

//! Gives each request an id, which is in its reply and in every log line about it.

use axum::extract::Request;
use axum::response::Response;
use http::{HeaderName, HeaderValue};

use super::super::dialect::Dialect;

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

impl RequestId {
    /// Uses the client's id if it is valid, else creates one, and adds it to the request.
    pub(in crate::http) fn attach(request: &mut Request) -> RequestId {
        let sent = request.headers().get(&X_REQUEST_ID).filter(|id| is_sane(id));
        let id = RequestId(sent.cloned().unwrap_or_else(drawn));
        request.extensions_mut().insert(id.clone());
        id
    }

    /// Adds the id to a reply.
    pub(in crate::http) fn insert(self, response: &mut Response, dialect: Dialect) {
        if dialect == Dialect::Anthropic {
            response.headers_mut().insert(REQUEST_ID, self.0.clone());
        }
        response.headers_mut().insert(X_REQUEST_ID, self.0);
    }
}

/// Accepts visible ASCII only, so that an id cannot forge log lines.
fn is_sane(id: &HeaderValue) -> bool {
    !id.is_empty() && id.len() <= MAX_LEN && id.as_bytes().iter().all(u8::is_ascii_graphic)
}

pub(in crate::http) fn drawn() -> HeaderValue {
    HeaderValue::try_from(format!("req_{}", random_id())).expect("hexadecimal digits are a header value")
}

/// A random id, unique in practice. From the thread's generator: the system's takes a call for each id.
pub(in crate::http) fn random_id() -> uuid::fmt::Simple {
    uuid::Builder::from_random_bytes(rand::random()).into_uuid().simple()
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

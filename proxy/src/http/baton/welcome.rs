//! `GET /`: the live page for people, and a sign of life for tools that check whether a server runs.

use axum::response::{IntoResponse, Response};
use http::{HeaderMap, header};

use super::page;

/// Answers with Ollama's own text, which its clients compare. A browser gets the live page.
pub(super) async fn welcome(headers: HeaderMap) -> Response {
    let accepts = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    // Browsers name it first.
    let first = accepts.split([',', ';']).next().unwrap_or_default().trim();
    if first.eq_ignore_ascii_case("text/html") {
        page::document(&headers)
    } else {
        // A cache must not give one of the two to a client that asks for the other.
        ([(header::VARY, "accept")], "Ollama is running").into_response()
    }
}

//! `GET /`: for people who open the address in a browser, and for tools that check whether a server runs.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, header};

use crate::http::HttpState;

/// Answers with Ollama's own text, which its clients compare. A browser gets a list of routes, and where to
/// read how to connect tools.
pub(super) async fn welcome(State(state): State<HttpState>, headers: HeaderMap) -> Response {
    let accepts = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    if accepts.contains("text/html") {
        let routes = state.routes.join("\n  ");
        format!(
            "Baton is running. It speaks OpenAI's, Anthropic's and Ollama's APIs.\n\n\
             What to paste into Claude Code, Codex, Open WebUI and others: docs/clients.md in Baton's sources.\n\n  {routes}\n"
        )
        .into_response()
    } else {
        "Ollama is running".into_response()
    }
}

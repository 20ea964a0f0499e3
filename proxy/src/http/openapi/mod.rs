//! `GET /openapi.json`: every route, its bodies and its replies, as an OpenAPI 3.1 document.
//!
//! A route exists only together with its [`Operation`], because [`Routes`] takes both in one call. Bodies and replies are
//! derived from the types in `baton_schemas`. `tests/clients/test_judge_schemathesis.py`
//! compares statuses, limits and replies with the running server.

mod document;
mod operation;
mod routes;

use std::sync::{Arc, OnceLock};

use axum::response::IntoResponse;
use bytes::Bytes;
use http::header;
use serde_json::Value;

use self::document::document;
#[cfg(test)]
pub(super) use self::document::shared_names;
pub(super) use self::operation::Operation;
use self::routes::DocumentedRoute;
pub(super) use self::routes::Routes;

pub(super) const PATH: &str = "/openapi.json";

/// The document's own entry in it.
pub(super) fn operation() -> Operation {
    Operation::new("This document").replies::<Value>()
}

/// The document's text. It is written when it is first requested, because that takes megabytes, and most endpoints are
/// never asked for it.
pub(super) struct DocumentText {
    routes: Vec<DocumentedRoute>,
    text: OnceLock<Bytes>,
}

impl DocumentText {
    pub(super) fn new(routes: Vec<DocumentedRoute>) -> Arc<DocumentText> {
        Arc::new(DocumentText { routes, text: OnceLock::new() })
    }
}

pub(super) async fn show(document: Arc<DocumentText>) -> impl IntoResponse {
    let text = document.text.get_or_init(|| self::document(&document.routes).to_string().into());
    ([(header::CONTENT_TYPE, "application/json")], text.clone())
}

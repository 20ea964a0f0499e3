//! `GET /openapi.json`: every route, its bodies and its replies, as an OpenAPI 3.1 document.
//!
//! A route exists only together with its [`Operation`], because [`Routes`] takes both in one call. Bodies and replies are
//! derived from the types in `baton_schemas`. `tests/clients/test_judge_schemathesis.py`
//! compares statuses, limits and replies with the running server.

mod document;
mod operation;
mod routes;

use axum::response::IntoResponse;
use bytes::Bytes;
use http::header;
use serde_json::Value;

pub(super) use self::document::document;
#[cfg(test)]
pub(super) use self::document::shared_names;
pub(super) use self::operation::Operation;
pub(super) use self::routes::Routes;

pub(super) const PATH: &str = "/openapi.json";

/// The document's own entry in it.
pub(super) fn operation() -> Operation {
    Operation::new("This document").replies::<Value>()
}

pub(super) async fn show(document: Bytes) -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], document)
}

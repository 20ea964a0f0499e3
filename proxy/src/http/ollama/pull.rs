//! `POST /api/pull`: succeeds for a model that is served, and never downloads one.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use baton_schemas::json_output::write_line;
use baton_schemas::ollama::{ModelRequest, OllamaPullProgress};
use bytes::BytesMut;
use http::{HeaderValue, header};

use super::failure::OllamaFailure;
use crate::http::HttpState;
use crate::http::body::ReadBody;
use crate::request::caller::Caller;
use crate::request::models;

/// Answers like Ollama for a model that is already present. Other models get 404: the operator chooses what is served.
pub(super) async fn pull(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    body: ReadBody,
) -> Result<Response, OllamaFailure> {
    let request = body?.parse(ModelRequest::parse).await?;
    models::find(state.models_for(&caller), &request.model)
        .map_err(|error| OllamaFailure::of_request(&error, &caller.request_id))?;
    let progress = |status| OllamaPullProgress { status };
    let success = progress("success");
    if !request.stream {
        return Ok(Json(success).into_response());
    }
    let mut lines = BytesMut::new();
    write_line(&mut lines, &progress("pulling manifest"));
    write_line(&mut lines, &success);
    Ok(([(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"))], lines).into_response())
}

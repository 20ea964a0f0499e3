//! `POST /api/pull`: a model that is there needs no pulling, and no other can be pulled.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use baton_schemas::ollama::{ModelRequest, PullProgress};
use http::{HeaderValue, header};

use super::failure::OllamaFailure;
use super::ndjson::line;
use crate::http::body::JsonBody;
use crate::http::{Failure, HttpState};
use crate::request::caller::Caller;
use crate::request::models;

/// Ollama's words for a download that had nothing to do. 404 for another model: the operator chooses what is served.
pub(super) async fn pull(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    body: Result<JsonBody, Failure>,
) -> Result<Response, OllamaFailure> {
    let request = ModelRequest::parse(&body?.0)?;
    models::find(state.models_for(&caller), &request.model)
        .map_err(|error| OllamaFailure::of_request(&error, &caller.request_id))?;
    let progress = |status| PullProgress { status };
    let success = progress("success");
    if !request.stream {
        return Ok(Json(success).into_response());
    }
    let lines = line(&progress("pulling manifest")) + &line(&success);
    Ok(([(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"))], lines).into_response())
}

//! `POST /api/generate`.

use std::time::Instant;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use baton_schemas::ollama::OllamaGenerateRequest;

use super::answer::{OllamaJob, answer};
use super::failure::OllamaFailure;
use super::line::{LineShape, OllamaRoute};
use crate::http::HttpState;
use crate::http::body::ReadBody;
use crate::http::reply::request_steps::Drain;
use crate::request::caller::Caller;

/// Answers or continues a text.
pub(super) async fn generate(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    drain: Drain,
    body: ReadBody,
) -> Result<Response, OllamaFailure> {
    let since = Instant::now();
    let request = body?.parse(|body| OllamaGenerateRequest::parse(body, rand::random())).await?;
    let OllamaGenerateRequest { generate, load_only } = request;
    let shape = LineShape { route: OllamaRoute::Generate, model: generate.model.clone(), since };
    let drain = drain.map(|Extension(drain)| drain).unwrap_or_default();
    answer(state, &caller, &drain, OllamaJob { generate, load_only, shape }).await
}

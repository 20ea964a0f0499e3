//! `POST /api/chat`.

use std::time::Instant;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use baton_schemas::ollama::OllamaChatRequest;

use super::answer::{OllamaJob, answer};
use super::failure::OllamaFailure;
use super::line::{LineShape, OllamaRoute};
use crate::http::HttpState;
use crate::http::body::ReadBody;
use crate::http::reply::request_steps::Drain;
use crate::request::caller::Caller;

pub(super) async fn chat(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    drain: Drain,
    body: ReadBody,
) -> Result<Response, OllamaFailure> {
    let since = Instant::now();
    let request = body?.parse(|body| OllamaChatRequest::parse(body, rand::random())).await?;
    let OllamaChatRequest { generate, load_only } = request;
    let shape = LineShape { route: OllamaRoute::Chat, model: generate.model.clone(), since };
    let drain = drain.map(|Extension(drain)| drain).unwrap_or_default();
    answer(state, &caller, &drain, OllamaJob { generate, load_only, shape }).await
}

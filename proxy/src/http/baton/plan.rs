//! `POST /baton/plan`: explains how a chat request would be served now, without generating.

use axum::extract::State;
use axum::{Extension, Json};
use baton_schemas::openai::{ChatBody, ChatRequest};

use crate::http::body::JsonBody;
use crate::http::openapi::Operation;
use crate::http::{HttpFailure, HttpState};
use crate::request::caller::Caller;
use crate::request::plan::explanation::Explanation;

pub(super) fn operation() -> Operation {
    Operation::new("Explain how a chat would be served now").takes::<ChatBody>().replies::<Explanation>().planned()
}

/// Takes the body of `/v1/chat/completions`.
pub(super) async fn explain(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Json<Explanation>, HttpFailure> {
    let ChatRequest { generate, .. } = body.parse(|body| ChatRequest::parse(body, rand::random())).await?;
    let explained = state.backend.explain(generate, &caller).await;
    explained.map(Json).map_err(|error| HttpFailure::of_request(&error, &caller.request_id))
}

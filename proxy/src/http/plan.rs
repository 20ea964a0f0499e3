//! `POST /baton/plan`: what would be done with a chat request now, and why. Nothing is generated.

use axum::extract::State;
use axum::{Extension, Json};
use baton_schemas::openai::ChatBody;
use baton_schemas::openai::ChatRequest;

use super::body::JsonBody;
use super::openapi::Operation;
use super::{Failure, HttpState};
use crate::request::caller::Caller;
use crate::request::plan::explanation::Explanation;

/// Its entry in `/openapi.json`.
pub(super) fn operation() -> Operation {
    Operation::new("How a chat would be served now, and why").takes::<ChatBody>().replies::<Explanation>().planned()
}

/// Takes the body of `/v1/chat/completions`.
pub async fn explain(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    JsonBody(body): JsonBody,
) -> Result<Json<Explanation>, Failure> {
    let ChatRequest { generate, .. } = ChatRequest::parse(&body, rand::random())?;
    let explained = state.backend.explain(generate, &caller).await;
    explained.map(Json).map_err(|error| Failure::of_request(&error, &caller.request_id))
}

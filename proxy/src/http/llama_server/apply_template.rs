//! `POST /apply-template`.

use axum::extract::State;
use axum::{Extension, Json};
use baton_schemas::llama_server::{ApplyTemplate, ApplyTemplateReply};

use crate::http::body::JsonBody;
use crate::http::{HttpFailure, HttpState};
use crate::request::caller::Caller;

/// Renders the prompt of a chat as text.
pub(super) async fn apply_template(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    body: JsonBody,
) -> Result<Json<ApplyTemplateReply>, HttpFailure> {
    let ApplyTemplate { model, chat } = body.parse(ApplyTemplate::parse).await?;
    let prompt = state.backend.render(model.as_deref(), chat, &caller).await;
    prompt
        .map(|prompt| Json(ApplyTemplateReply { prompt }))
        .map_err(|error| HttpFailure::of_request(&error, &caller.request_id))
}

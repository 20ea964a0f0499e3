//! `POST /v1/chat/completions`.

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use baton_schemas::openai::chat_response::{ChatChunk, ChatCompletion, ReplyHead};
use baton_schemas::openai::{ChatBody, ChatRequest};

use super::chat_choices::ChatChoices;
use super::{ReplyShape, head, reply};
use crate::http::body::JsonBody;
use crate::http::openapi::Operation;
use crate::http::reply::request_steps::{Drain, steps};
use crate::http::{HttpFailure, HttpState};
use crate::request::caller::Caller;

pub(super) fn operation() -> Operation {
    Operation::new("Continue a chat")
        .takes::<ChatBody>()
        .replies::<ChatCompletion>()
        .streams_marked(|generator| generator.subschema_for::<ChatChunk<'_>>())
        .planned()
}

/// `POST /v1/chat/completions`.
///
/// When the client disconnects, the server drops this future or the reply's body, which frees everything that the
/// request holds.
pub async fn complete(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    drain: Drain,
    body: JsonBody,
) -> Result<Response, HttpFailure> {
    let request = body.parse(|body| ChatRequest::parse(body, rand::random())).await?;
    let ChatRequest { generate, include_usage, has_functions } = request;
    let object = if generate.is_streamed { ReplyHead::CHUNK } else { ReplyHead::COMPLETION };
    let shape = ReplyShape {
        head: head("chatcmpl", object, generate.model.clone()),
        n_choices: generate.n,
        choices_per_prompt: generate.n,
        include_usage,
        is_streamed: generate.is_streamed,
    };
    let choices = ChatChoices { logprobs: generate.top_logprobs.is_some(), has_functions };
    let steps = steps(state.backend, generate, caller.clone(), drain.map(|Extension(drain)| drain).unwrap_or_default());
    let response = reply(steps, shape, choices, &state.config, &caller).await;
    response.map_err(|error| HttpFailure::of_request(&error, &caller.request_id))
}

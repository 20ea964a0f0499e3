//! `POST /v1/chat/completions`.

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use baton_schemas::openai::ChatBody;
use baton_schemas::openai::ChatRequest;
use baton_schemas::openai::chat_response::{ChatChunk, ChatCompletion, ReplyHead};

use super::chat_choices::ChatChoices;
use super::{ReplyShape, head, reply};
use crate::http::body::JsonBody;
use crate::http::openapi::Operation;
use crate::http::request_steps::{DrainDeadline, steps};
use crate::http::{Failure, HttpState};
use crate::request::caller::Caller;

/// Its entry in `/openapi.json`.
pub(super) fn operation() -> Operation {
    Operation::new("Continue a chat")
        .takes::<ChatBody>()
        .replies::<ChatCompletion>()
        .streams_marked(|generator| generator.subschema_for::<ChatChunk<'_>>())
        .planned()
}

/// Reads, generates, answers.
///
/// When the client leaves, the server drops this future or the reply's body, and with it everything the request holds.
pub async fn complete(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    drain: Option<Extension<DrainDeadline>>,
    JsonBody(body): JsonBody,
) -> Result<Response, Failure> {
    let ChatRequest { generate, stream, include_usage, has_functions } = ChatRequest::parse(&body, rand::random())?;
    // Not held while the answer is made: 32 slow streams would keep 32 bodies.
    drop(body);
    let shape = ReplyShape {
        head: head("chatcmpl", if stream { ReplyHead::CHUNK } else { ReplyHead::COMPLETION }, generate.model.clone()),
        n_choices: generate.n,
        choices_per_prompt: generate.n,
        include_usage,
        stream,
    };
    let choices = ChatChoices { logprobs: generate.top_logprobs.is_some(), has_functions };
    let steps = steps(state.backend, generate, caller.clone(), drain.map(|Extension(drain)| drain).unwrap_or_default());
    let response = reply(steps, shape, choices, &state.config, &caller).await;
    response.map_err(|error| Failure::of_request(&error, &caller.request_id))
}

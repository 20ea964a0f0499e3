//! `POST /v1/messages` and `POST /v1/messages/count_tokens`.

use axum::extract::State;
use axum::response::Response;
use axum::{Extension, Json};
use baton_schemas::anthropic::events::MessageEventWriter;
use baton_schemas::anthropic::reply::{MessageReply, TokenCount};
use baton_schemas::anthropic::{CountBody, CountRequest, MessagesBody, MessagesRequest};
use uuid::Uuid;

use super::failure::AnthropicFailure;
use super::head::MessageHead;
use super::stream::MessageWriter;
use super::whole;
use crate::http::body::ReadBody;
use crate::http::openapi::Operation;
use crate::http::reply::collected::collected;
use crate::http::reply::request_steps::{Drain, steps};
use crate::http::reply::streamed;
use crate::http::{HttpFailure, HttpState};
use crate::request::caller::Caller;

pub(super) fn create_operation() -> Operation {
    Operation::new("The assistant's next message")
        .takes::<MessagesBody>()
        .replies::<MessageReply>()
        .streams(MessageEventWriter::schema)
        .planned()
}

/// `POST /v1/messages`.
pub(super) async fn create(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    drain: Drain,
    body: ReadBody,
) -> Result<Response, AnthropicFailure> {
    let request = body?.parse(|body| MessagesRequest::parse(body, rand::random())).await?;
    let MessagesRequest { generate, shows_thinking } = request;
    let id = format!("msg_{}", Uuid::new_v4().simple());
    let head = MessageHead { id, model: generate.model.clone(), shows_thinking };
    let is_streamed = generate.is_streamed;
    let steps = steps(state.backend, generate, caller.clone(), drain.map(|Extension(drain)| drain).unwrap_or_default());
    let response = match is_streamed {
        true => streamed::respond(steps, MessageWriter::new(head), &state.config, &caller).await,
        false => whole::collect(collected(steps, &caller.memory), head).await,
    };
    Ok(response.map_err(|error| HttpFailure::of_request(&error, &caller.request_id))?)
}

pub(super) fn count_operation() -> Operation {
    Operation::new("Tokens of a prompt").takes::<CountBody>().replies::<TokenCount>().of_model()
}

/// `POST /v1/messages/count_tokens`: counts the tokens of a prompt without generating.
pub(super) async fn count_tokens(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    body: ReadBody,
) -> Result<Json<TokenCount>, AnthropicFailure> {
    let CountRequest { model, chat } = body?.parse(CountRequest::parse).await?;
    let counted = state.backend.count(Some(&model), chat, &caller).await;
    let input_tokens = counted.map_err(|error| HttpFailure::of_request(&error, &caller.request_id))?;
    Ok(Json(TokenCount { input_tokens }))
}

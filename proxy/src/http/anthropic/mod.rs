//! Anthropic's dialect: its routes, and the translation of request steps to its events. The JSON types are in
//! `baton_schemas::anthropic`.

mod head;
mod stream;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use baton_schemas::FinishReason;
use baton_schemas::anthropic::events::MessageEventWriter;
use baton_schemas::anthropic::reply::{MessageContent, MessageReply, Stop, TokenCount};
use baton_schemas::anthropic::{CountBody, MessagesBody};
use baton_schemas::anthropic::{CountRequest, MessagesRequest};
use baton_schemas::openai::InvalidRequest;
use futures::StreamExt;
use uuid::Uuid;

use self::head::{MessageHead, usage};
use self::stream::MessageWriter;
use super::body::JsonBody;
use super::dialect::Dialect;
use super::openapi::{Operation, Routes};
use super::reply_totals::ReplyTotals;
use super::request_steps::{DrainDeadline, RequestStep, RequestSteps, steps};
use super::route_header::insert_route;
use super::{HttpFailure, HttpState, streamed};
use crate::error::RequestError;
use crate::reply_event::EventKind;
use crate::request::caller::Caller;

/// The routes of this dialect.
pub(super) fn routes() -> Routes {
    let created = Operation::new("The assistant's next message")
        .takes::<MessagesBody>()
        .replies::<MessageReply>()
        .streams(MessageEventWriter::schema)
        .planned();
    let counted = Operation::new("Tokens of a prompt").takes::<CountBody>().replies::<TokenCount>().of_model();
    Routes::default()
        .post("/v1/messages", create, created)
        .post("/v1/messages/count_tokens", count, counted)
        .panics_as(Dialect::Anthropic)
}

type Body = Result<JsonBody, HttpFailure>;

/// An error in Anthropic's envelope.
#[derive(Debug)]
struct AnthropicFailure(HttpFailure);

impl From<HttpFailure> for AnthropicFailure {
    fn from(failure: HttpFailure) -> Self {
        AnthropicFailure(failure)
    }
}

impl From<InvalidRequest> for AnthropicFailure {
    fn from(invalid: InvalidRequest) -> Self {
        AnthropicFailure(invalid.into())
    }
}

impl IntoResponse for AnthropicFailure {
    fn into_response(self) -> Response {
        self.0.respond(Dialect::Anthropic)
    }
}

/// `POST /v1/messages`.
async fn create(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    drain: Option<Extension<DrainDeadline>>,
    body: Body,
) -> Result<Response, AnthropicFailure> {
    let MessagesRequest { generate, stream, shows_thinking } = MessagesRequest::parse(&body?.0, rand::random())?;
    let id = format!("msg_{}", Uuid::new_v4().simple());
    let head = MessageHead { id, model: generate.model.clone(), shows_thinking };
    let steps = steps(state.backend, generate, caller.clone(), drain.map(|Extension(drain)| drain).unwrap_or_default());
    let response = if stream {
        streamed::respond(steps, MessageWriter::new(head), &state.config, &caller).await
    } else {
        whole(steps, head).await
    };
    response.map_err(|error| HttpFailure::of_request(&error, &caller.request_id).into())
}

/// `POST /v1/messages/count_tokens`: counts the tokens of a prompt without generating.
async fn count(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    body: Body,
) -> Result<Json<TokenCount>, AnthropicFailure> {
    let CountRequest { model, chat } = CountRequest::parse(&body?.0)?;
    let counted = state.backend.count(Some(&model), chat, &caller).await;
    let input_tokens = counted.map_err(|error| HttpFailure::of_request(&error, &caller.request_id))?;
    Ok(Json(TokenCount { input_tokens }))
}

/// Collects a whole reply. Dropping the future cancels the request.
async fn whole(mut steps: RequestSteps, head: MessageHead) -> Result<Response, RequestError> {
    let (mut content, mut totals) = (MessageContent::default(), ReplyTotals::new(1));
    let mut end = Stop { reason: FinishReason::Stop, sequence: None };
    while let Some(step) = steps.next().await {
        let step = step?;
        totals.record(&step);
        let RequestStep::Event(event) = step else { continue };
        match event.kind {
            EventKind::Text { text, .. } => content.text(&text),
            EventKind::Reasoning { text } if head.shows_thinking => content.thinking(&text),
            EventKind::ToolCall { call } => content.call(&call),
            // Every choice finishes before the steps end.
            EventKind::Finished { reason, stop, .. } => end = Stop { reason, sequence: stop },
            _ => {}
        }
    }
    let mut response = Json(head.begun(usage(&totals)).ended(content, end)).into_response();
    insert_route(response.headers_mut(), &totals.route);
    Ok(response)
}

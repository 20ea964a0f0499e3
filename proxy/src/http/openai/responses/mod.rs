//! `POST /v1/responses`.

mod parts;
mod stream;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use baton_schemas::FinishReason;
use baton_schemas::openai::responses::response::{self, ResponseEnd};
use baton_schemas::openai::responses::{ResponseEventWriter, ResponseHead};
use baton_schemas::openai::{ResponsesBody, ResponsesRequest};
use futures::StreamExt;
use uuid::Uuid;

use self::parts::{logprobs, now, usage};
use self::stream::ResponseWriter;
use crate::error::RequestError;
use crate::http::body::JsonBody;
use crate::http::openapi::Operation;
use crate::http::reply::collected::collected;
use crate::http::reply::reply_totals::ReplyTotals;
use crate::http::reply::request_steps::{Drain, keeping, steps};
use crate::http::reply::streamed;
use crate::http::{HttpFailure, HttpState};
use crate::reply_event::EventKind;
use crate::request::caller::Caller;
use crate::request::generate::EventStream;

pub(super) fn operation() -> Operation {
    Operation::new("Continue a conversation")
        .takes::<ResponsesBody>()
        .replies::<response::Response>()
        .streams(ResponseEventWriter::schema)
        .planned()
}

/// `POST /v1/responses`.
pub async fn create(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    drain: Drain,
    body: JsonBody,
) -> Result<Response, HttpFailure> {
    let request = body.parse(|body| ResponsesRequest::parse(body, rand::random())).await?;
    let ResponsesRequest { generate, echo, tools } = request;
    let head = ResponseHead {
        stem: Uuid::new_v4().simple().to_string(),
        created_at: now(),
        model: generate.model.clone(),
        echo,
        tools,
    };
    let is_streamed = generate.is_streamed;
    let drain = drain.map(|Extension(drain)| drain).unwrap_or_default();
    let steps = steps(state.backend, generate, caller.clone(), drain);
    // The reply repeats the fields of the request. The steps come first: they keep the memory of all that was parsed.
    let mut repeated = caller.memory.part();
    repeated.shrink_to(head.memory_bytes());
    let steps = keeping(repeated, steps);
    // The last event of a stream repeats the whole reply, too.
    let steps = collected(steps, &caller.memory);
    let response = if is_streamed {
        streamed::respond(steps, ResponseWriter::new(head), &state.config, &caller).await
    } else {
        whole(steps, head).await
    };
    response.map_err(|error| HttpFailure::of_request(&error, &caller.request_id))
}

/// Collects a whole reply. Dropping the future cancels the request.
async fn whole(mut steps: EventStream, mut head: ResponseHead) -> Result<Response, RequestError> {
    let mut output = head.no_output();
    let mut totals = ReplyTotals::new(1);
    let mut end = FinishReason::Stop;
    while let Some(event) = steps.next().await {
        let event = event?;
        totals.record(&event);
        match event.kind {
            EventKind::Accepted { sampling, .. } => head.echo.samples_with(&sampling),
            EventKind::Text { text, tokens } => output.text(&text, &logprobs(&tokens)),
            EventKind::Reasoning { text } => output.reasoning(&text),
            EventKind::Refusal { text } => output.refusal(&text),
            EventKind::ToolCall { call } => output.call(&call),
            // Every choice finishes before the steps end.
            EventKind::Finished { reason, .. } => end = reason,
            _ => {}
        }
    }
    output.finish(end);
    let mut response = Json(head.finished(ResponseEnd { reason: end, at: now() }, output.into_items(), usage(&totals)))
        .into_response();
    totals.insert_into(response.headers_mut());
    Ok(response)
}

//! Collects a whole reply from a request's steps.

use axum::body::Body;
use axum::response::Response;
use baton_schemas::EngineError;
use baton_schemas::openai::chat_response::Completion;
use futures::StreamExt;
use http::{HeaderValue, header};

use super::choices::Choices;
use super::{ReplyShape, timings, usage};
use crate::error::RequestError;
use crate::http::reply::reply_totals::ReplyTotals;
use crate::reply_event::{EventKind, ReplyEvent};
use crate::request::generate::EventStream;

/// The space for a reply at first: a short one.
const BODY_BYTES: usize = 1 << 10;

/// Collects a whole reply. Dropping the future cancels the request.
pub(super) async fn collect<C: Choices>(
    mut steps: EventStream,
    shape: ReplyShape,
    mut shapes: C,
) -> Result<Response, RequestError> {
    let mut choices: Vec<C::Whole> = (0..shape.n_choices).map(|index| shapes.unfinished(index)).collect();
    let mut totals = ReplyTotals::new(shape.choices_per_prompt);
    while let Some(event) = steps.next().await {
        let event = event?;
        totals.record(&event);
        let ReplyEvent { choice, kind } = event;
        match kind {
            EventKind::Text { text, tokens } => {
                shapes.append(at(&mut choices, choice)?, &text, &tokens);
            }
            EventKind::Prompt { tokens } => {
                for index in choice..choice.saturating_add(shape.choices_per_prompt) {
                    shapes.append_prompt(at(&mut choices, index)?, &tokens);
                }
            }
            EventKind::Reasoning { text } => shapes.append_reasoning(at(&mut choices, choice)?, &text),
            EventKind::Refusal { text } => shapes.append_refusal(at(&mut choices, choice)?, &text),
            EventKind::ToolCall { call } => shapes.append_call(at(&mut choices, choice)?, &call),
            // Every choice finishes before the steps end.
            EventKind::Finished { reason, .. } => shapes.end(at(&mut choices, choice)?, reason),
            _ => {}
        }
    }
    let completion = Completion { head: shape.head, choices, usage: usage(&totals), timings: timings(&totals) };
    let mut body = Vec::with_capacity(BODY_BYTES);
    serde_json::to_writer(&mut body, &completion).map_err(EngineError::internal)?;
    let mut response = Response::new(Body::from(body));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    totals.insert_into(response.headers_mut());
    Ok(response)
}

fn at<T>(choices: &mut [T], index: u32) -> Result<&mut T, RequestError> {
    let choice = choices.get_mut(index as usize);
    choice.ok_or_else(|| {
        EngineError::internal(format_args!("an event of choice {index}, which was not asked for")).into()
    })
}

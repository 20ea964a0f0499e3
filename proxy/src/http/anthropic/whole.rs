//! Collects a whole message from a request's steps.

use axum::Json;
use axum::response::{IntoResponse, Response};
use baton_schemas::FinishReason;
use baton_schemas::anthropic::reply::{MessageContent, Stop};
use futures::StreamExt;

use super::head::{MessageHead, usage};
use crate::error::RequestError;
use crate::http::reply::reply_totals::ReplyTotals;
use crate::reply_event::EventKind;
use crate::request::generate::EventStream;

/// Collects a whole message. Dropping the future cancels the request.
pub(super) async fn collect(mut steps: EventStream, head: MessageHead) -> Result<Response, RequestError> {
    let mut content = MessageContent::default();
    let mut totals = ReplyTotals::new(1);
    let mut end = Stop { reason: FinishReason::Stop, sequence: None };
    while let Some(event) = steps.next().await {
        let event = event?;
        totals.record(&event);
        match event.kind {
            EventKind::Text { text, .. } => content.text(&text),
            EventKind::Refusal { text } => content.refusal(&text),
            EventKind::Reasoning { text } if head.shows_thinking => content.thinking(&text),
            EventKind::ToolCall { call } => content.call(&call),
            // Every choice finishes before the steps end.
            EventKind::Finished { reason, stop, .. } => end = Stop { reason, sequence: stop },
            _ => {}
        }
    }
    let mut response = Json(head.begun(usage(&totals)).ended(content, end)).into_response();
    totals.insert_into(response.headers_mut());
    Ok(response)
}

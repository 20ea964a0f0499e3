//! Collects a whole reply from a request's steps.

use axum::response::Response;
use baton_schemas::FinishReason;
use baton_schemas::tools::CallCollector;
use futures::StreamExt;

use super::line::{LineContent, LineShape};
use crate::error::RequestError;
use crate::http::reply::reply_totals::ReplyTotals;
use crate::reply_event::EventKind;
use crate::request::generate::EventStream;

/// Collects a whole reply. Dropping the future cancels the request.
pub(super) async fn collect(mut steps: EventStream, shape: LineShape) -> Result<Response, RequestError> {
    let mut content = LineContent::default();
    let mut tokens = Vec::new();
    let mut calls = CallCollector::default();
    let mut totals = ReplyTotals::new(1);
    let mut end = FinishReason::Stop;
    while let Some(event) = steps.next().await {
        let event = event?;
        totals.record(&event);
        match event.kind {
            EventKind::Text { text, tokens: more } => {
                content.text.to_mut().push_str(&text);
                tokens.extend(more);
            }
            EventKind::Reasoning { text } => content.thinking.to_mut().push_str(&text),
            EventKind::ToolCall { call } => {
                content.append(calls.take(&call).map(LineContent::call).unwrap_or_default());
            }
            // Every choice finishes before the steps end.
            EventKind::Finished { reason, .. } => {
                end = reason;
                content.append(calls.rest().as_ref().map(LineContent::unfinished).unwrap_or_default());
            }
            _ => {}
        }
    }
    let mut response = shape.whole(&content, &tokens, shape.end(end, &totals));
    totals.insert_into(response.headers_mut());
    Ok(response)
}

//! Writes request steps as lines of JSON: text, then one last line with the outcome.

use baton_schemas::FinishReason;
use baton_schemas::tools::CallCollector;
use serde::Serialize;

use super::failure;
use super::line::{LineContent, LineShape};
use crate::http::HttpFailure;
use crate::http::reply_totals::ReplyTotals;
use crate::http::request_steps::RequestStep;
use crate::http::streamed::StreamWriter;
use crate::reply_event::EventKind;

/// Writes the stream of one reply.
pub(super) struct LineWriter {
    shape: LineShape,
    totals: ReplyTotals,
    reason: Option<FinishReason>,
    calls: CallCollector,
}

impl LineWriter {
    pub(super) fn new(shape: LineShape) -> Self {
        LineWriter { shape, totals: ReplyTotals::new(1), reason: None, calls: CallCollector::default() }
    }
}

impl StreamWriter for LineWriter {
    const CONTENT_TYPE: &'static str = "application/x-ndjson";

    fn write(&mut self, step: &RequestStep) -> String {
        self.totals.record(step);
        let RequestStep::Event(event) = step else { return String::new() };
        match &event.kind {
            EventKind::Text { text, tokens } => line(&self.shape.line(LineContent::text(text.clone()), tokens)),
            EventKind::Reasoning { text } => {
                line(&self.shape.line(LineContent { thinking: text.clone(), ..LineContent::default() }, &[]))
            }
            // A tool call is written as one line when it is complete.
            EventKind::ToolCall { call } => self
                .calls
                .take(call)
                .map(|call| line(&self.shape.line(LineContent::call(call), &[])))
                .unwrap_or_default(),
            EventKind::Finished { reason, .. } => {
                self.reason = Some(*reason);
                let rest = self.calls.rest();
                rest.map(|call| line(&self.shape.line(LineContent::unfinished(&call), &[]))).unwrap_or_default()
            }
            _ => String::new(),
        }
    }

    /// Writes the line with `done: true`. Without a finish reason the reply has not ended, so nothing is written.
    fn finish(&mut self) -> String {
        let Some(reason) = self.reason else { return String::new() };
        line(&self.shape.last(LineContent::default(), &[], self.shape.end(reason, &self.totals)))
    }

    fn fail(&mut self, failure: HttpFailure) -> String {
        line(&failure::line(failure))
    }

    /// The heartbeat is an empty delta: clients parse every line, and some fail on an empty line.
    fn heartbeat(&self, _place: Option<usize>) -> String {
        line(&self.shape.line(LineContent::default(), &[]))
    }
}

/// Writes JSON as one line. JSON escapes line breaks, so it contains none.
pub(super) fn line(data: &impl Serialize) -> String {
    let json = serde_json::to_string(data).expect("plain structs with string keys always serialize");
    format!("{json}\n")
}

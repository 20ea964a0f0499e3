//! RequestSteps → lines of JSON: text, and one last line that says how it ended.

use baton_schemas::FinishReason;
use baton_schemas::tools::CallCollector;
use serde::Serialize;

use super::failure;
use super::reply::{LineContent, LineShape};
use crate::http::Failure;
use crate::http::reply_totals::ReplyTotals;
use crate::http::request_steps::RequestStep;
use crate::http::streamed::StreamWriter;
use crate::reply_event::EventKind;

/// Writes one stream.
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
            // A call is one line, once it is complete.
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

    /// The line with `done: true`. Without a reason there was no end, and so there is no such line.
    fn finish(&mut self) -> String {
        let Some(reason) = self.reason else { return String::new() };
        line(&self.shape.last(LineContent::default(), &[], self.shape.end(reason, &self.totals)))
    }

    fn fail(&mut self, failure: Failure) -> String {
        line(&failure::line(failure))
    }

    /// An empty delta: clients parse every line, and some fail on an empty one.
    fn heartbeat(&self, _place: Option<usize>) -> String {
        line(&self.shape.line(LineContent::default(), &[]))
    }
}

/// One line with this JSON. It has no line break of its own, since JSON escapes them.
pub(super) fn line(data: &impl Serialize) -> String {
    let json = serde_json::to_string(data).expect("plain structs with string keys always serialize");
    format!("{json}\n")
}

//! Writes request steps as lines of JSON: text, then one last line with the outcome.

use std::fmt::Write;

use baton_reply::TokenLogprobs;
use baton_schemas::FinishReason;
use baton_schemas::json_output::write_line;
use baton_schemas::ollama::reply::{OllamaEnd, OllamaReplyLine};
use baton_schemas::tools::CallCollector;
use bytes::BytesMut;

use super::failure;
use super::line::{LineContent, LineShape, now};
use crate::http::HttpFailure;
use crate::http::reply::reply_totals::ReplyTotals;
use crate::http::reply::streamed::StreamWriter;
use crate::reply_event::{EventKind, ReplyEvent};

/// Writes the stream of one reply.
pub(super) struct LineWriter {
    shape: LineShape,
    totals: ReplyTotals,
    reason: Option<FinishReason>,
    calls: CallCollector,
    /// The time of the last line. Kept for its memory.
    created_at: String,
    /// The route, if the head does not name it.
    late_route: Option<String>,
}

impl LineWriter {
    pub(super) fn new(shape: LineShape) -> Self {
        let calls = CallCollector::default();
        LineWriter {
            shape,
            totals: ReplyTotals::new(1),
            reason: None,
            calls,
            created_at: String::new(),
            late_route: None,
        }
    }

    fn write_line(&mut self, out: &mut BytesMut, said: &LineContent<'_>, tokens: &[TokenLogprobs]) {
        self.stamp();
        write_line(out, &self.shape.line(&self.created_at, said, tokens));
    }

    fn stamp(&mut self) {
        self.created_at.clear();
        // Writing to a string does not fail.
        _ = write!(self.created_at, "{}", now());
    }
}

impl StreamWriter for LineWriter {
    const CONTENT_TYPE: &'static str = "application/x-ndjson";

    fn write(&mut self, out: &mut BytesMut, event: &ReplyEvent) {
        self.totals.record(event);
        match &event.kind {
            EventKind::Text { text, tokens } => self.write_line(out, &LineContent::text(text), tokens),
            EventKind::Reasoning { text } => self.write_line(out, &LineContent::thinking(text), &[]),
            // A tool call is written as one line when it is complete.
            EventKind::ToolCall { call } => {
                if let Some(call) = self.calls.take(call) {
                    self.write_line(out, &LineContent::call(call), &[]);
                }
            }
            EventKind::Finished { reason, .. } => {
                self.reason = Some(*reason);
                if let Some(call) = self.calls.rest() {
                    self.write_line(out, &LineContent::unfinished(&call), &[]);
                }
            }
            _ => {}
        }
    }

    /// Writes the line with `done: true`. Without a finish reason the reply has not ended, so nothing is written.
    fn finish(&mut self, out: &mut BytesMut) {
        let Some(reason) = self.reason else { return };
        self.stamp();
        let nothing = LineContent::default();
        let end = Some(OllamaEnd { route: self.late_route.take(), ..self.shape.end(reason, &self.totals) });
        let line = self.shape.line(&self.created_at, &nothing, &[]);
        write_line(out, &OllamaReplyLine { done: true, end, ..line });
    }

    fn fail(&mut self, out: &mut BytesMut, failure: HttpFailure) {
        write_line(out, &failure::line(failure));
    }

    /// The heartbeat is an empty delta: clients parse every line, and some fail on an empty line.
    fn heartbeat(&self, out: &mut BytesMut, _place: Option<usize>) {
        write_line(out, &self.shape.line(&now().to_string(), &LineContent::default(), &[]));
    }

    fn late_route(&mut self, _: &mut BytesMut, route: &str) {
        self.late_route = Some(route.to_owned());
    }

    // Lines of JSON have no comments.
    fn remark(&self, _: &mut BytesMut, _: &str) {}
}

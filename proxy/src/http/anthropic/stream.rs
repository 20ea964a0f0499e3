//! Writes request steps as the events of a message.

use baton_schemas::anthropic::reply::Stop;
use baton_schemas::anthropic::{AnthropicErrorReply, MessageEventWriter};

use super::head::{MessageHead, usage};
use crate::http::HttpFailure;
use crate::http::event_stream::comment;
use crate::http::reply_totals::ReplyTotals;
use crate::http::request_steps::RequestStep;
use crate::http::streamed::StreamWriter;
use crate::reply_event::EventKind;

/// Writes the stream of one reply.
pub(super) struct MessageWriter {
    head: MessageHead,
    events: MessageEventWriter,
    totals: ReplyTotals,
    has_begun: bool,
    stop: Option<Stop>,
}

impl MessageWriter {
    pub(super) fn new(head: MessageHead) -> Self {
        MessageWriter {
            head,
            events: MessageEventWriter::default(),
            totals: ReplyTotals::new(1),
            has_begun: false,
            stop: None,
        }
    }

    /// Writes the first event. It needs the number of cached prompt tokens.
    fn begin(&mut self) -> String {
        if std::mem::replace(&mut self.has_begun, true) {
            return String::new();
        }
        self.events.begun(&self.head.begun(usage(&self.totals)))
    }
}

impl StreamWriter for MessageWriter {
    const CONTENT_TYPE: &'static str = "text/event-stream";

    fn write(&mut self, step: &RequestStep) -> String {
        self.totals.record(step);
        let RequestStep::Event(event) = step else { return String::new() };
        match &event.kind {
            EventKind::Started { .. } => self.begin(),
            EventKind::Text { text, .. } if !text.is_empty() => self.begin() + &self.events.text(text),
            EventKind::Reasoning { text } if self.head.shows_thinking => self.begin() + &self.events.thinking(text),
            EventKind::ToolCall { call } => self.begin() + &self.events.call(call),
            EventKind::Finished { reason, stop, .. } => {
                self.stop = Some(Stop { reason: *reason, sequence: stop.clone() });
                String::new()
            }
            _ => String::new(),
        }
    }

    /// Writes the last events. Without a finish reason the reply has not ended, so nothing is written.
    fn finish(&mut self) -> String {
        let Some(stop) = self.stop.take() else { return String::new() };
        self.begin() + &self.events.ended(&stop, usage(&self.totals))
    }

    fn fail(&mut self, failure: HttpFailure) -> String {
        AnthropicErrorReply::new(failure.status.as_u16(), failure.error).to_sse()
    }

    /// Writes a ping, or a comment before the first event: client accumulators require `message_start` to be first.
    fn heartbeat(&self, place: Option<usize>) -> String {
        if self.has_begun { MessageEventWriter::ping() } else { comment(place) }
    }
}

//! Writes request steps as the events of a message.

use baton_schemas::anthropic::reply::Stop;
use baton_schemas::anthropic::{AnthropicErrorReply, MessageEventWriter};
use bytes::BytesMut;

use super::head::{MessageHead, usage};
use crate::http::HttpFailure;
use crate::http::reply::event_stream::write_comment;
use crate::http::reply::reply_totals::ReplyTotals;
use crate::http::reply::streamed::StreamWriter;
use crate::reply_event::{EventKind, ReplyEvent};

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
    fn begin(&mut self, out: &mut BytesMut) {
        if !std::mem::replace(&mut self.has_begun, true) {
            self.events.begun(out, &self.head.begun(usage(&self.totals)));
        }
    }
}

impl StreamWriter for MessageWriter {
    const CONTENT_TYPE: &'static str = "text/event-stream";

    fn write(&mut self, out: &mut BytesMut, event: &ReplyEvent) {
        self.totals.record(event);
        match &event.kind {
            EventKind::Started(_) => self.begin(out),
            EventKind::Text { text, .. } if !text.is_empty() => {
                self.begin(out);
                self.events.text(out, text);
            }
            EventKind::Refusal { text } => {
                self.begin(out);
                self.events.refusal(out, text);
            }
            EventKind::Reasoning { text } if self.head.shows_thinking => {
                self.begin(out);
                self.events.thinking(out, text);
            }
            EventKind::ToolCall { call } => {
                self.begin(out);
                self.events.call(out, call);
            }
            EventKind::Finished { reason, stop, .. } => {
                self.stop = Some(Stop { reason: *reason, sequence: stop.clone() });
            }
            _ => {}
        }
    }

    /// Writes the last events. Without a finish reason the reply has not ended, so nothing is written.
    fn finish(&mut self, out: &mut BytesMut) {
        let Some(stop) = self.stop.take() else { return };
        self.begin(out);
        self.events.ended(out, &stop, usage(&self.totals));
    }

    fn fail(&mut self, out: &mut BytesMut, failure: HttpFailure) {
        AnthropicErrorReply::new(failure.status.as_u16(), failure.error).write_event(out);
    }

    /// Writes a ping, or a comment before the first event: client accumulators require `message_start` to be first.
    fn heartbeat(&self, out: &mut BytesMut, place: Option<usize>) {
        if self.has_begun { MessageEventWriter::ping(out) } else { write_comment(out, place) }
    }
}

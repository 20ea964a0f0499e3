//! Writes request steps as the events of a response.

use baton_schemas::FinishReason;
use baton_schemas::openai::responses::response::{ResponseEnd, ResponseFailure};
use baton_schemas::openai::responses::{ResponseEventWriter, ResponseHead};
use bytes::BytesMut;

use super::parts::{logprobs, now, usage};
use crate::http::HttpFailure;
use crate::http::reply::event_stream::write_comment;
use crate::http::reply::reply_totals::ReplyTotals;
use crate::http::reply::streamed::StreamWriter;
use crate::reply_event::{EventKind, ReplyEvent};

/// Writes the stream of one reply.
pub(super) struct ResponseWriter {
    events: ResponseEventWriter,
    totals: ReplyTotals,
    is_created: bool,
    reason: Option<FinishReason>,
}

impl ResponseWriter {
    pub(super) fn new(head: ResponseHead) -> Self {
        ResponseWriter {
            events: ResponseEventWriter::new(head),
            totals: ReplyTotals::new(1),
            is_created: false,
            reason: None,
        }
    }

    /// Writes the first events, once.
    fn create(&mut self, out: &mut BytesMut) {
        if !std::mem::replace(&mut self.is_created, true) {
            self.events.created(out);
        }
    }
}

impl StreamWriter for ResponseWriter {
    const CONTENT_TYPE: &'static str = "text/event-stream";

    fn write(&mut self, out: &mut BytesMut, event: &ReplyEvent) {
        self.totals.record(event);
        if let EventKind::Accepted { sampling, .. } = &event.kind {
            self.events.samples_with(sampling);
        }
        self.create(out);
        match &event.kind {
            EventKind::Text { text, tokens } => self.events.text(out, text, &logprobs(tokens)),
            EventKind::Reasoning { text } => self.events.reasoning(out, text),
            EventKind::Refusal { text } => self.events.refusal(out, text),
            EventKind::ToolCall { call } => self.events.call(out, call),
            EventKind::Finished { reason, .. } => self.reason = Some(*reason),
            _ => {}
        }
    }

    /// Writes the last event. Without a finish reason the reply has not ended, so nothing is written.
    fn finish(&mut self, out: &mut BytesMut) {
        let Some(reason) = self.reason.take() else { return };
        self.create(out);
        self.events.finished(out, ResponseEnd { reason, at: now() }, usage(&self.totals));
    }

    fn fail(&mut self, out: &mut BytesMut, failure: HttpFailure) {
        // OpenAI's error codes of a failed response.
        let code = if failure.status.as_u16() == 429 { "rate_limit_exceeded" } else { "server_error" };
        let message = failure.error.message;
        self.create(out);
        self.events.failed(out, ResponseFailure { code, message });
    }

    fn heartbeat(&self, out: &mut BytesMut, place: Option<usize>) {
        write_comment(out, place);
    }
}

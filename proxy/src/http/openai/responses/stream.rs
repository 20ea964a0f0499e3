//! Writes request steps as the events of a response.

use baton_schemas::FinishReason;
use baton_schemas::openai::responses::response::{ResponseEnd, ResponseFailure};
use baton_schemas::openai::responses::{ResponseEventWriter, ResponseHead};

use super::parts::{logprobs, now, usage};
use crate::http::HttpFailure;
use crate::http::event_stream::comment;
use crate::http::reply_totals::ReplyTotals;
use crate::http::request_steps::RequestStep;
use crate::http::streamed::StreamWriter;
use crate::reply_event::EventKind;

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
    fn create(&mut self) -> String {
        if std::mem::replace(&mut self.is_created, true) { String::new() } else { self.events.created() }
    }
}

impl StreamWriter for ResponseWriter {
    const CONTENT_TYPE: &'static str = "text/event-stream";

    fn write(&mut self, step: &RequestStep) -> String {
        self.totals.record(step);
        if let RequestStep::Accepted { sampling, .. } = step {
            self.events.samples_with(sampling);
        }
        let created = self.create();
        let RequestStep::Event(event) = step else { return created };
        let written = match &event.kind {
            EventKind::Text { text, tokens } => self.events.text(text, &logprobs(tokens)),
            EventKind::Reasoning { text } => self.events.reasoning(text),
            EventKind::ToolCall { call } => self.events.call(call),
            EventKind::Finished { reason, .. } => {
                self.reason = Some(*reason);
                String::new()
            }
            _ => String::new(),
        };
        created + &written
    }

    /// Writes the last event. Without a finish reason the reply has not ended, so nothing is written.
    fn finish(&mut self) -> String {
        let Some(reason) = self.reason.take() else { return String::new() };
        self.create() + &self.events.finished(ResponseEnd { reason, at: now() }, usage(&self.totals))
    }

    fn fail(&mut self, failure: HttpFailure) -> String {
        // OpenAI's error codes of a failed response.
        let code = if failure.status.as_u16() == 429 { "rate_limit_exceeded" } else { "server_error" };
        let message = failure.error.message;
        self.create() + &self.events.failed(ResponseFailure { code, message })
    }

    fn heartbeat(&self, place: Option<usize>) -> String {
        comment(place)
    }
}

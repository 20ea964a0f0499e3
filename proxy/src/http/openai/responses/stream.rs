//! Steps → the events of a response.

use baton_schemas::openai::responses::response::Failure as ResponseFailure;
use baton_schemas::openai::responses::{EventWriter, Head};

use super::{Text, logprobs};
use crate::generate::Event;
use crate::http::Failure;
use crate::http::event_stream::comment;
use crate::http::steps::Step;
use crate::http::streamed::StreamWriter;

/// Writes one stream.
pub(super) struct ResponseWriter {
    events: EventWriter,
    text: Text,
    is_created: bool,
    is_open: bool,
}

impl ResponseWriter {
    pub(super) fn new(head: Head) -> Self {
        ResponseWriter { events: EventWriter::new(head), text: Text::new(), is_created: false, is_open: false }
    }

    /// What stands before the first text; nothing the second time.
    fn open(&mut self) -> String {
        let created = self.create();
        if std::mem::replace(&mut self.is_open, true) { String::new() } else { created + &self.events.opened() }
    }

    fn create(&mut self) -> String {
        if std::mem::replace(&mut self.is_created, true) { String::new() } else { self.events.created() }
    }
}

impl StreamWriter for ResponseWriter {
    const CONTENT_TYPE: &'static str = "text/event-stream";

    fn write(&mut self, step: &Step) -> String {
        self.text.record(step);
        match step {
            Step::Accepted { .. } => self.create(),
            Step::Event(Event::Text { text, tokens, .. }) => self.open() + &self.events.delta(text, &logprobs(tokens)),
            Step::Event(_) => String::new(),
        }
    }

    /// Without an end of the text there was none, and so there is no last event.
    fn finish(&mut self) -> String {
        if self.text.reason.is_none() {
            return String::new();
        }
        let opening = self.open();
        let (part, reason, usage) = std::mem::replace(&mut self.text, Text::new()).end();
        opening + &self.events.finished(reason, part, usage)
    }

    fn fail(&mut self, failure: Failure) -> String {
        // OpenAI's words for a response's failures.
        let code = if failure.status.as_u16() == 429 { "rate_limit_exceeded" } else { "server_error" };
        let message = failure.error.message;
        self.create() + &self.events.failed(ResponseFailure { code, message })
    }

    fn heartbeat(&self, place: Option<usize>) -> String {
        comment(place)
    }
}

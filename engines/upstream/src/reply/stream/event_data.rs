//! Lines of a reply to the JSON of its events.

use serde::de::IgnoredAny;

use crate::reply::delta::DeltaReader;
use crate::reply::foreign::without_mark;
use crate::{TextDelta, UpstreamError};

/// How a reply is divided into events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Framing {
    /// Server-sent events that end with `[DONE]`.
    ServerSentEvents,
    /// An event in each line.
    JsonLines,
    /// One event, which is the whole body.
    Whole,
}

/// What a line of a reply holds.
pub(super) enum ReplyLine<'a> {
    /// No data: a comment that keeps the connection alive, a name or an id of an event.
    None,
    /// The end of an event.
    Blank,
    Json(&'a [u8]),
    End,
}

/// The longest data of an event in several lines.
const MAX_DATA_BYTES: usize = 1 << 20;

/// The data of one event, by the standard of server-sent events (WHATWG HTML, section 9.2.6): the data of all of its lines.
///
/// Nearly all events have one line, which is read at once: a whole JSON text cannot go on in another line.
#[derive(Default)]
pub(super) struct EventData {
    /// Data whose JSON is unfinished.
    begun: Vec<u8>,
    /// A line was read, so a byte order mark is no longer one.
    is_past_mark: bool,
}

impl EventData {
    pub(super) fn line_of<'l>(&mut self, line: &'l [u8], framing: Framing) -> ReplyLine<'l> {
        let line = if std::mem::replace(&mut self.is_past_mark, true) { line } else { without_mark(line) };
        if framing != Framing::ServerSentEvents {
            return if line.trim_ascii().is_empty() { ReplyLine::None } else { ReplyLine::Json(line) };
        }
        if line.is_empty() {
            return ReplyLine::Blank;
        }
        let Some(data) = line.strip_prefix(b"data:") else { return ReplyLine::None };
        match data.trim_ascii() {
            b"" => ReplyLine::None,
            b"[DONE]" => ReplyLine::End,
            json => ReplyLine::Json(json),
        }
    }

    /// Takes the data of a line.
    pub(super) fn take(
        &mut self,
        json: &[u8],
        framing: Framing,
        reader: &mut Box<dyn DeltaReader>,
        out: &mut Vec<TextDelta>,
    ) -> Result<(), UpstreamError> {
        if self.begun.is_empty() {
            let read = reader.read(json, out);
            if read.is_ok() || framing != Framing::ServerSentEvents || !is_unfinished(json) {
                return read;
            }
        } else if self.begun.len() + json.len() > MAX_DATA_BYTES {
            return Err(UpstreamError::malformed("an event is too long"));
        } else {
            self.begun.push(b'\n');
        }
        self.begun.extend_from_slice(json);
        Ok(())
    }

    /// Returns true between the first and the last line of unfinished JSON.
    pub(super) fn is_begun(&self) -> bool {
        !self.begun.is_empty()
    }

    /// Ends the event.
    pub(super) fn end(
        &mut self,
        reader: &mut Box<dyn DeltaReader>,
        out: &mut Vec<TextDelta>,
    ) -> Result<(), UpstreamError> {
        match std::mem::take(&mut self.begun) {
            begun if begun.is_empty() => Ok(()),
            begun => reader.read(&begun, out),
        }
    }
}

fn is_unfinished(json: &[u8]) -> bool {
    serde_json::from_slice::<IgnoredAny>(json).is_err_and(|error| error.is_eof())
}

//! Faults of replies, and reasons why a request gets none.

use std::borrow::Cow;
use std::collections::BTreeSet;

/// Why a request has no complete reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum RequestFailure {
    /// No connection in time, or TLS failed.
    NoConnection,
    /// The connection broke before the reply was complete.
    ConnectionLost,
    /// The reply was not complete within `--timeout`.
    TimedOut,
    /// The server answered with this status.
    Status(u16),
    /// The server ended the stream with an error event.
    ErrorEvent,
    /// The reply, or a line of it, is longer than this client reads.
    TooLong,
    /// An arrival of an open loop found `--concurrency` requests running until the round's end.
    NotSent,
}

impl RequestFailure {
    /// The word for it in tables and JSON.
    pub(super) fn name(self) -> Cow<'static, str> {
        Cow::Borrowed(match self {
            RequestFailure::NoConnection => "no_connection",
            RequestFailure::ConnectionLost => "connection_lost",
            RequestFailure::TimedOut => "timed_out",
            RequestFailure::Status(status) => return Cow::Owned(format!("http_{status}")),
            RequestFailure::ErrorEvent => "error_event",
            RequestFailure::TooLong => "too_long",
            RequestFailure::NotSent => "not_sent",
        })
    }

    /// Returns true for what a full server does on purpose.
    pub(super) fn is_refusal(self) -> bool {
        matches!(self, RequestFailure::Status(429 | 503))
    }
}

/// A break of the protocol in a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ReplyFault {
    /// The head names another content type than was requested.
    ContentType,
    /// A line of a stream that is no field of server-sent events.
    InvalidLine,
    /// Not JSON, or a field has the wrong type.
    InvalidJson,
    /// Text of a chat came before the role.
    NoRole,
    /// A chunk has another id than the first one.
    IdChanged,
    /// Text came after the finish reason.
    TextAfterFinish,
    FinishTwice,
    NoFinish,
    /// A finish reason that the API does not have.
    UnknownFinish,
    /// The finish reason contradicts the number of tokens and `max_tokens`.
    WrongFinish,
    NoUsage,
    /// The total is not the sum, or a reply with text has no tokens.
    WrongUsage,
    /// `--token-per-chunk`: the usage counts more or fewer tokens than the stream has chunks.
    UsageIsNotChunks,
    /// The reply has no text and no tool call.
    NoText,
    /// `--stamps`: a token of the mock's text is missing, doubled or out of order.
    TextLost,
    /// `--same-replies`: the reply differs from the first one to the same prompt.
    TextDiffers,
    /// The stream ended without `[DONE]`.
    NoDone,
    EventAfterDone,
}

impl ReplyFault {
    /// The word for it in tables and JSON.
    pub(super) fn name(self) -> &'static str {
        match self {
            ReplyFault::ContentType => "content_type",
            ReplyFault::InvalidLine => "invalid_line",
            ReplyFault::InvalidJson => "invalid_json",
            ReplyFault::NoRole => "no_role",
            ReplyFault::IdChanged => "id_changed",
            ReplyFault::TextAfterFinish => "text_after_finish",
            ReplyFault::FinishTwice => "finish_twice",
            ReplyFault::NoFinish => "no_finish",
            ReplyFault::UnknownFinish => "unknown_finish",
            ReplyFault::WrongFinish => "wrong_finish",
            ReplyFault::NoUsage => "no_usage",
            ReplyFault::WrongUsage => "wrong_usage",
            ReplyFault::UsageIsNotChunks => "usage_is_not_chunks",
            ReplyFault::NoText => "no_text",
            ReplyFault::TextLost => "text_lost",
            ReplyFault::TextDiffers => "text_differs",
            ReplyFault::NoDone => "no_done",
            ReplyFault::EventAfterDone => "event_after_done",
        }
    }
}

/// The faults of one reply. Each kind counts once.
#[derive(Debug, Default)]
pub(super) struct ReplyFaults {
    pub(super) kinds: BTreeSet<ReplyFault>,
    /// The first fault and the line in which it was found.
    pub(super) example: Option<String>,
}

/// Bytes of a line or body that an example quotes.
const MAX_EXAMPLE_BYTES: usize = 300;

impl ReplyFaults {
    /// Adds a fault and quotes `line` if it is the first one.
    pub(super) fn add(&mut self, fault: ReplyFault, line: &[u8]) {
        if self.kinds.insert(fault) && self.example.is_none() {
            self.example = Some(format!("{}: {}", fault.name(), quoted(line)));
        }
    }
}

/// The start of a line or body, for an example.
pub(super) fn quoted(bytes: &[u8]) -> String {
    let start = bytes.get(..MAX_EXAMPLE_BYTES).unwrap_or(bytes);
    String::from_utf8_lossy(start).split_whitespace().collect::<Vec<_>>().join(" ")
}

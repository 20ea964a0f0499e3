//! Checks the events that an engine sends for a sequence: each comes in its order, and no more tokens than were requested.

use baton_link::SequenceStream;
use baton_schemas::sequence::SequenceEvent;
use baton_schemas::{EngineError, SequenceRequest};
use futures::StreamExt;

/// The events that an engine may still send for a sequence.
pub(super) struct AllowedEvents {
    start: bool,
    begin: bool,
    handoff: bool,
    n_tokens: usize,
}

impl AllowedEvents {
    /// The events of a sequence on a node that holds `n_ctx` of its tokens.
    pub(super) fn of(request: &SequenceRequest, n_ctx: usize) -> AllowedEvents {
        let n_requested = request.max_tokens.map_or(usize::MAX, |n| n as usize);
        let n_new = n_requested.min(n_ctx.saturating_sub(request.prompt.len()));
        AllowedEvents {
            start: true,
            begin: request.reports_begin(),
            handoff: true,
            n_tokens: n_new.saturating_sub(request.generated.len()),
        }
    }

    /// Passes the events on until one is not allowed. Then the engine counts as lost: it could keep a request and its
    /// place for ever.
    pub(super) fn checked(mut self, events: SequenceStream) -> SequenceStream {
        events.map(move |event| event.and_then(|event| self.check(event))).boxed()
    }

    fn check(&mut self, event: SequenceEvent) -> Result<SequenceEvent, EngineError> {
        let (is_allowed, problem) = match &event {
            SequenceEvent::Started { .. } => (std::mem::take(&mut self.start), "the sequence started late or again"),
            SequenceEvent::PrefillBegun => (std::mem::take(&mut self.begin), "the prefill began late or again"),
            SequenceEvent::Handoff(_) => (std::mem::take(&mut self.handoff), "a handoff was reported late or again"),
            SequenceEvent::Token(_) => (self.take_token(), "there are more tokens than requested"),
            SequenceEvent::Finished { .. } => return Ok(event),
        };
        if is_allowed { Ok(event) } else { Err(EngineError::lost(format!("the stream is malformed: {problem}"))) }
    }

    fn take_token(&mut self) -> bool {
        let n_left = self.n_tokens.checked_sub(1);
        *self = AllowedEvents { start: false, begin: false, handoff: false, n_tokens: n_left.unwrap_or(0) };
        n_left.is_some()
    }
}

//! Puts streamed calls together by their numbers.
//!
//! A reply's calls follow one another, so pieces of a later call wait until the earlier one is complete: as soon as its
//! arguments are a whole object, or at the end of the reply. A call is passed on from its first argument on: until then its
//! name may grow, and a call with a lower number may come before it.

mod pieces;
mod streamed_call;

use baton_schemas::tools::ToolCallDelta;

use self::pieces::{CallPiece, CallsSoFar, PieceRole};
use self::streamed_call::{BeforeEvent, StreamedCall};
use crate::reply::delta::new_call_id;
use crate::reply::foreign::{ForeignArguments, ForeignCall, MAX_CALLS};
use crate::{TextDelta, UpstreamError};

/// The most bytes of calls that wait for an earlier one.
const MAX_HELD_BYTES: usize = 4 << 20;

/// The most bytes of a call's id, and of its name: both are kept as long as the reply runs.
const MAX_NAME_BYTES: usize = 1 << 10;

/// The calls of one reply.
#[derive(Default)]
pub(super) struct StreamedCalls {
    calls: Vec<StreamedCall>,
    /// Calls that are complete and passed on. The next one, if there is one, is being passed on.
    n_ended: usize,
    n_held_bytes: usize,
    /// Events with calls that have come.
    n_events: u64,
}

impl StreamedCalls {
    /// Takes the calls of an event, or pieces of them, in the order of their numbers. Errors: one continues no call, or may
    /// continue several, or there are too many.
    pub(super) fn take_all(
        &mut self,
        calls: Vec<ForeignCall<'_>>,
        is_whole: bool,
        out: &mut Vec<TextDelta>,
    ) -> Result<(), UpstreamError> {
        self.n_events += 1;
        for call in &mut self.calls {
            call.before = BeforeEvent { event: call.last_event, is_complete: call.extent.is_complete };
        }
        CallPiece::all_of(calls)?.into_iter().try_for_each(|piece| self.take(piece, is_whole, out))
    }

    fn take(&mut self, piece: CallPiece, is_whole: bool, out: &mut Vec<TextDelta>) -> Result<(), UpstreamError> {
        if piece.id.len().max(piece.name.len()) > MAX_NAME_BYTES {
            return Err(UpstreamError::malformed("a call whose id or name is too long"));
        }
        if piece.id.is_empty() && piece.name.is_empty() && piece.arguments == ForeignArguments::Nothing {
            return Ok(());
        }
        let role = match is_whole {
            true => PieceRole::Begins,
            false => CallsSoFar { calls: &self.calls, event: self.n_events }.role(&piece)?,
        };
        let at = match role {
            PieceRole::Continues(at) => self.merged(at, &piece),
            PieceRole::Begins => self.begin(&piece)?,
            PieceRole::Repeats => {
                let at = self.begin(&piece)?;
                self.calls[at].is_repeat = true;
                at
            }
        };
        self.add(at, piece, out)
    }

    /// Errors: a call has no name. To be checked before the reply ends.
    pub(super) fn check(&self) -> Result<(), UpstreamError> {
        match self.calls.iter().any(|call| call.name.is_empty()) {
            true => Err(UpstreamError::malformed("a call without a name")),
            false => Ok(()),
        }
    }

    /// Ends the calls with the reply. If a limit cut it, the call that it cut stays open, and what would follow is left out.
    /// Returns true if there were calls.
    pub(super) fn end(&mut self, is_cut: bool, out: &mut Vec<TextDelta>) -> bool {
        self.calls.retain(|call| !call.is_mere_repeat());
        while self.n_ended < self.calls.len() {
            let is_last = self.n_ended + 1 == self.calls.len();
            self.pass_on(out);
            if is_cut && (is_last || !self.calls[self.n_ended].is_whole()) {
                break;
            }
            self.end_call(out);
        }
        !self.calls.is_empty()
    }

    /// The index of the call that a piece continues, after the calls before it have become one with it that were pieces of it:
    /// without arguments, in other events and with other ids.
    fn merged(&mut self, mut at: usize, piece: &CallPiece) -> usize {
        let call = &mut self.calls[at];
        let is_its_id = !piece.id.is_empty() && call.their_id == piece.id;
        call.has_id_again |= is_its_id;
        if is_its_id || piece.id.is_empty() || piece.name.is_empty() || call.has_arguments {
            return at;
        }
        while at > self.n_ended {
            let (before, call) = (&self.calls[at - 1], &self.calls[at]);
            let is_piece = before.number == call.number && before.name == call.name && before.event != call.event;
            if !is_piece || before.has_arguments || before.has_empty_object || before.has_begun {
                break;
            }
            at -= 1;
            let ordinal = self.calls.remove(at).ordinal;
            self.calls[at].ordinal = ordinal;
        }
        at
    }

    fn begin(&mut self, piece: &CallPiece) -> Result<usize, UpstreamError> {
        if piece.id.is_empty() && piece.name.is_empty() {
            return Err(UpstreamError::malformed("a piece of a call that has not begun"));
        }
        let event = self.n_events;
        self.calls.retain(|call| !call.is_mere_repeat() || call.event == event);
        if self.calls.len() >= MAX_CALLS {
            return Err(UpstreamError::malformed("too many calls in one reply"));
        }
        let is_taken = piece.id.is_empty() || self.calls.iter().any(|call| call.id == piece.id);
        let id = if is_taken { new_call_id() } else { piece.id.clone() };
        let ordinal = u32::try_from(self.calls.len()).unwrap_or(u32::MAX);
        let call = StreamedCall { number: piece.number, ordinal, event, id, ..StreamedCall::default() };
        // Before those with a higher number that are not being passed on.
        let is_before = |later: &StreamedCall| {
            !later.has_begun && piece.number.zip(later.number).is_some_and(|(number, later)| later > number)
        };
        let n_later = self.calls.iter().rev().take_while(|later| is_before(later)).count();
        let at = self.calls.len() - n_later;
        self.calls.insert(at, call);
        Ok(at)
    }

    /// Adds a piece to the call of this index, and passes on what can be.
    fn add(&mut self, at: usize, piece: CallPiece, out: &mut Vec<TextDelta>) -> Result<(), UpstreamError> {
        let event = self.n_events;
        let call = &mut self.calls[at];
        call.last_event = event;
        if call.their_id.is_empty() {
            call.their_id = piece.id;
        }
        // Some servers write a name in pieces, and some the whole one again.
        if call.name.is_empty() || !call.has_arguments && call.event != event && call.name != piece.name {
            call.name.push_str(&piece.name);
        }
        if call.name.len() > MAX_NAME_BYTES {
            return Err(UpstreamError::malformed("a call whose name is too long"));
        }
        let arguments = call.text_of(&piece.arguments);
        call.has_empty_object |= arguments.is_none();
        let arguments = arguments.unwrap_or_default();
        if at < self.n_ended {
            return match arguments.trim().is_empty() {
                true => Ok(()),
                false => Err(UpstreamError::malformed("a piece of a call that has ended")),
            };
        }
        call.extent.take(arguments);
        call.has_arguments |= !arguments.is_empty();
        call.held.push_str(arguments);
        self.n_held_bytes += arguments.len();
        let is_known = |call: &&StreamedCall| !call.name.is_empty() && (call.has_arguments || call.has_begun);
        while let Some(call) = self.calls.get(self.n_ended).filter(is_known) {
            let is_followed = self.n_ended + 1 < self.calls.len();
            let is_complete = call.extent.is_complete;
            self.pass_on(out);
            if !is_followed || !is_complete {
                break;
            }
            self.end_call(out);
        }
        if self.n_held_bytes > MAX_HELD_BYTES {
            return Err(UpstreamError::malformed("too much of calls that wait for an earlier one"));
        }
        Ok(())
    }

    /// Passes on what is held of the call after those that have ended.
    fn pass_on(&mut self, out: &mut Vec<TextDelta>) {
        let index = u32::try_from(self.n_ended).unwrap_or(u32::MAX);
        let call = &mut self.calls[self.n_ended];
        if !std::mem::replace(&mut call.has_begun, true) {
            let (id, name) = (call.id.clone(), call.name.clone());
            out.push(TextDelta::Call(ToolCallDelta::Begin { index, id, name }));
        }
        if !call.held.is_empty() {
            self.n_held_bytes -= call.held.len();
            let fragment = std::mem::take(&mut call.held);
            out.push(TextDelta::Call(ToolCallDelta::Arguments { index, fragment }));
        }
    }

    fn end_call(&mut self, out: &mut Vec<TextDelta>) {
        let index = u32::try_from(self.n_ended).unwrap_or(u32::MAX);
        // No arguments are none, and clients parse them as JSON.
        if !self.calls[self.n_ended].has_arguments {
            out.push(TextDelta::Call(ToolCallDelta::Arguments { index, fragment: "{}".to_owned() }));
        }
        out.push(TextDelta::Call(ToolCallDelta::End { index }));
        self.n_ended += 1;
    }
}

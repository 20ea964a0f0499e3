//! Puts streamed calls together by their numbers.
//!
//! A reply's calls follow one another, so pieces of a later call wait until the earlier one is complete: as soon as its
//! arguments are a whole object, or at the end of the reply. A call is passed on from its first argument on: until then its
//! name may grow, and a call with a lower number may come before it.

use baton_schemas::tools::ToolCallDelta;

use crate::reply::delta::new_call_id;
use crate::reply::foreign::{Count, ForeignCall, MAX_CALLS};
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

#[derive(Default)]
struct StreamedCall {
    /// The server's number for it: not unique, since some servers number all calls 0.
    key: u32,
    /// The event that it began in. One event has no two pieces of a call, but for those with its id.
    event: u64,
    /// The server's id for it. May be empty.
    their_id: String,
    /// The id that clients get.
    id: String,
    /// Empty until it is known.
    name: String,
    has_begun: bool,
    /// Arguments that were not passed on yet.
    held: String,
    has_arguments: bool,
    /// Its id came again: this server's ids tell its calls apart.
    has_id_again: bool,
    extent: ObjectExtent,
}

/// Finds the end of a JSON object that arrives in pieces.
#[derive(Default)]
struct ObjectExtent {
    depth: u32,
    is_in_string: bool,
    is_escaped: bool,
    is_complete: bool,
}

impl ObjectExtent {
    fn take(&mut self, text: &str) {
        for byte in text.bytes() {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' if self.is_in_string => self.is_escaped = true,
                b'"' => self.is_in_string = !self.is_in_string,
                _ if self.is_in_string => {}
                b'{' | b'[' => self.depth = self.depth.saturating_add(1),
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    self.is_complete |= self.depth == 0;
                }
                _ => {}
            }
        }
    }
}

/// What a piece is read as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallForm {
    /// A piece of a stream, which may continue a call. Without a number it has the number of its place in the event.
    Piece { place: usize },
    /// A whole call.
    Whole,
}

impl StreamedCalls {
    /// Takes the calls of an event, or pieces of them, in the order of their numbers. Errors: one continues no call, or there
    /// are too many.
    pub(super) fn take_all(
        &mut self,
        mut calls: Vec<ForeignCall<'_>>,
        is_whole: bool,
        out: &mut Vec<TextDelta>,
    ) -> Result<(), UpstreamError> {
        self.n_events += 1;
        if calls.iter().all(|call| call.index.is_some()) {
            calls.sort_by_key(|call| call.index.and_then(|index| index.0));
        }
        calls.into_iter().enumerate().try_for_each(|(place, call)| {
            let form = if is_whole { CallForm::Whole } else { CallForm::Piece { place } };
            self.take(call, form, out)
        })
    }

    fn take(&mut self, call: ForeignCall<'_>, form: CallForm, out: &mut Vec<TextDelta>) -> Result<(), UpstreamError> {
        let is_numbered = call.index.is_some();
        let key = match (call.index, form) {
            (Some(Count(None)), _) => return Err(UpstreamError::malformed("a call whose index is no number")),
            (Some(Count(Some(index))), _) => index,
            (None, CallForm::Piece { place }) => u32::try_from(place).unwrap_or(u32::MAX),
            (None, CallForm::Whole) => 0,
        };
        let function = call.function.0.unwrap_or_default();
        let arguments = function.arguments()?;
        let piece = CallPiece { key, is_numbered, id: call.id.0, name: function.name.unwrap_or_default(), arguments };
        if piece.id.len().max(piece.name.len()) > MAX_NAME_BYTES {
            return Err(UpstreamError::malformed("a call whose id or name is too long"));
        }
        if piece.id.is_empty() && piece.name.is_empty() && piece.arguments.is_empty() {
            return Ok(());
        }
        let at = match self.continued(&piece).filter(|_| form != CallForm::Whole) {
            Some(at) => self.merged(at, &piece),
            None => self.begin(&piece)?,
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
        while self.n_ended < self.calls.len() {
            let is_last = self.n_ended + 1 == self.calls.len();
            self.pass_on(out);
            if is_cut && (is_last || !self.calls[self.n_ended].extent.is_complete) {
                break;
            }
            self.end_call(out);
        }
        !self.calls.is_empty()
    }

    /// The call that a piece continues.
    fn continued(&self, piece: &CallPiece) -> Option<usize> {
        let CallPiece { key, is_numbered, id, name, arguments } = piece;
        let find =
            |is_it: &dyn Fn(&StreamedCall) -> bool| self.calls.iter().rposition(|call| call.key == *key && is_it(call));
        if name.is_empty() {
            let with_id = || find(&|call| call.their_id == *id).filter(|_| !id.is_empty());
            // Some servers write another id into every piece, and a call's first piece has its name.
            let latest = || find(&|call| id.is_empty() || !call.extent.is_complete);
            return with_id().or_else(latest);
        }
        let is_same = |call: &StreamedCall| call.name.is_empty() || call.name == *name;
        let is_earlier = |call: &StreamedCall| call.event != self.n_events;
        let is_told = *is_numbered || !id.is_empty();
        let is_more_of_name = |call: &StreamedCall| is_told && is_earlier(call) && !call.has_arguments;
        let found = find(&|call| (id.is_empty() || call.their_id == *id) && (is_same(call) || is_more_of_name(call)));
        // Some servers repeat the name in every piece. After whole arguments, it begins another call.
        let has_arguments = !arguments.trim().is_empty();
        let found = found.filter(|at| !self.calls[*at].extent.is_complete || !has_arguments);
        // Some write another id beside it. Pieces without any arguments, however, are calls that have none, as it seems until
        // one with arguments follows. That is theirs, unless an id has come twice: then ids tell calls apart.
        let are_ids_kept = self.calls.iter().any(|call| call.has_id_again);
        let is_open = |call: &StreamedCall| {
            !call.extent.is_complete && (call.has_arguments || call.name.is_empty() || has_arguments && !are_ids_kept)
        };
        found.or_else(|| find(&|call| is_same(call) && is_earlier(call) && is_open(call)))
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
            let is_piece = before.key == call.key && before.name == call.name && before.event != call.event;
            if !is_piece || before.has_arguments || before.has_begun {
                break;
            }
            at -= 1;
            self.calls.remove(at);
        }
        at
    }

    fn begin(&mut self, piece: &CallPiece) -> Result<usize, UpstreamError> {
        if piece.id.is_empty() && piece.name.is_empty() {
            return Err(UpstreamError::malformed("a piece of a call that has not begun"));
        }
        if self.calls.len() >= MAX_CALLS {
            return Err(UpstreamError::malformed("too many calls in one reply"));
        }
        let is_taken = piece.id.is_empty() || self.calls.iter().any(|call| call.id == piece.id);
        let id = if is_taken { new_call_id() } else { piece.id.clone() };
        let mut call = StreamedCall { key: piece.key, their_id: piece.id.clone(), id, ..StreamedCall::default() };
        call.event = self.n_events;
        // Before those with a higher number that are not being passed on.
        let is_before = |later: &StreamedCall| piece.is_numbered && later.key > piece.key && !later.has_begun;
        let n_later = self.calls.iter().rev().take_while(|later| is_before(later)).count();
        let at = self.calls.len() - n_later;
        self.calls.insert(at, call);
        Ok(at)
    }

    /// Adds a piece to the call of this index, and passes on what can be.
    fn add(&mut self, at: usize, piece: CallPiece, out: &mut Vec<TextDelta>) -> Result<(), UpstreamError> {
        let event = self.n_events;
        let call = &mut self.calls[at];
        // Some servers write a name in pieces, and some the whole one again.
        if call.name.is_empty() || !call.has_arguments && call.event != event && call.name != piece.name {
            call.name.push_str(&piece.name);
        }
        if call.name.len() > MAX_NAME_BYTES {
            return Err(UpstreamError::malformed("a call whose name is too long"));
        }
        if at < self.n_ended {
            return match piece.arguments.trim().is_empty() {
                true => Ok(()),
                false => Err(UpstreamError::malformed("a piece of a call that has ended")),
            };
        }
        // White space before arguments may be all that there is.
        let arguments = if call.has_arguments { &*piece.arguments } else { piece.arguments.trim_start() };
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

/// A piece of a call.
struct CallPiece {
    key: u32,
    is_numbered: bool,
    id: String,
    name: String,
    arguments: String,
}

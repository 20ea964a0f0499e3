//! Puts streamed calls together by their numbers.
//!
//! A reply's calls follow one another, so pieces of a later call wait until the earlier one is complete: as soon as its
//! arguments are a whole object, or at the end of the reply.

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
}

#[derive(Default)]
struct StreamedCall {
    /// The server's number for it: not unique, since some servers number all calls 0.
    key: u32,
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
pub(super) enum CallForm {
    /// A piece of a stream, which may continue a call. Without a number it has the number of its place in the event.
    Piece { place: usize },
    /// A whole call.
    Whole,
}

impl StreamedCalls {
    /// Takes a call, or a piece of one. Errors: it continues no call, or there are too many.
    pub(super) fn take(
        &mut self,
        call: ForeignCall<'_>,
        form: CallForm,
        out: &mut Vec<TextDelta>,
    ) -> Result<(), UpstreamError> {
        let key = match (call.index, form) {
            (Some(Count(None)), _) => return Err(UpstreamError::malformed("a call whose index is no number")),
            (Some(Count(Some(index))), _) => index,
            (None, CallForm::Piece { place }) => u32::try_from(place).unwrap_or(u32::MAX),
            (None, CallForm::Whole) => 0,
        };
        let function = call.function.0.unwrap_or_default();
        let arguments = function.arguments()?;
        let piece = CallPiece { key, id: call.id.0, name: function.name.unwrap_or_default(), arguments };
        if piece.id.len().max(piece.name.len()) > MAX_NAME_BYTES {
            return Err(UpstreamError::malformed("a call whose id or name is too long"));
        }
        if piece.id.is_empty() && piece.name.is_empty() && piece.arguments.is_empty() {
            return Ok(());
        }
        let at = match self.continued(&piece).filter(|_| form != CallForm::Whole) {
            Some(at) => at,
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
        let CallPiece { key, id, name, arguments } = piece;
        let find =
            |is_it: &dyn Fn(&StreamedCall) -> bool| self.calls.iter().rposition(|call| call.key == *key && is_it(call));
        let with_id = || find(&|call| call.their_id == *id).filter(|_| !id.is_empty());
        if name.is_empty() {
            // Some servers write another id into every piece, and a call's first piece has its name.
            let latest = || find(&|call| id.is_empty() || !call.extent.is_complete);
            return with_id().or_else(latest);
        }
        let is_same = |call: &StreamedCall| call.name.is_empty() || call.name == *name;
        let found = if id.is_empty() { find(&is_same) } else { with_id() };
        // Some servers repeat the name in every piece. After whole arguments, it begins another call.
        found.filter(|at| !self.calls[*at].extent.is_complete || arguments.trim().is_empty())
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
        self.calls.push(StreamedCall { key: piece.key, their_id: piece.id.clone(), id, ..StreamedCall::default() });
        Ok(self.calls.len() - 1)
    }

    /// Adds a piece to the call of this index, and passes on what can be.
    fn add(&mut self, at: usize, piece: CallPiece, out: &mut Vec<TextDelta>) -> Result<(), UpstreamError> {
        let call = &mut self.calls[at];
        if call.name.is_empty() {
            call.name = piece.name;
        }
        if at < self.n_ended {
            return match piece.arguments.trim().is_empty() {
                true => Ok(()),
                false => Err(UpstreamError::malformed("a piece of a call that has ended")),
            };
        }
        call.extent.take(&piece.arguments);
        call.has_arguments |= !piece.arguments.trim().is_empty();
        call.held.push_str(&piece.arguments);
        self.n_held_bytes += piece.arguments.len();
        while let Some(call) = self.calls.get(self.n_ended).filter(|call| !call.name.is_empty()) {
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
    id: String,
    name: String,
    arguments: String,
}

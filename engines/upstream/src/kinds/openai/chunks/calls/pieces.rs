//! Which call a piece belongs to. Its number and its id say it, then its name, then which call was read last. If nothing tells
//! several calls apart it is an error: arguments must not reach another function.

use super::streamed_call::StreamedCall;
use crate::UpstreamError;
use crate::reply::foreign::{Count, ForeignArguments, ForeignCall};

/// A piece of a call.
pub(super) struct CallPiece {
    /// The server's number for the call.
    pub(super) number: Option<u32>,
    pub(super) id: String,
    pub(super) name: String,
    pub(super) arguments: ForeignArguments,
    /// Its place among the pieces of its event that say the same of their call, and how many those are.
    place: usize,
    n_alike: usize,
}

/// The effect of a piece on the calls so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PieceRole {
    /// Continues the call of this index.
    Continues(usize),
    Begins,
    /// Repeats the name of a call with whole arguments. It begins another one if arguments follow.
    Repeats,
}

impl CallPiece {
    /// The pieces of an event, in the order of their numbers. Errors: a number that cannot be read.
    pub(super) fn all_of(mut calls: Vec<ForeignCall<'_>>) -> Result<Vec<CallPiece>, UpstreamError> {
        if calls.iter().all(|call| call.index.is_some()) {
            calls.sort_by_key(|call| call.index.and_then(|index| index.0));
        }
        let mut pieces: Vec<CallPiece> = calls.into_iter().map(CallPiece::of).collect::<Result<_, _>>()?;
        for at in 0..pieces.len() {
            let alike = |other: &&CallPiece| pieces[at].is_like(other);
            (pieces[at].place, pieces[at].n_alike) =
                (pieces[..at].iter().filter(alike).count(), pieces.iter().filter(alike).count());
        }
        Ok(pieces)
    }

    fn of(call: ForeignCall<'_>) -> Result<CallPiece, UpstreamError> {
        let number = match call.index {
            Some(Count(None)) => return Err(UpstreamError::malformed("a call whose index is no number")),
            Some(Count(number)) => number,
            None => None,
        };
        let function = call.function.0.unwrap_or_default();
        let arguments = function.arguments()?;
        let name = function.name.unwrap_or_default();
        Ok(CallPiece { number, id: call.id.0, name, arguments, place: 0, n_alike: 1 })
    }

    fn is_like(&self, other: &CallPiece) -> bool {
        self.number == other.number && self.name == other.name && self.id.is_empty() == other.id.is_empty()
    }

    fn has_number_of(&self, call: &StreamedCall) -> bool {
        self.number.is_none_or(|number| call.number.unwrap_or(call.ordinal) == number)
    }

    fn has_name_of(&self, call: &StreamedCall) -> bool {
        call.name.is_empty() || call.name == self.name
    }
}

/// The calls of which a piece may be one's.
pub(super) struct CallsSoFar<'c> {
    pub(super) calls: &'c [StreamedCall],
    /// The number of the event that is being read.
    pub(super) event: u64,
}

impl CallsSoFar<'_> {
    /// The effect of a piece of a stream. Errors: several calls may be meant.
    pub(super) fn role(&self, piece: &CallPiece) -> Result<PieceRole, UpstreamError> {
        let known = self.find(|call| !piece.id.is_empty() && call.their_id == piece.id);
        let numbered = self.find(|call| piece.has_number_of(call));
        let both: Vec<usize> = known.iter().copied().filter(|at| numbered.contains(at)).collect();
        // An id that is known counts more than the number.
        let known = if both.is_empty() { known } else { both };
        if piece.name.is_empty() {
            return self.role_without_name(piece, &known, &numbered);
        }
        let candidates = match (piece.id.is_empty(), numbered.is_empty()) {
            (true, _) => numbered.clone(),
            (false, false) => known,
            // A number that is new begins a call: some servers write one id for all.
            (false, true) => Vec::new(),
        };
        if let Some(at) = self.told(piece, &self.with_name(piece, &candidates))? {
            let call = &self.calls[at];
            return Ok(match (takes(call, call.extent.is_complete, piece), piece.arguments.is_blank()) {
                (true, _) => PieceRole::Continues(at),
                (false, _) if call.name.is_empty() => PieceRole::Continues(at),
                (false, true) => PieceRole::Repeats,
                (false, false) => PieceRole::Begins,
            });
        }
        // Some servers write another id into every piece. Pieces without any arguments, however, are calls that have none, as
        // it seems until one with arguments follows. That is theirs, unless an id has come twice: then ids tell calls apart.
        let are_ids_kept = self.calls.iter().any(|call| call.has_id_again);
        let may_go_on = |call: &StreamedCall| {
            let is_begun = call.has_arguments || call.name.is_empty();
            !call.is_whole() && (is_begun || !piece.arguments.is_blank() && !are_ids_kept)
        };
        let candidates: Vec<usize> = numbered
            .into_iter()
            .filter(|at| {
                let call = &self.calls[*at];
                call.event != self.event && piece.has_name_of(call) && may_go_on(call)
            })
            .collect();
        Ok(self.told(piece, &candidates)?.map_or(PieceRole::Begins, PieceRole::Continues))
    }

    fn role_without_name(
        &self,
        piece: &CallPiece,
        known: &[usize],
        numbered: &[usize],
    ) -> Result<PieceRole, UpstreamError> {
        let found = match known {
            [] if piece.id.is_empty() => self.told(piece, numbered)?,
            // Some servers write another id into every piece, and a call's first piece has its name.
            [] => {
                let open = numbered.iter().copied().filter(|at| !self.calls[*at].extent.is_complete);
                self.told(piece, &open.collect::<Vec<_>>())?
            }
            known => self.told(piece, known)?,
        };
        Ok(found.map_or(PieceRole::Begins, PieceRole::Continues))
    }

    /// Those whose name a piece has, or may continue.
    fn with_name(&self, piece: &CallPiece, candidates: &[usize]) -> Vec<usize> {
        let is_named = |at: &usize| {
            let call = &self.calls[*at];
            let is_earlier = call.event != self.event;
            if piece.number.is_none() && piece.id.is_empty() {
                // One event has no two pieces of a call.
                return is_earlier && piece.has_name_of(call);
            }
            piece.has_name_of(call) || is_earlier && !call.has_arguments && !call.is_whole() && !call.is_repeat
        };
        candidates.iter().copied().filter(is_named).collect()
    }

    /// The one of these calls that a piece belongs to: one that began in this event, or else was read last before it, and whose
    /// arguments are not whole. If several came in one event, a piece of an event with as many has the call in its place.
    /// Errors: nothing tells which.
    fn told(&self, piece: &CallPiece, candidates: &[usize]) -> Result<Option<usize>, UpstreamError> {
        let call = |at: &usize| &self.calls[*at];
        let is_new = |at: &usize| call(at).event == self.event;
        let has_new = candidates.iter().any(is_new);
        let candidates: Vec<usize> = candidates.iter().copied().filter(|at| !has_new || is_new(at)).collect();
        let was_complete = |at: &usize| if has_new { call(at).extent.is_complete } else { call(at).before.is_complete };
        let is_open = |at: &usize| takes(call(at), was_complete(at), piece);
        let open: Vec<usize> = candidates.iter().copied().filter(is_open).collect();
        if open.is_empty() {
            let adds_text = !piece.arguments.is_blank() && piece.name.is_empty() && !candidates.is_empty();
            return match adds_text {
                true => Err(UpstreamError::malformed("more text after the whole arguments of a call")),
                // It adds to none of them, so it does not matter which one it repeats.
                false => Ok(candidates.last().copied()),
            };
        }
        let candidates = open;
        let last = |at: &usize| if has_new { self.event } else { call(at).before.event };
        let Some(latest) = candidates.iter().map(last).max() else { return Ok(None) };
        let tied: Vec<usize> = candidates.iter().copied().filter(|at| last(at) == latest).collect();
        let found = match &tied[..] {
            [at] => Some(*at),
            tied if tied.len() == piece.n_alike => tied.get(piece.place).copied(),
            _ => None,
        };
        // What comes after whole arguments in the same event may be another open call's.
        let is_complete = |at: &usize| call(at).extent.is_complete;
        let is_unsure = |at: &usize| is_complete(at) && !candidates.iter().all(is_complete);
        match found.filter(|at| piece.arguments.is_blank() || !is_unsure(at)) {
            Some(at) => Ok(Some(at)),
            None => Err(UpstreamError::malformed("a piece that may be of several calls")),
        }
    }

    fn find(&self, is_it: impl Fn(&StreamedCall) -> bool) -> Vec<usize> {
        (0..self.calls.len()).filter(|at| is_it(&self.calls[*at])).collect()
    }
}

/// Returns true if a piece may add to the arguments of a call: they are not whole, or only by an object that is empty.
fn takes(call: &StreamedCall, is_complete: bool, piece: &CallPiece) -> bool {
    !is_complete
        && (!call.has_only_empty_object() || call.text_of(&piece.arguments).is_some_and(|text| !text.is_empty()))
}

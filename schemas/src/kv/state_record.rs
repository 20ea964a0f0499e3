//! The payload of a state record.
//!
//! | offset | size | field |
//! |---|---|---|
//! | 0 | 4 | position: the number of tokens that the states have seen |
//! | 4 | 4 | index in [`KvLayout::states`] of the first state |
//! | 8 | 4 | number of states, at least 1 |
//! | 12 | 1 | [`Codec`] |
//! | 13 | 3 | zero |
//! | 16 | 32 | [`PrefixHasher`] hash of the tokens before the position |
//! | 48 | rest | the encoded values of the states, one state after the other |

use std::ops::Range;

use super::codec::Codec;
use super::error::FrameError;
use super::handoff::Handoff;
use super::layout::{KvLayout, StateShape};
use super::prefix::PrefixHasher;

/// The number of bytes of a state record before the values.
const HEADER_BYTES: usize = 48;

/// The most positions for which a stream has states.
pub const MAX_STATE_POSITIONS: usize = 8;

/// The header of a state record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StateHeader {
    pub(super) position: u32,
    pub(super) first: u32,
    pub(super) n_states: u32,
    pub(super) codec: Codec,
    pub(super) prefix: [u8; 32],
}

impl StateHeader {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        for number in [self.position, self.first, self.n_states] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend([self.codec as u8, 0, 0, 0]);
        bytes.extend(self.prefix);
        bytes
    }

    /// Parses the header at the beginning of `bytes`.
    pub(super) fn parse(bytes: &[u8]) -> Result<StateHeader, FrameError> {
        let fixed = bytes.first_chunk::<HEADER_BYTES>().ok_or(FrameError::StateTooShort { n_bytes: bytes.len() })?;
        let [p0, p1, p2, p3, f0, f1, f2, f3, n0, n1, n2, n3, codec, z0, z1, z2, prefix @ ..] = *fixed;
        let position = u32::from_le_bytes([p0, p1, p2, p3]);
        let first = u32::from_le_bytes([f0, f1, f2, f3]);
        let n_states = u32::from_le_bytes([n0, n1, n2, n3]);
        if [z0, z1, z2] != [0; 3] {
            return Err(FrameError::StateReserved { position });
        }
        let codec = Codec::from_number(codec).ok_or(FrameError::UnknownStateCodec { position, codec })?;
        Ok(StateHeader { position, first, n_states, codec, prefix })
    }
}

/// The state records of a stream that are still to come. Both ends keep one: what a writer may write is what a reader accepts.
#[derive(Debug, Clone)]
pub(super) struct StateQueue {
    codec: Codec,
    /// The named positions that are not complete, in order, each with the hash of the tokens before it.
    positions: Vec<(u32, [u8; 32])>,
    /// The first state that is missing at the first of them.
    first: usize,
}

impl StateQueue {
    /// Before the head: no state may come.
    pub(super) fn none() -> StateQueue {
        StateQueue { codec: Codec::None, positions: Vec::new(), first: 0 }
    }

    /// The states that a head names. Errors: it must name the end of a handoff whose layout has states, and may name earlier
    /// positions that are handed over; without states in the layout it names none.
    pub(super) fn new(handoff: &Handoff, states_at: &[u32], codec: Codec) -> Result<StateQueue, FrameError> {
        let end = handoff.end();
        let has_states = !handoff.layout.states.is_empty();
        let is_possible = states_at.len() <= MAX_STATE_POSITIONS
            && states_at.is_sorted_by(|a, b| a < b)
            && states_at.first().is_none_or(|first| *first > handoff.start)
            && states_at.last().copied() == has_states.then_some(end);
        if !is_possible {
            return Err(FrameError::StatePositions { found: states_at.len(), start: handoff.start, end });
        }
        let mut prefix = PrefixHasher::new();
        let mut n_hashed = 0;
        let positions = states_at.iter().map(|&position| {
            prefix.extend(&handoff.tokens[n_hashed..position as usize]);
            n_hashed = position as usize;
            (position, prefix.hash())
        });
        Ok(StateQueue { codec, positions: positions.collect(), first: 0 })
    }

    /// The first position whose states are not complete.
    pub(super) fn missing(&self) -> Option<u32> {
        self.positions.first().map(|(position, _)| *position)
    }

    /// The most bytes of the next record's payload. `None`: no state may come.
    pub(super) fn max_bytes(&self, layout: &KvLayout) -> Option<u64> {
        self.positions.first()?;
        let values: usize = layout.states[self.first..].iter().map(|state| self.codec.state_bytes(state)).sum();
        Some((HEADER_BYTES + values) as u64)
    }

    /// The header of the record with the next `n_states` states. `None`: no state may come.
    pub(super) fn header(&self, n_states: u32) -> Option<StateHeader> {
        let &(position, prefix) = self.positions.first()?;
        Some(StateHeader { position, first: self.first as u32, n_states, codec: self.codec, prefix })
    }

    /// Checks that a record comes now. Returns its states.
    pub(super) fn check<'l>(&self, header: &StateHeader, layout: &'l KvLayout) -> Result<&'l [StateShape], FrameError> {
        let StateHeader { position, first, n_states, .. } = *header;
        let wanted = self.header(n_states).ok_or(FrameError::StatePosition { position, expected: None })?;
        if position != wanted.position {
            return Err(FrameError::StatePosition { position, expected: Some(wanted.position) });
        }
        if first != wanted.first {
            return Err(FrameError::StateOrder { position, expected: wanted.first, found: first });
        }
        if header.codec != wanted.codec {
            return Err(FrameError::OtherStateCodec { position, expected: wanted.codec, found: header.codec });
        }
        if header.prefix != wanted.prefix {
            return Err(FrameError::StatePrefix { position });
        }
        let missing = &layout.states[self.first..];
        match missing.get(..n_states as usize).filter(|states| !states.is_empty()) {
            Some(states) => Ok(states),
            None => Err(FrameError::StateCount { position, most: missing.len(), found: n_states }),
        }
    }

    /// Advances past a checked record. Returns true if the states of its position are complete.
    pub(super) fn advance(&mut self, n_states: usize, layout: &KvLayout) -> bool {
        self.first += n_states;
        let is_complete = self.first == layout.states.len();
        if is_complete {
            self.positions.remove(0);
            self.first = 0;
        }
        is_complete
    }
}

/// The place of each state's values in a payload of `n_bytes`.
pub(super) fn places(
    header: &StateHeader,
    states: &[StateShape],
    n_bytes: usize,
) -> Result<Vec<Range<usize>>, FrameError> {
    let mut at = HEADER_BYTES;
    let places = states.iter().map(|state| {
        let from = at;
        at += header.codec.state_bytes(state);
        from..at
    });
    let places = places.collect();
    match at == n_bytes {
        true => Ok(places),
        false => Err(FrameError::StateLength { position: header.position, expected: at, found: n_bytes }),
    }
}

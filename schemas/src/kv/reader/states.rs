//! The states of a position, gathered from their records.

use std::sync::Arc;

use bytes::Bytes;

use crate::kv::error::FrameError;
use crate::kv::layout::KvLayout;
use crate::kv::state::VerifiedState;
use crate::kv::state_record::{StateHeader, StateQueue, places};

/// The states that the head names, and those of the first incomplete position that have arrived. Only one position's are held:
/// the next one's are refused before these are complete.
pub(super) struct IncomingStates {
    layout: Arc<KvLayout>,
    queue: StateQueue,
    arrived: Vec<Bytes>,
}

impl IncomingStates {
    pub(super) fn new(layout: Arc<KvLayout>, queue: StateQueue) -> IncomingStates {
        IncomingStates { layout, queue, arrived: Vec::new() }
    }

    /// The first position whose states are not complete.
    pub(super) fn missing(&self) -> Option<u32> {
        self.queue.missing()
    }

    /// The most bytes that the payload of state record `record` can have.
    pub(super) fn max_bytes(&self, record: u32) -> Result<u64, FrameError> {
        let refused = match self.layout.states.is_empty() {
            true => FrameError::NoStates { record },
            false => FrameError::NoMoreStates { record },
        };
        self.queue.max_bytes(&self.layout).ok_or(refused)
    }

    /// Checks a record whose MAC is correct. Returns all states of its position if they are complete.
    pub(super) fn accept(&mut self, payload: Vec<u8>) -> Result<Option<VerifiedState>, FrameError> {
        let header = StateHeader::parse(&payload)?;
        let StateHeader { position, first, .. } = header;
        let states = self.queue.check(&header, &self.layout)?;
        let places = places(&header, states, payload.len())?;
        let n_states = states.len();
        let payload = Bytes::from(payload);
        let encoded = states.iter().zip(places).map(|(state, place)| (state, payload.slice(place)));
        let decoded = header.codec.decode_states(encoded);
        let wrong = |index| FrameError::StateNotFinite { position, state: first as usize + index };
        self.arrived.extend(decoded.map_err(wrong)?);
        if !self.queue.advance(n_states, &self.layout) {
            return Ok(None);
        }
        Ok(Some(VerifiedState::new(Arc::clone(&self.layout), position, std::mem::take(&mut self.arrived))))
    }
}

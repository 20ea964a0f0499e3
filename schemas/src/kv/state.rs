//! The states of a sequence: what recurrent layers keep instead of rows.
//!
//! Rows of positions can be cut, joined and handed over piece by piece. A state is the result of all positions before it: it
//! belongs to exactly one position, and rows without it cannot be continued.

use std::sync::Arc;

use bytes::Bytes;

use super::chunk::ChunkError;
use super::layout::KvLayout;

/// Some of the states of a sequence after its first `position` tokens. Layers are computed one after the other, so the states
/// of the first ones can leave before those of the last ones exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatePart {
    /// The number of tokens that the states have seen.
    pub position: u32,
    /// The index in [`KvLayout::states`] of the first tensor.
    pub first: u32,
    /// The values of consecutive states, little-endian.
    pub tensors: Vec<Bytes>,
}

impl StatePart {
    /// Checks that the tensors are exactly those of `layout` from `first` on.
    pub fn check(&self, layout: &KvLayout) -> Result<(), ChunkError> {
        let shapes = layout.states.get(self.first as usize..).unwrap_or_default();
        if self.tensors.is_empty() || self.tensors.len() > shapes.len() {
            let message = format!("{} states from {} on, of {}", self.tensors.len(), self.first, layout.states.len());
            return Err(ChunkError(message));
        }
        for (tensor, shape) in self.tensors.iter().zip(shapes) {
            if tensor.len() != shape.values.bytes() {
                return Err(ChunkError(format!("a state of {} bytes for {shape:?}", tensor.len())));
            }
        }
        Ok(())
    }

    /// Returns the number of bytes of all values.
    pub fn n_bytes(&self) -> usize {
        self.tensors.iter().map(Bytes::len).sum()
    }
}

/// All states of a sequence, which passed every check. Only a [`HandoffReader`](super::reader::HandoffReader) creates one: the
/// MACs are right, they belong to the reader's own tokens and to a position that the head names, their sizes are the
/// layout's, and every value is finite.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifiedState {
    layout: Arc<KvLayout>,
    position: u32,
    tensors: Vec<Bytes>,
}

impl VerifiedState {
    /// The states of `layout`, which the reader has checked.
    pub(super) fn new(layout: Arc<KvLayout>, position: u32, tensors: Vec<Bytes>) -> Self {
        VerifiedState { layout, position, tensors }
    }

    /// Returns the states without the knowledge that they were checked.
    pub fn into_part(self) -> StatePart {
        StatePart { position: self.position, first: 0, tensors: self.tensors }
    }

    /// Returns the number of tokens that the states have seen.
    pub fn position(&self) -> u32 {
        self.position
    }

    /// Returns the shape of the model's KV.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Returns the number of bytes of all values.
    pub fn n_bytes(&self) -> usize {
        self.tensors.iter().map(Bytes::len).sum()
    }

    /// Returns the values of every state, in the order of [`KvLayout::states`].
    pub fn tensors(&self) -> &[Bytes] {
        &self.tensors
    }
}

//! Writes the states of a sequence as llama.cpp reads them, and the only way to make a `StateBlob`.
//!
//! llama.cpp accepts states of any position, several of them (which end the process), and NaN, which stays in a cell and
//! spoils the next sequence there. So only a `StateBlob` reaches it, with one cell whose values were checked: those of a
//! [`VerifiedState`] by the reader that made it, those of a plain [`StatePart`] in [`ImportState::build`].

use baton_schemas::kv::{KvLayout, StatePart, VerifiedState, all_finite};
use bytes::Bytes;

use super::blob::BlobError;
use super::blob::form::{BlobForm, HEADER_BYTES, MAGIC, SEQUENCE};

/// All states of a sequence, which are safe to import.
pub struct ImportState {
    layout: KvLayout,
    position: u32,
    tensors: Vec<Bytes>,
}

impl ImportState {
    /// States that no reader has verified. Errors: they are not all states of the layout; a value is not finite.
    pub fn build(part: &StatePart, layout: &KvLayout) -> Result<ImportState, BlobError> {
        part.check(layout)?;
        if part.tensors.len() != layout.states.len() {
            return Err(BlobError::Shape(format!("{} states of {}", part.tensors.len(), layout.states.len())));
        }
        for (tensor, (values, shape)) in part.tensors.iter().zip(&layout.states).enumerate() {
            if !all_finite(shape.values.dtype, values) {
                return Err(BlobError::NotFinite { tensor });
            }
        }
        Self::at(part.position, layout.clone(), part.tensors.clone())
    }

    /// States that a reader has verified.
    pub fn verified(state: &VerifiedState) -> Result<ImportState, BlobError> {
        Self::at(state.position(), state.layout().clone(), state.tensors().to_vec())
    }

    fn at(position: u32, layout: KvLayout, tensors: Vec<Bytes>) -> Result<ImportState, BlobError> {
        match position {
            1..=MAX_POSITION => Ok(ImportState { layout, position, tensors }),
            _ => Err(BlobError::Positions(format!("states of {position} tokens"))),
        }
    }

    /// The number of tokens that the states have seen.
    pub fn position(&self) -> u32 {
        self.position
    }

    /// The layout that they belong to.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Their values, in the layout's order.
    pub(super) fn tensors(&self) -> &[Bytes] {
        &self.tensors
    }

    /// A blob of these states, which have seen all positions before `end`, in `buffer`. `before` are the sections that llama.cpp
    /// wants before them, as it wrote them itself. `None`: the form has no states.
    pub(super) fn blob(&self, form: &BlobForm, end: u32, before: &[u8], buffer: Vec<u8>) -> Option<StateBlob> {
        let states = form.states()?;
        let mut blob = buffer;
        blob.clear();
        blob.reserve_exact(HEADER_BYTES + before.len() + states.n_bytes(true));
        blob.extend(MAGIC.to_le_bytes());
        blob.extend(SEQUENCE.to_le_bytes());
        blob.extend(before);
        states.write(&mut blob, end.checked_sub(1)?, self.tensors.iter().map(|tensor| &tensor[..]));
        Some(StateBlob(blob))
    }
}

/// The most tokens: llama.cpp can hold the largest i32 as a position but never removes it again.
const MAX_POSITION: u32 = i32::MAX.cast_unsigned();

/// States that llama.cpp can import: one cell, at a possible position, whose values are finite.
pub(super) struct StateBlob(Vec<u8>);

impl StateBlob {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The buffer, for reuse.
    pub(super) fn into_buffer(self) -> Vec<u8> {
        self.0
    }
}

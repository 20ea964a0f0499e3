//! What the scheduler needs of the library that computes a model.
//!
//! A context computes batches of tokens for sequences, of which each slot holds one, and keeps their KV. A slot's KV is
//! always that of consecutive positions from 0; in layers with a sliding window, old ones may be missing.

use std::ops::Range;
use std::sync::Arc;

use baton_schemas::kv::{Chunk, StatePart, VerifiedKv, VerifiedState};
use baton_schemas::{EngineError, Token};
use bytes::Bytes;

use super::images::{ImageFailure, ImageRun, Preparation};

/// A token of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BatchToken {
    pub(crate) token: Token,
    /// The next position of its slot.
    pub(crate) position: u32,
    pub(crate) slot: u32,
    pub(crate) wants_logits: bool,
}

/// Why a batch was not computed. KV of some of its tokens may have been written.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ComputeError {
    /// No cell of the cache is free.
    #[error("no cell of the KV cache is free")]
    NoCells,
    #[error("{0}")]
    Refused(String),
    /// What computes was lost, and with it the KV of all slots, which are empty now. The next batch may be computed.
    #[error("{reason}")]
    Lost {
        reason: String,
        /// It was lost while it computed this batch.
        by_batch: bool,
    },
}

/// A slot's KV cannot be cut to a part of its positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CannotCut;

/// Where exported KV goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExportTo {
    /// To another node, soon.
    Node,
    /// It stays in this process for long.
    Host,
}

/// A head that predicts further tokens. It has a sequence for each slot of the context.
pub(crate) trait PredictionHead {
    /// Values of a hidden row.
    fn n_values(&self) -> usize;

    /// Computes tokens. `hidden` has the hidden row of the token before each.
    fn compute(&mut self, batch: &[BatchToken], hidden: &[f32]) -> Result<(), ComputeError>;

    /// The logits of the token after the last batch's token at `index`, which wanted them.
    fn logits(&mut self, index: usize) -> &[f32];

    /// The hidden row that belongs to these logits.
    fn hidden(&mut self, index: usize) -> &[f32];

    /// Removes a slot's positions from `from` on.
    fn cut(&mut self, slot: usize, from: usize);
}

/// For a library whose models have no such head.
pub(crate) enum NoHead {}

impl PredictionHead for NoHead {
    fn n_values(&self) -> usize {
        match *self {}
    }

    fn compute(&mut self, _: &[BatchToken], _: &[f32]) -> Result<(), ComputeError> {
        match *self {}
    }

    fn logits(&mut self, _: usize) -> &[f32] {
        match *self {}
    }

    fn hidden(&mut self, _: usize) -> &[f32] {
        match *self {}
    }

    fn cut(&mut self, _: usize, _: usize) {
        match *self {}
    }
}

/// The context of a loaded model. One thread owns it.
pub(crate) trait ModelContext {
    /// An image of a sequence, prepared or about to be.
    type Preparation: Preparation;

    /// The head that predicts further tokens from the model's hidden rows.
    type Head: PredictionHead;

    /// From now on, these are the tokens of a slot's sequence. It may hold the first of them already. An image's tokens may
    /// share a position.
    fn set_tokens(&mut self, _slot: usize, _tokens: &[Token]) {}

    /// Computes the tokens of a batch. The order of each slot's tokens is that of their positions.
    fn compute(&mut self, batch: &[BatchToken]) -> Result<(), ComputeError>;

    /// The logits after the last batch's token at `index`, which wanted them: one for each token of the vocabulary.
    fn logits(&mut self, index: usize) -> &[f32];

    /// The hidden row after the last batch's token at `index`, for the model's own head. Empty if none was created.
    fn hidden(&mut self, _index: usize) -> &[f32] {
        &[]
    }

    /// Waits until the last batch is computed.
    fn synchronize(&mut self);

    /// Keeps the first `n_keep` positions of a slot. With 0 it never fails.
    fn cut(&mut self, slot: usize, n_keep: usize) -> Result<(), CannotCut>;

    /// The most positions that [`ModelContext::take_back`] can remove. 0: no drafts can be verified.
    fn max_rollback(&self) -> usize {
        0
    }

    /// Keeps the first `n_keep` positions of a slot, and removes some of those that the last batch computed of it, but not all.
    /// Errors: what is left of the slot cannot be continued.
    fn take_back(&mut self, slot: usize, n_keep: usize) -> Result<(), CannotCut> {
        self.cut(slot, n_keep)
    }

    /// Gives the empty `slot` the first `n` positions of `source`. Returns false if that is not possible.
    fn fork(&mut self, source: usize, slot: usize, n: usize) -> bool;

    /// Returns true if slots that were forked from each other share the cells of their common positions, and false if
    /// each has a copy.
    fn forks_share_cells(&self) -> bool;

    /// Returns true if the values of freed cells stay in memory that later steps may read. One NaN among them would then spoil
    /// other sequences.
    fn keeps_freed_cells(&self) -> bool {
        true
    }

    /// The first position of a slot that every layer has; 0 for an empty slot.
    fn oldest(&self, slot: usize) -> usize;

    /// Overwrites the whole cache. All slots are empty afterwards.
    fn overwrite(&mut self);

    /// Copies the KV of `positions`, as a part of a prompt that ends at `end`. Windowed rows that position `end` does not
    /// attend to may be missing. Only for a model whose KV can be handed over, like the methods below.
    fn export(&mut self, slot: usize, positions: Range<u32>, end: u32, to: ExportTo) -> Result<Chunk, String>;

    /// Adds a received chunk to a slot that holds `n_present` positions. Returns the chunk's buffer, for reuse.
    fn import(&mut self, slot: usize, n_present: u32, chunk: VerifiedKv) -> Result<Vec<u8>, String>;

    /// Adds a chunk that this context exported.
    fn restore(&mut self, slot: usize, chunk: &Chunk) -> Result<(), String>;

    /// Gives a slot states of its last position that this model's context exported.
    fn restore_state(&mut self, _slot: usize, _state: &StatePart) -> Result<(), String> {
        Err(NO_STATES.into())
    }

    /// Returns true if the next position, `n_present`, can be computed in a slot: every layer has all positions that it
    /// attends to.
    fn can_continue(&self, slot: usize, n_present: usize) -> bool;

    /// Copies the states of a slot that ends at `position`. Only for a model with states, like the methods below.
    fn export_state(&mut self, _slot: usize, _position: u32) -> Result<StatePart, String> {
        Err(NO_STATES.into())
    }

    /// Gives a slot the states of its last position. Every chunk that is added to a slot takes its states away, so they
    /// come last.
    fn import_state(&mut self, _slot: usize, _state: VerifiedState) -> Result<(), String> {
        Err(NO_STATES.into())
    }

    /// Copies what a slot needs beside its rows to be cut back to its present end later: states, and windowed rows. Only this
    /// context reads it.
    fn checkpoint(&mut self, _slot: usize) -> Result<Bytes, String> {
        Err(NO_STATES.into())
    }

    /// The states in a checkpoint of the first `position` tokens, for another node.
    fn states_of(&self, _position: u32, _checkpoint: &Bytes) -> Result<StatePart, String> {
        Err(NO_STATES.into())
    }

    /// Cuts a slot back to its first `n_keep` positions. `checkpoint` was taken at that end, from this slot or from one that
    /// had the same tokens. Errors: the slot is empty.
    fn return_to(&mut self, _slot: usize, _n_keep: usize, _checkpoint: &Bytes) -> Result<(), CannotCut> {
        Err(CannotCut)
    }

    /// Computes the tokens of one slot, and passes the states of their end to `sink`, in the layout's order and as soon as they
    /// are computed, where that is possible. All of them were passed on when this returns. Errors: what was passed on is of no
    /// use.
    fn compute_streaming_state(
        &mut self,
        batch: &[BatchToken],
        sink: &mut dyn FnMut(StatePart),
    ) -> Result<(), ComputeError> {
        self.compute(batch)?;
        let Some(last) = batch.last() else { return Ok(()) };
        let part = self.export_state(last.slot as usize, last.position + 1);
        part.map(sink).map_err(ComputeError::Refused)
    }

    /// Returns true if the model sees images.
    fn sees_images(&self) -> bool {
        false
    }

    /// Returns true if an image is being worked on, so that none can be decoded now.
    fn image_is_busy(&self) -> bool {
        false
    }

    /// Takes or queues an image of a sequence. `None`: too many are queued.
    fn prepare_image(&self, _run: &ImageRun) -> Option<Arc<Self::Preparation>> {
        None
    }

    /// Encodes a prepared image and adds its positions to a slot. Blocking: up to seconds.
    fn decode_image(&mut self, _: usize, _: &ImageRun, _: &Self::Preparation) -> Result<(), ImageFailure> {
        Err(ImageFailure::Failed(EngineError::internal("an image without a projector")))
    }
}

pub(crate) const NO_STATES: &str = "this model has no states";

//! Exports and imports KV of a context with compressed caches; see [`super`].

use std::ops::Range;
use std::sync::Arc;

use baton_link::handoff::BufferPool;
use baton_schemas::kv::{Chunk, KvLayout, StatePart, VerifiedKv, all_finite};
use bytes::Bytes;
use llama_cpp_2::context::LlamaContext;

use super::form::CompressedForm;
use super::pieces;
use super::write::Beside;
use crate::llama::blob::BlobError;
use crate::llama::checkpoint;
use crate::llama::export_buffer::ExportBuffer;
use crate::llama::import_state::ImportState;
use crate::llama::state::{self, SequencePart};
use crate::llama::transfer::{TransferError, clear, end_with_states};

/// Exports and imports the KV of a context's slots, which are its sequences.
pub struct CompressedTransfer {
    form: Arc<CompressedForm>,
    /// The chunks of each slot that wait for their states. They continue the rows that the slot has in the cache.
    waiting: Vec<Vec<Chunk>>,
    /// All rows of a slot, of which more chunks will be exported before anything changes.
    exported: Option<(u32, Chunk)>,
    /// The GPU that exports are copied from.
    gpu: Option<usize>,
    exports: BufferPool<ExportBuffer>,
    states: BufferPool<Vec<u8>>,
}

impl CompressedTransfer {
    /// The transfer for a context whose sequences `0..n_slots` have this form. `gpu` is ggml's index of the device that holds the
    /// cache; `None`: the processor.
    pub(in crate::llama) fn new(form: CompressedForm, n_slots: u32, gpu: Option<usize>) -> Self {
        let (exports, states) = (BufferPool::default(), BufferPool::default());
        let waiting = (0..n_slots).map(|_| Vec::new()).collect();
        CompressedTransfer { form: Arc::new(form), waiting, exported: None, gpu, exports, states }
    }

    /// The context's layout.
    pub fn layout(&self) -> &Arc<KvLayout> {
        self.form.layout()
    }

    /// Call it before anything is computed: what was exported is not the cache's content any more.
    pub fn forget_exported(&mut self) {
        self.exported = None;
    }

    /// Exports the KV of `positions` in a slot, as a part of a prompt that ends at `end`. Windowed rows that position `end` does
    /// not attend to may be missing. The whole slot is copied, unless it is the next part of an unchanged one.
    pub fn export(
        &mut self,
        ctx: &LlamaContext<'_>,
        slot: u32,
        positions: Range<u32>,
        end: u32,
    ) -> Result<Chunk, TransferError> {
        self.check_slot(slot)?;
        let Range { start: p0, end: p1 } = positions;
        let whole = match self.exported.take().filter(|(of, _)| *of == slot) {
            Some((_, whole)) => whole,
            None => self.whole(ctx, slot)?,
        };
        if p0 >= p1 || p1 > whole.p1 {
            return Err(BlobError::Positions(format!("{p0}..{p1}, of {}", whole.p1)).into());
        }
        let mut chunk = pieces::part(&whole, self.layout(), p0, p1);
        // Enough to go on from the chunk's end: there are checkpoints, too.
        pieces::trim_window(&mut chunk, self.layout());
        let chunk = pieces::copied(chunk);
        if p1 < whole.p1 {
            self.exported = Some((slot, whole));
        }
        let latest = (end + 1).saturating_sub(self.form.window()).clamp(p0, p1);
        match chunk.sections.first().filter(|rows| rows.start > latest) {
            Some(rows) => Err(TransferError::Forgotten { start: rows.start, p1 }),
            None => Ok(chunk),
        }
    }

    /// All rows of a slot.
    fn whole(&self, ctx: &LlamaContext<'_>, slot: u32) -> Result<Chunk, TransferError> {
        let buffer = self.exports.take().unwrap_or_else(|| ExportBuffer::new(self.gpu));
        let exported = state::export(ctx, slot, SequencePart::Everything, buffer)?;
        Ok(self.form.whole(&self.exports.lend(exported))?)
    }

    /// Adds a received chunk to a slot that holds `n_present` positions. It waits for its states.
    pub fn receive(
        &mut self,
        ctx: &LlamaContext<'_>,
        slot: u32,
        n_present: u32,
        chunk: VerifiedKv,
    ) -> Result<(), TransferError> {
        if chunk.layout() != &**self.layout() {
            return Err(TransferError::OtherLayout);
        }
        self.wait(ctx, slot, n_present, chunk.into_chunk())
    }

    /// The same for a chunk that no reader has verified.
    pub fn restore(&mut self, ctx: &LlamaContext<'_>, slot: u32, chunk: &Chunk) -> Result<(), TransferError> {
        chunk.check(self.layout()).map_err(BlobError::from)?;
        let shapes = self.layout().sections.iter().flat_map(|section| &section.layers);
        let rows = chunk.sections.iter().flat_map(|section| &section.layers);
        if let Some(tensor) = rows.zip(shapes).position(|(rows, shape)| !all_finite(shape.k.dtype, &rows.k)) {
            return Err(BlobError::NotFinite { tensor: 2 * tensor }.into());
        }
        self.wait(ctx, slot, chunk.p0, chunk.clone())
    }

    fn wait(&mut self, ctx: &LlamaContext<'_>, slot: u32, n_present: u32, chunk: Chunk) -> Result<(), TransferError> {
        self.check_slot(slot)?;
        let Chunk { p0, p1, .. } = chunk;
        let end = self.end(ctx, slot);
        if p0 != n_present || p0 != end {
            return Err(TransferError::NotAnExtension { p0, p1, n_present: end });
        }
        self.waiting[slot as usize].push(chunk);
        Ok(())
    }

    /// One past the last position that a slot has, in the cache or waiting.
    fn end(&self, ctx: &LlamaContext<'_>, slot: u32) -> u32 {
        let waiting = self.waiting[slot as usize].last().map(|chunk| chunk.p1);
        waiting.or_else(|| end_with_states(ctx, slot)).unwrap_or(0)
    }

    /// Exports all states of a slot, which must end at `position`.
    pub fn export_state(&self, ctx: &LlamaContext<'_>, slot: u32, position: u32) -> Result<StatePart, TransferError> {
        self.check_slot(slot)?;
        if end_with_states(ctx, slot) != Some(position) {
            return Err(TransferError::NoStates { slot, position });
        }
        let buffer = self.states.take().unwrap_or_default();
        let exported = state::export(ctx, slot, SequencePart::BesideRows, buffer)?;
        Ok(self.form.state_part(&self.states.lend(exported), position)?)
    }

    /// The states in a copy of what a slot of `position` tokens had beside its rows.
    pub fn states_of(&self, position: u32, checkpoint: &Bytes) -> Result<StatePart, TransferError> {
        Ok(self.form.state_part(checkpoint, position)?)
    }

    /// Gives a slot the chunks that wait, with the states of their end. Errors: the slot is empty if llama.cpp refused them; else it
    /// is as before the chunks.
    pub fn import_state(
        &mut self,
        ctx: &mut LlamaContext<'_>,
        slot: u32,
        states: &ImportState,
    ) -> Result<(), TransferError> {
        self.check_slot(slot)?;
        let position = states.position();
        if states.layout() != &**self.layout() {
            return Err(TransferError::OtherLayout);
        }
        if self.end(ctx, slot) != position {
            self.waiting[slot as usize].clear();
            return Err(TransferError::NoStates { slot, position });
        }
        self.assemble(ctx, slot, position, &Beside::States(states))
    }

    /// Gives a slot its first `end` tokens: those in the cache and those that wait.
    fn assemble(
        &mut self,
        ctx: &mut LlamaContext<'_>,
        slot: u32,
        end: u32,
        beside: &Beside<'_>,
    ) -> Result<(), TransferError> {
        self.exported = None;
        let waiting = std::mem::take(&mut self.waiting[slot as usize]);
        let in_cache = end_with_states(ctx, slot).map(|_| self.whole(ctx, slot)).transpose()?;
        let chunks: Vec<Chunk> = in_cache.into_iter().chain(waiting).collect();
        let blob = self.form.blob(&pieces::of(&chunks, self.layout(), end), end, beside)?;
        // So that the rows lie from the first cell on, as in a slot that has computed them.
        clear(ctx, slot);
        state::import_whole(ctx, slot, &blob)?;
        if end_with_states(ctx, slot) == Some(end) {
            return Ok(());
        }
        clear(ctx, slot);
        Err(TransferError::NoStates { slot, position: end })
    }

    /// Cuts a slot back to its first `n_keep` tokens. The checkpoint was taken at that end, of this slot or of one that had the same
    /// tokens. Errors: the slot is empty.
    pub fn return_to(
        &mut self,
        ctx: &mut LlamaContext<'_>,
        slot: u32,
        n_keep: u32,
        checkpoint: &Bytes,
    ) -> Result<(), TransferError> {
        self.check_slot(slot)?;
        let returned = if end_with_states(ctx, slot).is_some_and(|end| n_keep <= end) {
            self.changes(slot);
            checkpoint::return_to(ctx, slot, n_keep, checkpoint).map_err(TransferError::from)
        } else if n_keep > 0 && n_keep <= self.end(ctx, slot) {
            CompressedForm::beside(checkpoint, n_keep).map_err(TransferError::from).and_then(|beside| {
                let (window, compressors) = (&beside.window_bytes, &beside.compressor_bytes);
                self.assemble(ctx, slot, n_keep, &Beside::Written { window, compressors })
            })
        } else {
            Err(TransferError::NoStates { slot, position: n_keep })
        };
        if returned.is_err() {
            self.changes(slot);
            clear(ctx, slot);
        }
        returned
    }

    /// Gives `slot` all that `source` has in the cache. Errors: `slot` is empty.
    pub fn copy(&mut self, ctx: &mut LlamaContext<'_>, source: u32, slot: u32) -> Result<(), TransferError> {
        self.check_slot(source)?;
        self.check_slot(slot)?;
        self.changes(slot);
        let buffer = self.exports.take().unwrap_or_else(|| ExportBuffer::new(self.gpu));
        let exported = self.exports.lend(state::export(ctx, source, SequencePart::Everything, buffer)?);
        clear(ctx, slot);
        state::import_copy(ctx, slot, &exported)?;
        Ok(())
    }

    /// Returns true if the next position, `n_present`, can be computed in a slot.
    pub fn can_continue(&self, ctx: &LlamaContext<'_>, slot: u32, n_present: u32) -> bool {
        !self.has_waiting(slot) && end_with_states(ctx, slot) == Some(n_present)
    }

    /// Returns true if chunks of a slot wait for their states.
    pub fn has_waiting(&self, slot: u32) -> bool {
        self.waiting.get(slot as usize).is_some_and(|waiting| !waiting.is_empty())
    }

    /// The first position of a slot that every layer has.
    pub fn oldest(&self, ctx: &LlamaContext<'_>, slot: u32) -> u32 {
        end_with_states(ctx, slot).unwrap_or(0).saturating_sub(self.form.window())
    }

    /// Call it before a slot is cut: chunks that wait continue what it had.
    pub fn changes(&mut self, slot: u32) {
        self.exported = None;
        if let Some(waiting) = self.waiting.get_mut(slot as usize) {
            waiting.clear();
        }
    }

    /// Call it before the whole cache is emptied.
    pub fn empty(&mut self) {
        (0..self.waiting.len()).for_each(|slot| self.changes(slot as u32));
    }

    fn check_slot(&self, slot: u32) -> Result<(), TransferError> {
        match self.waiting.len() as u32 {
            n_slots if slot < n_slots => Ok(()),
            n_slots => Err(TransferError::NoSuchSlot { slot, n_slots }),
        }
    }
}

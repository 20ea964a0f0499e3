//! Exports and imports KV of a running context, chunk by chunk.
//!
//! llama.cpp reads and writes only whole sequences. To export a chunk, a scratch sequence shares its cells and is
//! written out. To import one, it is read into the scratch sequence, and its slot then shares the cells. The scratch
//! sequence is empty between calls, because a sliding-window cache must reuse old cells, and cells of two sequences
//! cannot be reused.
//!
//! Recurrent layers have a state for each sequence instead of rows. Whatever range is shared, the newest state is shared with
//! it, which would be written out with every chunk. So the scratch sequence then shares the cells of a second one, which is
//! always empty: rows stay, and the state goes. An import does the same to its slot, so the slot gets its state at the end.
//!
//! The thread that owns the context calls this. The context's cache must be unified: llama.cpp aborts the process when
//! a part of a sequence is copied between separate caches.

use std::ops::Range;
use std::sync::Arc;

use baton_link::handoff::{BufferPool, ChunkBuffers};
use baton_schemas::kv::{Chunk, KvLayout, StatePart};
use bytes::Bytes;
use llama_cpp_2::context::LlamaContext;

use super::blob::form::BlobForm;
use super::blob::{self, BlobError, Partial};
use super::export_buffer::ExportBuffer;
use super::import_state::ImportState;
use super::placement::ImportBlob;
use super::positions::TokenPositions;
use super::state::{self, SequencePart, StateError};

/// Why a chunk was not exported or imported. The slot is unchanged, unless the import of its window failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransferError {
    /// llama.cpp did not export or import the state.
    #[error(transparent)]
    State(#[from] StateError),
    /// The slot does not hold exactly the requested positions, or its state does not fit the layout.
    #[error(transparent)]
    Blob(#[from] BlobError),
    /// There is no such slot.
    #[error("slot {slot} does not exist; the engine has {n_slots} slots")]
    NoSuchSlot { slot: u32, n_slots: u32 },
    /// The chunk was exported too late: the sliding-window cache has dropped rows that the position after it attends
    /// to.
    #[error("the sliding-window cache has forgotten the positions before {start}, of those up to {p1}")]
    Forgotten {
        /// The first position that is left.
        start: u32,
        /// End of the chunk.
        p1: u32,
    },
    /// The chunk or the states were made for a model with another KV cache.
    #[error("the KV has another layout than the context")]
    OtherLayout,
    /// The slot's states are missing, or are not those of its last position.
    #[error("slot {slot} has no states of its first {position} tokens")]
    NoStates { slot: u32, position: u32 },
    /// The chunk does not follow the slot's last position.
    #[error("positions {p0}..{p1} do not continue a slot that holds {n_present}")]
    NotAnExtension {
        /// The chunk's first position.
        p0: u32,
        /// Its end.
        p1: u32,
        /// Positions the slot holds.
        n_present: u32,
    },
}

/// Exports and imports the chunks of a context's slots.
#[derive(Clone)]
pub struct KvTransfer {
    form: Arc<BlobForm>,
    n_slots: u32,
    /// The GPU that exports are copied from.
    gpu: Option<usize>,
    exports: BufferPool<ExportBuffer>,
    /// For states on their way out and in. They are large, and new memory costs more time than the copy.
    states: BufferPool<Vec<u8>>,
    imports: ChunkBuffers,
    /// The positions of the tokens of the slot in work.
    at: TokenPositions,
}

impl KvTransfer {
    /// The transfer for a context whose sequences have blobs of this form. Its slots are the sequences `0..n_slots`; the scratch
    /// sequence is the next one, and in a model with states the one that is always empty follows. `gpu` is ggml's index of the
    /// device that holds the cache; `None`: the processor.
    pub(super) fn new(form: BlobForm, n_slots: u32, gpu: Option<usize>) -> Self {
        let (exports, states, imports) = (BufferPool::default(), BufferPool::default(), BufferPool::default());
        let at = TokenPositions::default();
        KvTransfer { form: Arc::new(form), n_slots, gpu, exports, states, imports, at }
    }

    /// The same transfer, for a slot whose tokens lie so. Ranges and ends are those of tokens all the same.
    pub(super) fn among(&self, at: &TokenPositions) -> KvTransfer {
        KvTransfer { at: at.clone(), ..self.clone() }
    }

    /// The pool of buffers for chunks that arrive.
    pub(super) fn imports(&self) -> &ChunkBuffers {
        &self.imports
    }

    /// The context's layout.
    pub fn layout(&self) -> &Arc<KvLayout> {
        self.form.layout()
    }

    /// The form of its sequences' blobs.
    pub fn form(&self) -> &Arc<BlobForm> {
        &self.form
    }

    /// Exports the KV of `positions` in a slot, as a part of a prompt that ends at `end`. Windowed rows that position
    /// `end` does not attend to may be missing.
    ///
    /// With a sliding window, call this before the next ubatch is computed: it may overwrite cells outside of its
    /// window.
    pub fn export(
        &self,
        ctx: &mut LlamaContext<'_>,
        slot: u32,
        positions: Range<u32>,
        end: u32,
    ) -> Result<Chunk, TransferError> {
        self.check_slot(slot)?;
        if positions.is_empty() || positions.end > i32::MAX.cast_unsigned() {
            return Err(BlobError::Positions(format!("{positions:?}")).into());
        }
        let layout = self.layout();
        if layout.sections.is_empty() && in_cache(ctx, slot).is_none_or(|n| n < self.at.after(positions.end)) {
            return Err(BlobError::Positions(format!("{positions:?}, without rows")).into());
        }
        let lent = self.at.range(&self.at.whole(&positions));
        self.lend(ctx, slot, self.scratch(), &lent);
        if !layout.states.is_empty() {
            self.lend(ctx, self.empty(), self.scratch(), &lent);
        }
        let buffer = self.exports.take().unwrap_or_else(|| ExportBuffer::new(self.gpu));
        let exported = state::export(ctx, self.scratch(), SequencePart::Everything, buffer);
        self.clear_scratch(ctx);
        let chunk = blob::chunk(&self.exports.lend(exported?), &self.form, positions, &self.at)?;
        for (rows, section) in chunk.sections.iter().zip(&layout.sections) {
            let latest = |window| first_in_window(end, window).clamp(chunk.p0, chunk.p1);
            if section.window.is_some_and(|window| rows.start > latest(window)) {
                return Err(TransferError::Forgotten { start: rows.start, p1: chunk.p1 });
            }
        }
        Ok(chunk)
    }

    /// Adds a blob's positions to a slot that holds `n_present` positions, which the blob must continue.
    ///
    /// A chunk may lack windowed rows that no position after the last chunk attends to. If that leaves a gap, the
    /// slot's windowed rows before the gap are dropped. llama.cpp, and callers that ask it for a slot's first position,
    /// assume that there are no gaps.
    ///
    /// A slot of a model with states has none afterwards, and must not compute before [`KvTransfer::import_state`].
    pub fn import(
        &self,
        ctx: &mut LlamaContext<'_>,
        slot: u32,
        n_present: u32,
        blob: &ImportBlob,
    ) -> Result<(), TransferError> {
        self.check_slot(slot)?;
        if blob.layout() != &**self.layout() {
            return Err(TransferError::OtherLayout);
        }
        self.check_continues(ctx, slot, n_present, blob)?;
        let leaves_gap = match blob.window_start() {
            Some(start) => self.window(ctx, slot)?.is_some_and(|window| start > window.end),
            None => false,
        };
        state::import(ctx, self.scratch(), blob)?;
        self.lend(ctx, self.scratch(), slot, &blob.at().range(&blob.positions()));
        self.clear_scratch(ctx);
        if leaves_gap {
            // This uses the cells that the slot frees, so there are enough. If it fails all the same, the slot is
            // empty.
            state::import_window(ctx, slot, blob)?;
        }
        Ok(())
    }

    /// Exports all states of a slot, which must end at `position`.
    pub fn export_state(&self, ctx: &LlamaContext<'_>, slot: u32, position: u32) -> Result<StatePart, TransferError> {
        self.check_slot(slot)?;
        let states = self.beside_rows(ctx, slot)?.states;
        let found = states.filter(|part| part.position == self.at.after(position));
        found.map(|part| StatePart { position, ..part }).ok_or(TransferError::NoStates { slot, position })
    }

    /// The states in a copy of what a slot has beside its rows.
    pub fn states_of(&self, checkpoint: &Bytes) -> Result<Option<StatePart>, TransferError> {
        Ok(blob::partial(checkpoint, &self.form)?.states)
    }

    /// Gives a slot its states. The slot ends at their position afterwards. Errors: the slot is empty if llama.cpp refused the
    /// states, or if its rows end before them.
    pub fn import_state(
        &self,
        ctx: &mut LlamaContext<'_>,
        slot: u32,
        states: &ImportState,
    ) -> Result<(), TransferError> {
        self.check_slot(slot)?;
        let (position, end) = (states.position(), self.at.after(states.position()));
        if states.layout() != &**self.layout() {
            return Err(TransferError::OtherLayout);
        }
        let missing = TransferError::NoStates { slot, position };
        let blob = {
            // Together with the states, llama.cpp replaces windowed rows.
            let before = self.beside_rows(ctx, slot)?.before_states;
            let buffer = self.states.take().unwrap_or_default();
            states.blob(&self.form, end, &before, buffer).ok_or(TransferError::OtherLayout)?
        };
        let imported = state::import_states(ctx, slot, &blob);
        self.states.put(blob.into_buffer());
        imported?;
        let removed = ctx.clear_kv_cache_seq(Some(slot), Some(end), None).unwrap_or(false);
        if removed && end_with_states(ctx, slot) == Some(end) {
            return Ok(());
        }
        clear(ctx, slot);
        Err(missing)
    }

    /// Returns true if the next position, `n_present`, can be computed in a slot: the states are those of its last position,
    /// and a sliding-window cache holds all rows that it attends to.
    pub fn can_continue(&self, ctx: &LlamaContext<'_>, slot: u32, n_present: u32) -> bool {
        let windows = self.layout().sections.iter().filter_map(|s| s.window);
        let has = |window| self.oldest(ctx, slot).is_some_and(|first| first <= first_in_window(n_present, window));
        let end = match self.layout().states.is_empty() {
            true => in_cache(ctx, slot),
            false => end_with_states(ctx, slot),
        };
        end == Some(self.at.after(n_present)) && windows.max().is_none_or(has)
    }

    /// The first position of a slot that every layer has. `None`: some layers have none.
    pub fn oldest(&self, ctx: &LlamaContext<'_>, slot: u32) -> Option<u32> {
        match self.has_window() {
            true => self.window(ctx, slot).ok().flatten().map(|window| window.start),
            false => Some(0),
        }
    }

    /// The positions of a slot's windowed rows.
    fn window(&self, ctx: &LlamaContext<'_>, slot: u32) -> Result<Option<Range<u32>>, TransferError> {
        if !self.layout().states.is_empty() {
            // llama.cpp tells only what rows and states have in common.
            return Ok(self.beside_rows(ctx, slot)?.window);
        }
        let first = u32::try_from(ctx.kv_cache_seq_pos_min(slot.cast_signed())).ok();
        Ok(first.zip(in_cache(ctx, slot)).map(|(first, end)| first..end))
    }

    /// Exports what a slot has beside the rows of all positions.
    fn beside_rows(&self, ctx: &LlamaContext<'_>, slot: u32) -> Result<Partial, TransferError> {
        let buffer = self.states.take().unwrap_or_default();
        let exported = state::export(ctx, slot, SequencePart::BesideRows, buffer)?;
        Ok(blob::partial(&self.states.lend(exported), &self.form)?)
    }

    fn has_window(&self) -> bool {
        self.layout().sections.iter().any(|section| section.window.is_some())
    }

    /// Checks that a blob continues a slot. With a sliding window, llama.cpp reports only the positions of the windowed
    /// section, which may have fewer; and without states, none at all. So `n_present` is trusted for the rows.
    fn check_continues(
        &self,
        ctx: &LlamaContext<'_>,
        slot: u32,
        n_present: u32,
        blob: &ImportBlob,
    ) -> Result<(), TransferError> {
        let Range { start: p0, end: p1 } = blob.positions();
        let n_cached = in_cache(ctx, slot);
        let hides_rows = if self.layout().states.is_empty() {
            self.has_window() && n_cached.unwrap_or(0) < n_present
        } else {
            n_cached.is_none()
        };
        if p0 == n_present && (hides_rows || n_cached.unwrap_or(0) == blob.at().after(n_present)) {
            return Ok(());
        }
        Err(TransferError::NotAnExtension { p0, p1, n_present })
    }

    fn check_slot(&self, slot: u32) -> Result<(), TransferError> {
        match slot < self.n_slots {
            true => Ok(()),
            false => Err(TransferError::NoSuchSlot { slot, n_slots: self.n_slots }),
        }
    }

    fn scratch(&self) -> u32 {
        self.n_slots
    }

    /// The sequence that is always empty, in a model with states.
    fn empty(&self) -> u32 {
        self.n_slots + 1
    }

    /// Shares the cells of `from` at `positions` with `to`, and the state, in place of the one that `to` had. No values are
    /// copied.
    fn lend(&self, ctx: &mut LlamaContext<'_>, from: u32, to: u32, positions: &Range<u32>) {
        let Range { start, end } = *positions;
        let lent = ctx.copy_kv_cache_seq(from.cast_signed(), to.cast_signed(), Some(start), Some(end));
        debug_assert!(lent.is_ok(), "the positions were checked to fit an i32");
    }

    fn clear_scratch(&self, ctx: &mut LlamaContext<'_>) {
        clear(ctx, self.scratch());
    }
}

/// Empties a sequence. Removing a whole one cannot fail.
pub(super) fn clear(ctx: &mut LlamaContext<'_>, seq: u32) {
    let cleared = ctx.clear_kv_cache_seq(Some(seq), None, None);
    debug_assert!(cleared.is_ok(), "sequence numbers fit an i32");
}

/// The first position that position `next` attends to.
fn first_in_window(next: u32, window: u32) -> u32 {
    // The window counts `next` itself.
    (next + 1).saturating_sub(window)
}

/// One past the last position that a sequence of a model with states holds. `None` if it has none, or if its rows and its
/// states end at different positions: after an import, they have none; after a fork of a range, those of the source's end.
pub(super) fn end_with_states(ctx: &LlamaContext<'_>, seq: u32) -> Option<u32> {
    // llama.cpp gives the smaller one of the last positions of rows and states, and the larger one of the first. States have one
    // position.
    let last = ctx.kv_cache_seq_pos_min(seq.cast_signed());
    in_cache(ctx, seq).filter(|end| u32::try_from(last).is_ok_and(|last| last + 1 == *end))
}

/// One past the last position that a slot holds. `None` if it is empty, or has rows without states.
fn in_cache(ctx: &LlamaContext<'_>, slot: u32) -> Option<u32> {
    u32::try_from(ctx.kv_cache_seq_pos_max(slot.cast_signed())).ok().map(|last| last + 1)
}

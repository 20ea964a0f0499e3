//! Exports and imports KV of a running context, chunk by chunk.
//!
//! llama.cpp reads and writes only whole sequences. To export a chunk, a scratch sequence shares its cells and is
//! written out. To import one, it is read into the scratch sequence, and its slot then shares the cells. The scratch
//! sequence is empty between calls, because a sliding-window cache must reuse old cells, and cells of two sequences
//! cannot be reused.
//!
//! The thread that owns the context calls this. The context's cache must be unified: llama.cpp aborts the process when
//! a part of a sequence is copied between separate caches.

use std::ops::Range;
use std::sync::Arc;

use baton_link::handoff::{BufferPool, ChunkBuffers};
use baton_schemas::kv::{Chunk, KvLayout};
use llama_cpp_2::context::LlamaContext;

use super::blob::{self, BlobError};
use super::export_buffer::ExportBuffer;
use super::placement::ImportBlob;
use super::state::{self, StateError};

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
    /// The chunk was made for a model with another KV cache.
    #[error("the chunk has another layout than the context")]
    OtherLayout,
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
    layout: Arc<KvLayout>,
    n_slots: u32,
    /// The GPU that exports are copied from.
    gpu: Option<usize>,
    exports: BufferPool<ExportBuffer>,
    imports: ChunkBuffers,
}

impl KvTransfer {
    /// The transfer for a context with this layout, whose slots are the sequences `0..n_slots` and whose scratch
    /// sequence is the next one. `gpu` is ggml's index of the device that holds the cache; `None`: the processor.
    pub(super) fn new(layout: KvLayout, n_slots: u32, gpu: Option<usize>) -> Self {
        let layout = Arc::new(layout);
        KvTransfer { layout, n_slots, gpu, exports: BufferPool::default(), imports: ChunkBuffers::default() }
    }

    /// The pool of buffers for chunks that arrive.
    pub(super) fn imports(&self) -> &ChunkBuffers {
        &self.imports
    }

    /// The context's layout.
    pub fn layout(&self) -> &Arc<KvLayout> {
        &self.layout
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
        self.lend(ctx, slot, self.scratch(), &positions);
        let buffer = self.exports.take().unwrap_or_else(|| ExportBuffer::new(self.gpu));
        let exported = state::export(ctx, self.scratch(), buffer);
        self.clear_scratch(ctx);
        let chunk = blob::chunk(&self.exports.lend(exported?), &self.layout, positions)?;
        for (rows, section) in chunk.sections.iter().zip(&self.layout.sections) {
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
    pub fn import(
        &self,
        ctx: &mut LlamaContext<'_>,
        slot: u32,
        n_present: u32,
        blob: &ImportBlob,
    ) -> Result<(), TransferError> {
        self.check_slot(slot)?;
        if *blob.layout() != *self.layout {
            return Err(TransferError::OtherLayout);
        }
        self.check_continues(ctx, slot, n_present, blob)?;
        let leaves_gap = match (in_cache(ctx, slot), blob.window_start()) {
            (Some(end), Some(start)) => start > end,
            _ => false,
        };
        state::import(ctx, self.scratch(), blob)?;
        self.lend(ctx, self.scratch(), slot, &blob.positions());
        self.clear_scratch(ctx);
        if leaves_gap {
            // This uses the cells that the slot frees, so there are enough. If it fails all the same, the slot is
            // empty.
            state::import_window(ctx, slot, blob)?;
        }
        Ok(())
    }

    /// Returns true if some layers have a sliding window.
    pub fn has_window(&self) -> bool {
        self.layout.sections.iter().any(|section| section.window.is_some())
    }

    /// Returns true if the next position, `n_present`, can be computed in a slot: a sliding-window cache holds all rows
    /// that it attends to.
    pub fn can_continue(&self, ctx: &LlamaContext<'_>, slot: u32, n_present: u32) -> bool {
        let Some(window) = self.layout.sections.iter().filter_map(|s| s.window).max() else {
            return in_cache(ctx, slot) == Some(n_present);
        };
        let first = u32::try_from(ctx.kv_cache_seq_pos_min(slot.cast_signed())).ok();
        let complete = first.is_some_and(|first| first <= first_in_window(n_present, window));
        complete && in_cache(ctx, slot) == Some(n_present)
    }

    /// Checks that a blob continues a slot. With a sliding window, llama.cpp reports only the positions of the windowed
    /// section, which may have fewer; so `n_present` is trusted for the full section.
    fn check_continues(
        &self,
        ctx: &LlamaContext<'_>,
        slot: u32,
        n_present: u32,
        blob: &ImportBlob,
    ) -> Result<(), TransferError> {
        let Range { start: p0, end: p1 } = blob.positions();
        let n_cached = in_cache(ctx, slot).unwrap_or(0);
        let has_window = self.layout.sections.iter().any(|s| s.window.is_some());
        if p0 == n_present && (n_cached == n_present || (has_window && n_cached < n_present)) {
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

    /// Shares the cells of `from` at `positions` with `to`. No values are copied.
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

/// One past the last position that a slot holds. `None` if it is empty.
fn in_cache(ctx: &LlamaContext<'_>, slot: u32) -> Option<u32> {
    u32::try_from(ctx.kv_cache_seq_pos_max(slot.cast_signed())).ok().map(|last| last + 1)
}

//! KV out of and into a running context, a chunk at a time.
//!
//! llama.cpp reads and writes whole sequences only. A chunk is therefore lent to a scratch sequence, which shares the
//! cells, and is written out from there; or is read into the scratch sequence and lent to its slot. The scratch
//! sequence is empty between calls: cells that two sequences hold cannot be used again, which a sliding-window cache
//! lives on.
//!
//! Called by the thread that owns the context. The context's cache must be unified: copying a part of a sequence
//! between separate caches aborts the process.

use std::ops::Range;
use std::sync::Arc;

use baton_schemas::kv::{Chunk, KvLayout};
use llama_cpp_2::context::LlamaContext;

use super::blob::{self, BlobError};
use super::placement::ImportBlob;
use super::state::{self, StateError};
use crate::handoff::ChunkBuffers;

/// Why a chunk was not exported or imported. The slot is as it was before.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransferError {
    /// llama.cpp refused.
    #[error(transparent)]
    State(#[from] StateError),
    /// The slot does not hold the positions asked for, or they are not what the layout says.
    #[error(transparent)]
    Blob(#[from] BlobError),
    /// There is no such slot.
    #[error("there is no slot {slot}: there are {n_slots}")]
    NoSuchSlot {
        /// As asked for.
        slot: u32,
        /// Slots of the context.
        n_slots: u32,
    },
    /// A sliding-window cache no longer has what the position after the chunk looks back at: it was exported too late.
    #[error("the sliding-window cache has forgotten the positions before {start}, of those up to {p1}")]
    Forgotten {
        /// First position that is left.
        start: u32,
        /// End of the chunk.
        p1: u32,
    },
    /// The chunk was made for a model with another KV cache.
    #[error("the chunk has another layout than the context")]
    OtherLayout,
    /// The chunk does not continue what the slot holds.
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

/// Moves chunks between a context's slots and the outside.
#[derive(Debug, Clone)]
pub struct KvTransfer {
    layout: Arc<KvLayout>,
    n_slots: u32,
    buffers: ChunkBuffers,
}

impl KvTransfer {
    /// For a context of the given layout with the sequences `0..n_slots` for slots and the next one for scratch.
    pub(super) fn new(layout: KvLayout, n_slots: u32) -> Self {
        KvTransfer { layout: Arc::new(layout), n_slots, buffers: ChunkBuffers::default() }
    }

    /// Memory of chunks that were moved.
    pub(super) fn buffers(&self) -> &ChunkBuffers {
        &self.buffers
    }

    /// The context's layout.
    pub fn layout(&self) -> &Arc<KvLayout> {
        &self.layout
    }

    /// The KV of `positions` in a slot, as a part of what goes up to `end`. Rows that position `end` does not look back
    /// at may be missing.
    ///
    /// With a sliding window this must be called before the next ubatch is computed, which may overwrite cells that lie
    /// outside the window from there.
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
        let exported = state::export(ctx, self.scratch(), self.buffers.take());
        self.clear_scratch(ctx);
        let chunk = blob::chunk(&self.buffers.lend(exported?), &self.layout, positions)?;
        for (rows, section) in chunk.sections.iter().zip(&self.layout.sections) {
            let latest = |window| first_in_window(end, window).clamp(chunk.p0, chunk.p1);
            if section.window.is_some_and(|window| rows.start > latest(window)) {
                return Err(TransferError::Forgotten { start: rows.start, p1: chunk.p1 });
            }
        }
        Ok(chunk)
    }

    /// Adds a blob's positions to a slot that holds `n_present` so far, which it must continue.
    ///
    /// A chunk may lack windowed rows that nothing after the last chunk looks back at. Where that leaves a gap, the
    /// slot's windowed rows before it are dropped: llama.cpp, and whoever asks it for a slot's first position, take
    /// them to be without gaps.
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
            // It takes cells that the slot gives up, so that it cannot lack any. If it fails all the same, the slot is
            // empty afterwards.
            state::import_window(ctx, slot, blob)?;
        }
        Ok(())
    }

    /// Whether some layers look back at a window only.
    pub fn has_window(&self) -> bool {
        self.layout.sections.iter().any(|section| section.window.is_some())
    }

    /// Whether position `n_present`, the next one, can be computed in a slot: whether a sliding-window cache holds all
    /// that it looks back at.
    pub fn can_continue(&self, ctx: &LlamaContext<'_>, slot: u32, n_present: u32) -> bool {
        let Some(window) = self.layout.sections.iter().filter_map(|s| s.window).max() else {
            return in_cache(ctx, slot) == Some(n_present);
        };
        let first = u32::try_from(ctx.kv_cache_seq_pos_min(slot.cast_signed())).ok();
        let complete = first.is_some_and(|first| first <= first_in_window(n_present, window));
        complete && in_cache(ctx, slot) == Some(n_present)
    }

    /// llama.cpp tells the positions of the windowed section alone, if there is one, and that may lag behind; so
    /// `n_present` is the caller's word for the full one.
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

    /// Lets `to` hold the cells that `from` has at `positions`. No values are copied.
    fn lend(&self, ctx: &mut LlamaContext<'_>, from: u32, to: u32, positions: &Range<u32>) {
        let (start, end) = (Some(positions.start), Some(positions.end));
        let lent = ctx.copy_kv_cache_seq(from.cast_signed(), to.cast_signed(), start, end);
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

/// First position that position `next` looks back at.
fn first_in_window(next: u32, window: u32) -> u32 {
    // The window counts `next` itself.
    (next + 1).saturating_sub(window)
}

/// End of what a slot holds, or `None` if it is empty.
fn in_cache(ctx: &LlamaContext<'_>, slot: u32) -> Option<u32> {
    u32::try_from(ctx.kv_cache_seq_pos_max(slot.cast_signed())).ok().map(|last| last + 1)
}

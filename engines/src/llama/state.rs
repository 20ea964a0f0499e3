//! Exports and imports a sequence's state. The only file with `unsafe` code.
//!
//! Only [`super::transfer`] and [`super::probe`] call it; they know which sequences a context has.
#![allow(unsafe_code)]

use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::session::LlamaStateSeqFlags;

use super::placement::ImportBlob;

/// The most sequences of a llama.cpp context (its `LLAMA_MAX_SEQ`). It aborts the process on a larger id.
const MAX_SEQUENCES: u32 = 256;

/// Why llama.cpp did not export or import a state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// No context has this sequence.
    #[error("there is no sequence {0}")]
    NoSuchSequence(u32),
    /// The state cannot be written out.
    #[error("llama.cpp wrote {found} of {expected} bytes of a sequence's state")]
    Export {
        /// The bytes that it had announced.
        expected: usize,
        /// The bytes that it wrote.
        found: usize,
    },
    /// The state was refused, usually because no cells are free.
    #[error("llama.cpp did not import a sequence state, usually for lack of free cells")]
    Import,
}

/// Writes the state of `seq` into `buffer`, which is cleared, grown as needed, and returned.
pub(super) fn export(ctx: &LlamaContext<'_>, seq: u32, mut buffer: Vec<u8>) -> Result<Vec<u8>, StateError> {
    let seq_id = checked(seq)?;
    // Not the on-device flag: with it llama.cpp may abort the process.
    let flags = LlamaStateSeqFlags::empty();
    let expected = ctx.state_seq_get_size_ext(seq_id, flags);
    // Fills only the part that the buffer did not have before.
    buffer.resize(expected, 0);
    // SAFETY: `buffer` has `expected` bytes, the size that llama.cpp has just returned for this sequence. The context
    // cannot change in between: it is borrowed and not `Sync`, so no other thread can decode with it.
    let found = unsafe { ctx.state_seq_get_data_ext(buffer.as_mut_ptr(), seq_id, flags) };
    if found == 0 || found != expected {
        return Err(StateError::Export { expected, found });
    }
    Ok(buffer)
}

/// Replaces the state of `seq`. If it fails, `seq` is empty.
pub(super) fn import(ctx: &mut LlamaContext<'_>, seq: u32, blob: &ImportBlob) -> Result<(), StateError> {
    set(ctx, seq, blob.bytes(), LlamaStateSeqFlags::empty())
}

/// Replaces the state of `seq` in the sliding-window cache only. The blob must hold windowed rows. If it fails, `seq`
/// is empty in both caches.
pub(super) fn import_window(ctx: &mut LlamaContext<'_>, seq: u32, blob: &ImportBlob) -> Result<(), StateError> {
    set(ctx, seq, &blob.last_section(), LlamaStateSeqFlags::PARTIAL_ONLY)
}

/// Imports `bytes`, which come from an [`ImportBlob`].
fn set(ctx: &mut LlamaContext<'_>, seq: u32, bytes: &[u8], flags: LlamaStateSeqFlags) -> Result<(), StateError> {
    let seq_id = checked(seq)?;
    // SAFETY: the slice is valid for its length, and llama.cpp checks each read against it. It does not check that
    // there is a cell, that positions are consecutive, and that nothing follows the last row; an `ImportBlob`
    // guarantees these.
    let taken = unsafe { ctx.state_seq_set_data_ext(bytes, seq_id, flags) };
    if taken {
        return Ok(());
    }
    // Remove what llama.cpp had read before it failed.
    let removed = ctx.clear_kv_cache_seq(Some(seq), None, None);
    debug_assert!(removed.is_ok(), "a checked sequence fits an i32");
    Err(StateError::Import)
}

fn checked(seq: u32) -> Result<i32, StateError> {
    match seq {
        seq if seq < MAX_SEQUENCES => Ok(seq.cast_signed()),
        seq => Err(StateError::NoSuchSequence(seq)),
    }
}

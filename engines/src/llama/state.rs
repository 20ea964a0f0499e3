//! A sequence's state out of and into a llama.cpp context. The one file with `unsafe` in it.
//!
//! Called by [`super::transfer`] alone, which knows which sequences a context has.
#![allow(unsafe_code)]

use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::session::LlamaStateSeqFlags;

use super::placement::ImportBlob;

/// Sequences any llama.cpp context may have (its `LLAMA_MAX_SEQ`). It aborts the process beyond.
const MAX_SEQUENCES: u32 = 256;

/// What llama.cpp did not do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// A sequence number that no context has.
    #[error("there is no sequence {0}")]
    NoSuchSequence(u32),
    /// The state cannot be written out.
    #[error("llama.cpp wrote {found} of {expected} bytes of a sequence's state")]
    Export {
        /// What it had announced.
        expected: usize,
        /// What it wrote.
        found: usize,
    },
    /// The state was refused: no cells are free, as a rule.
    #[error("llama.cpp did not take a sequence state; as a rule it has no free cells")]
    Import,
}

/// Writes the state of `seq` into `buffer`, which is cleared, grown as needed, and returned.
pub(super) fn export(ctx: &LlamaContext<'_>, seq: u32, mut buffer: Vec<u8>) -> Result<Vec<u8>, StateError> {
    let seq_id = checked(seq)?;
    // Never the on-device flag: with it llama.cpp aborts the process if it lacks something.
    let flags = LlamaStateSeqFlags::empty();
    let expected = ctx.state_seq_get_size_ext(seq_id, flags);
    // Room that was there before is not written twice.
    buffer.resize(expected, 0);
    // SAFETY: `buffer` has the `expected` bytes that llama.cpp has just said it writes for this sequence. The context
    // cannot change in between: it is borrowed and not `Sync`, so that no other thread decodes with it.
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

/// Replaces what `seq` has in the sliding-window cache, and leaves the full one alone. The blob must hold windowed
/// rows. If it fails, `seq` is empty in both.
pub(super) fn import_window(ctx: &mut LlamaContext<'_>, seq: u32, blob: &ImportBlob) -> Result<(), StateError> {
    set(ctx, seq, &blob.last_section(), LlamaStateSeqFlags::PARTIAL_ONLY)
}

/// `bytes` are those of an [`ImportBlob`].
fn set(ctx: &mut LlamaContext<'_>, seq: u32, bytes: &[u8], flags: LlamaStateSeqFlags) -> Result<(), StateError> {
    let seq_id = checked(seq)?;
    // SAFETY: the slice is valid for its length and llama.cpp checks each read against it. What it does not check, an
    // `ImportBlob` guarantees: at least one cell, consecutive positions, nothing behind the last row.
    let taken = unsafe { ctx.state_seq_set_data_ext(bytes, seq_id, flags) };
    if taken {
        return Ok(());
    }
    // What it had read before it failed is still there, in the first section if not in the second.
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

//! Exports and imports a sequence's state, and allocates the memory for exports. With `unsafe` code, like
//! [`super::state_tap`], [`super::queries`] and [`super::rpc`].
//!
//! Only [`super::transfer`] and [`super::probe`] transfer states; they know which sequences a context has.
#![allow(unsafe_code)]

use std::ptr::NonNull;

use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::context::session::LlamaStateSeqFlags;
use llama_cpp_sys_2 as sys;

use super::compressed::WholeBlob;
use super::import_state::StateBlob;
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
    /// The sequence is empty, or its recurrent layers have no states.
    #[error("sequence {0} has no states of recurrent layers")]
    NoStates(u32),
    /// The state was refused, usually because no cells are free.
    #[error("llama.cpp did not import a sequence state, usually for lack of free cells")]
    Import,
}

/// The part of a sequence that is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SequencePart {
    Everything,
    /// Everything but the rows of all positions: windowed rows, and states of recurrent layers. In a model with neither,
    /// everything.
    BesideRows,
}

impl SequencePart {
    fn flags(self) -> LlamaStateSeqFlags {
        match self {
            // Not the on-device flag: with it llama.cpp may abort the process.
            SequencePart::Everything => LlamaStateSeqFlags::empty(),
            SequencePart::BesideRows => LlamaStateSeqFlags::PARTIAL_ONLY,
        }
    }
}

/// Memory that a state is written into.
pub(super) trait StateBuffer {
    /// Makes it `n_bytes` long, with any content.
    fn resize(&mut self, n_bytes: usize) -> &mut [u8];
}

impl StateBuffer for Vec<u8> {
    fn resize(&mut self, n_bytes: usize) -> &mut [u8] {
        match n_bytes > self.capacity() {
            // The system's zeros need not be written.
            true => *self = vec![0; n_bytes],
            false => Vec::resize(self, n_bytes, 0),
        }
        self
    }
}

/// Writes a part of the state of `seq` into `buffer`, which is grown as needed, and returned.
pub(super) fn export<B: StateBuffer>(
    ctx: &LlamaContext<'_>,
    seq: u32,
    part: SequencePart,
    mut buffer: B,
) -> Result<B, StateError> {
    let seq_id = checked(seq)?;
    let flags = part.flags();
    let expected = ctx.state_seq_get_size_ext(seq_id, flags);
    let bytes = buffer.resize(expected);
    // SAFETY: `bytes` has `expected` bytes, the size that llama.cpp has just returned for this sequence. The context
    // cannot change in between: it is borrowed and not `Sync`, so no other thread can decode with it.
    let found = unsafe { ctx.state_seq_get_data_ext(bytes.as_mut_ptr(), seq_id, flags) };
    if found == 0 || found != expected {
        return Err(StateError::Export { expected, found });
    }
    Ok(buffer)
}

/// Replaces the state of `seq`. If it fails, `seq` is empty.
pub(super) fn import(ctx: &mut LlamaContext<'_>, seq: u32, blob: &ImportBlob) -> Result<(), StateError> {
    set(ctx, seq, blob.bytes(), SequencePart::Everything)
}

/// Replaces the state of `seq` in the sliding-window cache only. The blob must hold windowed rows. If it fails, `seq`
/// is empty in both caches.
pub(super) fn import_window(ctx: &mut LlamaContext<'_>, seq: u32, blob: &ImportBlob) -> Result<(), StateError> {
    set(ctx, seq, &blob.windowed(), SequencePart::BesideRows)
}

/// Replaces the states of `seq`. If it fails, `seq` is empty.
pub(super) fn import_states(ctx: &mut LlamaContext<'_>, seq: u32, blob: &StateBlob) -> Result<(), StateError> {
    set(ctx, seq, blob.bytes(), SequencePart::BesideRows)
}

/// Replaces the states and the windowed rows of `seq` by those that [`export`] wrote in this context. If it fails, `seq` is
/// empty.
pub(super) fn import_checkpoint(ctx: &mut LlamaContext<'_>, seq: u32, checkpoint: &[u8]) -> Result<(), StateError> {
    set(ctx, seq, checkpoint, SequencePart::BesideRows)
}

/// Replaces the state of `seq`, in a cache of its own. If it fails, `seq` is empty.
pub(super) fn import_whole(ctx: &mut LlamaContext<'_>, seq: u32, blob: &WholeBlob) -> Result<(), StateError> {
    set(ctx, seq, blob.bytes(), SequencePart::Everything)
}

/// Replaces the state of `seq` by all of another one that [`export`] wrote in this context. If it fails, `seq` is empty.
pub(super) fn import_copy(ctx: &mut LlamaContext<'_>, seq: u32, whole: &[u8]) -> Result<(), StateError> {
    set(ctx, seq, whole, SequencePart::Everything)
}

/// Imports `bytes`, which come from an [`ImportBlob`], a [`StateBlob`], a [`WholeBlob`] or this context's [`export`].
fn set(ctx: &mut LlamaContext<'_>, seq: u32, bytes: &[u8], part: SequencePart) -> Result<(), StateError> {
    let seq_id = checked(seq)?;
    // SAFETY: the slice is valid for its length, and llama.cpp checks each read against it. It does not check that
    // there is a cell, and one only for states, that positions are consecutive, and that nothing follows the last row; the
    // four kinds of bytes guarantee these.
    let taken = unsafe { ctx.state_seq_set_data_ext(bytes, seq_id, part.flags()) };
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

/// Memory of this process that a GPU reads and writes by itself ("pinned"). It is freed when this is dropped.
pub(super) struct PinnedMemory {
    buffer: NonNull<sys::ggml_backend_buffer>,
    bytes: NonNull<[u8]>,
}

// SAFETY: the memory belongs to this value alone, is read and written only through its methods, and ggml's buffers of it
// can be freed on any thread.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above; a shared reference only reads.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Allocates `n_bytes`, at least one, for ggml's device with this index. `None`: it has no such memory, or not so much.
    pub(super) fn allocate(device: usize, n_bytes: usize) -> Option<PinnedMemory> {
        // SAFETY: the count is asked first, and devices are never removed. What may be null is checked; the other arguments
        // are what ggml has just returned. A buffer of at least one byte has a base that is not null, which ggml asserts.
        let (buffer, is_pinned, base, size) = unsafe {
            if n_bytes == 0 || device >= sys::ggml_backend_dev_count() {
                return None;
            }
            let kind = NonNull::new(sys::ggml_backend_dev_host_buffer_type(sys::ggml_backend_dev_get(device)))?;
            let buffer = NonNull::new(sys::ggml_backend_buft_alloc_buffer(kind.as_ptr(), n_bytes))?;
            let is_pinned = sys::ggml_backend_buffer_get_type(buffer.as_ptr()) == kind.as_ptr();
            let base = sys::ggml_backend_buffer_get_base(buffer.as_ptr()).cast::<u8>();
            (buffer, is_pinned, base, sys::ggml_backend_buffer_get_size(buffer.as_ptr()))
        };
        let Some(base) = NonNull::new(base).filter(|_| is_pinned && size >= n_bytes) else {
            // Where pinned memory is short, ggml allocates common memory instead.
            // SAFETY: ggml has just returned the buffer, and nothing refers to it.
            unsafe { sys::ggml_backend_buffer_free(buffer.as_ptr()) };
            return None;
        };
        // SAFETY: ggml allocated at least `n_bytes` at `base`, which nothing else refers to. Uninitialised memory must not
        // be read, so it is zeroed.
        unsafe { base.as_ptr().write_bytes(0, n_bytes) };
        Some(PinnedMemory { buffer, bytes: NonNull::slice_from_raw_parts(base, n_bytes) })
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: `allocate` made a valid slice of it, which lives as long as this value.
        unsafe { self.bytes.as_ref() }
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; this value is borrowed mutably.
        unsafe { self.bytes.as_mut() }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        // SAFETY: the buffer was returned by ggml, and this is the only place that frees it.
        unsafe { sys::ggml_backend_buffer_free(self.buffer.as_ptr()) };
    }
}

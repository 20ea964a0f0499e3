//! Returns a sequence to an earlier end, where its recurrent layers cannot follow by themselves.
//!
//! Rows of positions can be removed; a state is the result of all tokens before it. So a copy of the states, and of windowed
//! rows, is kept for the ends that a conversation may return to. Only the context that wrote a copy reads it.

use bytes::Bytes;
use llama_cpp_2::context::LlamaContext;

use super::state::{self, SequencePart, StateError};
use super::transfer::{clear, end_with_states};

/// Copies what `seq` needs beside its rows to return to its present end. Errors: it has no states of its last position.
pub fn take(ctx: &LlamaContext<'_>, seq: u32) -> Result<Bytes, StateError> {
    match end_with_states(ctx, seq) {
        Some(_) => Ok(state::export(ctx, seq, SequencePart::BesideRows, Vec::new())?.into()),
        None => Err(StateError::NoStates(seq)),
    }
}

/// Cuts `seq` back to its first `n_keep` tokens. The checkpoint was taken at that end, of this sequence or of one that had the
/// same tokens. Errors: the sequence is empty.
pub fn return_to(ctx: &mut LlamaContext<'_>, seq: u32, n_keep: u32, checkpoint: &Bytes) -> Result<(), StateError> {
    // In this order: llama.cpp refuses to remove positions that the states have seen.
    state::import_checkpoint(ctx, seq, checkpoint)?;
    let removed = ctx.clear_kv_cache_seq(Some(seq), Some(n_keep), None).unwrap_or(false);
    // Rows and states end at one position only if the checkpoint was taken there.
    if n_keep > 0 && removed && end_with_states(ctx, seq) == Some(n_keep) {
        return Ok(());
    }
    clear(ctx, seq);
    Err(StateError::Import)
}

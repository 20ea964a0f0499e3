//! The KV of a fixed text, by which two engines are compared. See [`baton_link::handoff::canary`].

use baton_schemas::Token;
use baton_schemas::kv::Chunk;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::LlamaModel;

use super::probe::NoHandoff;
use super::transfer::{self, KvTransfer};
use super::vocabulary::{token, tokenize};
use crate::serving::start::{CANARY, canary_tokens};

/// The canary's tokens, at most `limit`.
pub(super) fn tokens(model: &LlamaModel, limit: usize) -> Vec<Token> {
    let n_vocab = u32::try_from(model.n_vocab()).unwrap_or(1);
    canary_tokens(tokenize(model, CANARY, true, false), n_vocab, limit)
}

/// Computes the canary's KV in the first slot of an empty context, and empties the context again.
pub(super) fn compute(ctx: &mut LlamaContext<'_>, transfer: &KvTransfer, tokens: &[Token]) -> Result<Chunk, NoHandoff> {
    let failed = |e: &dyn std::fmt::Display| NoHandoff::Decode(e.to_string());
    let mut batch = LlamaBatch::new(tokens.len(), 1);
    for (position, &t) in (0..).zip(tokens) {
        batch.add(token(t), position, &[0], false).map_err(|e| failed(&e))?;
    }
    let end = tokens.len() as u32;
    let decoded = ctx.decode(&mut batch).map_err(|e| failed(&e));
    let chunk = decoded.and_then(|()| transfer.export(ctx, 0, 0..end, end).map_err(|e| failed(&e)));
    transfer::clear(ctx, 0);
    chunk
}

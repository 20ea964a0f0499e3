//! The KV of a fixed text, by which two engines are compared. See [`crate::handoff::canary`].

use baton_schemas::Token;
use baton_schemas::kv::Chunk;
use llama_cpp_2::context::LlamaContext;
use llama_cpp_2::llama_batch::LlamaBatch;
use llama_cpp_2::model::LlamaModel;

use super::probe::NoHandoff;
use super::transfer::{self, KvTransfer};
use super::vocabulary::{token, tokenize};

/// Prose with numbers and punctuation, for tokens of many kinds.
const TEXT: &str = "In 1851 the cable between Dover and Calais carried its first message; by 1866 another one, 3,000 km long, \
    joined Ireland to Newfoundland. \"What hath been done,\" a clerk wrote, \"cannot be undone: two cities, one clock.\"";

/// The most tokens of the canary: every layer attends over several positions, and the cost is negligible.
const MAX_TOKENS: usize = 48;

/// The canary's tokens, at most `limit`. They depend on the vocabulary alone, so that two nodes agree on them.
pub(super) fn tokens(model: &LlamaModel, limit: usize) -> Vec<Token> {
    let mut tokens = tokenize(model, TEXT, true, false);
    if tokens.is_empty() {
        // A model without a tokenizer still has embeddings.
        let n_vocab = u32::try_from(model.n_vocab()).unwrap_or(1).max(1);
        tokens = (0..MAX_TOKENS as u32).map(|i| i % n_vocab).collect();
    }
    tokens.truncate(MAX_TOKENS.min(limit));
    tokens
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

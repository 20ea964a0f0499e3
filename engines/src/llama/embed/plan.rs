//! What kind of vectors a model gives, and in which batches they are computed.

use baton_schemas::embed::{EmbeddingFacts, Pooling};
use llama_cpp_2::model::LlamaModel;

use super::super::config::LlamaConfig;
use crate::gguf::Gguf;

/// Texts of one step. More would only make the attention mask sparser.
pub(crate) const MAX_SEQUENCES: u32 = 16;

/// llama.cpp's numbers of `pooling_type`.
const MEAN: u64 = 1;
const CLS: u64 = 2;
const LAST: u64 = 3;
const RANK: u64 = 4;

/// Tokens of a text that has to be computed in one piece. A piece is one physical batch, whose buffers grow with it:
/// llama.cpp sets logits aside for each token, on a large vocabulary a megabyte.
const MAX_WHOLE: u32 = 2_048;

/// Tokens of a text that can be computed piece by piece: what OpenAI's models take, and 1 GiB of KV on an 8B model.
const MAX_DIVISIBLE: u32 = 8_192;

/// How a model's vectors are computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EmbedPlan {
    /// What is told to others.
    pub(crate) facts: EmbeddingFacts,
    /// Tokens of one physical batch.
    pub(crate) n_ubatch: u32,
    /// A text may be computed piece by piece: no token sees those after it, and the last one's state is all that counts.
    pub(crate) is_divisible: bool,
}

/// The plan for a model with `n_ctx` tokens of context; `None` for one that gives no vectors: rerankers judge pairs of
/// texts, and T5's encoder is another half than the one that is driven here.
///
/// A file that names no pooling is of a model that was not trained for this. A causal one is then pooled at its last
/// token, the only one that has seen the whole text, as Ollama does; an encoder by its mean.
pub(crate) fn plan(gguf: &Gguf, model: &LlamaModel, config: &LlamaConfig, n_ctx: u32) -> Option<EmbedPlan> {
    let is_causal = gguf.generates();
    let pooling = match gguf.pooling_type() {
        Some(MEAN) => Pooling::Mean,
        Some(CLS) => Pooling::Cls,
        Some(LAST) => Pooling::Last,
        Some(RANK) => return None,
        _ if is_causal => Pooling::Last,
        _ => Pooling::Mean,
    };
    if gguf.architecture().is_some_and(|name| name.starts_with("t5")) {
        return None;
    }
    let is_trained = matches!(gguf.pooling_type(), Some(MEAN | CLS | LAST));
    let n_embd = u32::try_from(model.n_embd_out()).ok().filter(|&n| n > 0)?;
    let is_divisible = is_causal && pooling == Pooling::Last;
    // Learned positions end where training ended: llama.cpp would read behind their table.
    let n_ctx = n_ctx.min(model.n_ctx_train().max(1)).min(if is_divisible { MAX_DIVISIBLE } else { MAX_WHOLE });
    let n_ubatch = if is_divisible { config.n_ubatch.min(n_ctx) } else { n_ctx };
    Some(EmbedPlan { facts: EmbeddingFacts { n_embd, n_ctx, pooling, is_trained }, n_ubatch, is_divisible })
}

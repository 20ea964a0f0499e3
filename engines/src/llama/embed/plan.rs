//! Chooses a model's pooling and the batches in which its vectors are computed.

use baton_schemas::embed::{EmbeddingFacts, Pooling};
use llama_cpp_2::model::LlamaModel;

use super::super::config::LlamaConfig;
use crate::gguf::Gguf;

/// The most texts in a step. More would only make the attention mask sparser.
pub(crate) const MAX_SEQUENCES: u32 = 16;

/// llama.cpp's numbers of `pooling_type`.
const MEAN: u64 = 1;
const CLS: u64 = 2;
const LAST: u64 = 3;
const RANK: u64 = 4;

/// The most tokens of a text that must be computed in one physical batch. The batch's buffers grow with it: llama.cpp
/// reserves logits for each token, a megabyte on a large vocabulary.
const MAX_WHOLE: u32 = 2_048;

/// The most tokens of a text that can be computed piece by piece: the limit of OpenAI's models, and 1 GiB of KV on an
/// 8B model.
const MAX_DIVISIBLE: u32 = 8_192;

/// How a model's vectors are computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EmbedPlan {
    /// The facts in the node's description.
    pub(crate) facts: EmbeddingFacts,
    /// Tokens of one physical batch.
    pub(crate) n_ubatch: u32,
    /// A text may be computed piece by piece: no token attends to later ones, and only the last token's state counts.
    pub(crate) is_divisible: bool,
}

/// The plan for a model with `n_ctx` tokens of context. `None` for models that give no vectors: rerankers, which judge
/// pairs of texts, and T5, whose encoder this engine does not run.
///
/// A file that names no pooling holds a model that was not trained for embeddings. Like Ollama, this pools a causal
/// model at its last token, the only one that attends to the whole text, and an encoder by its mean.
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
    // A table of learned positions ends where training ended; llama.cpp would read beyond it.
    let n_ctx = n_ctx.min(model.n_ctx_train().max(1)).min(if is_divisible { MAX_DIVISIBLE } else { MAX_WHOLE });
    let n_ubatch = if is_divisible { config.n_ubatch.min(n_ctx) } else { n_ctx };
    Some(EmbedPlan { facts: EmbeddingFacts { n_embd, n_ctx, pooling, is_trained }, n_ubatch, is_divisible })
}

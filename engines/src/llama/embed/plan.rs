//! Chooses a model's pooling and the batches in which its vectors, or its scores, are computed.

use baton_model::gguf::{CELL_ALIGNMENT, Gguf, Sequences};
use baton_model::options::CacheTypes;
use baton_schemas::EngineError;
use baton_schemas::embed::{EmbeddingFacts, Pooling, RerankFacts};
use llama_cpp_2::model::LlamaModel;

use crate::embed::{normalised, score};

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

/// What a model computes of a text.
#[derive(Debug, Clone, Copy)]
pub(crate) enum EmbedOutput {
    Vector {
        n_embd: u32,
        pooling: Pooling,
        is_trained: bool,
    },
    /// How well a document answers a query.
    Score,
}

impl EmbedOutput {
    /// A text's result, from llama.cpp's values. Errors: they are not finite.
    pub(super) fn read(self, values: &[f32]) -> Result<Vec<f32>, EngineError> {
        match self {
            EmbedOutput::Vector { .. } => normalised(values),
            EmbedOutput::Score => score(values),
        }
    }
}

/// How a model's vectors or scores are computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EmbedPlan {
    pub(crate) output: EmbedOutput,
    /// The most tokens of a text.
    pub(crate) n_ctx: u32,
    /// Tokens of one physical batch.
    pub(crate) n_ubatch: u32,
    /// A text may be computed piece by piece: no token attends to later ones, and only the last token's state counts.
    pub(crate) is_divisible: bool,
}

impl EmbedPlan {
    /// Cells of the context's cache.
    pub(crate) fn n_cells(&self) -> u32 {
        self.n_ctx.next_multiple_of(CELL_ALIGNMENT)
    }

    /// Bytes of the context's KV, in the default types, and of its states. Encoders have none.
    pub(crate) fn kv_bytes(&self, gguf: &Gguf) -> u64 {
        let sequences = Sequences { n: MAX_SEQUENCES, n_ubatch: Some(self.n_ubatch), n_rollback: 0 };
        let shape = gguf.kv_shape().filter(|_| gguf.generates());
        shape.map_or(0, |shape| shape.n_bytes(CacheTypes::default(), self.n_cells(), sequences))
    }

    /// The facts about vectors in the node's description.
    pub(crate) fn embedding(&self) -> Option<EmbeddingFacts> {
        let EmbedOutput::Vector { n_embd, pooling, is_trained } = self.output else { return None };
        Some(EmbeddingFacts { n_embd, n_ctx: self.n_ctx, pooling, is_trained })
    }

    /// The facts about scores in the node's description.
    pub(crate) fn reranking(&self) -> Option<RerankFacts> {
        matches!(self.output, EmbedOutput::Score).then_some(RerankFacts { n_ctx: self.n_ctx })
    }
}

/// The plan for a model with `n_ctx` tokens of context and physical batches of `n_ubatch`. `None` for models that give neither vectors nor scores: rerankers
/// without a classifier, and T5, whose encoder this engine does not run.
///
/// A file that names no pooling holds a model that was not trained for embeddings. Like Ollama, this pools a causal
/// model at its last token, the only one that attends to the whole text, and an encoder by its mean.
pub(crate) fn plan(gguf: &Gguf, model: &LlamaModel, n_ubatch: u32, n_ctx: u32) -> Option<EmbedPlan> {
    let is_causal = gguf.generates();
    let n_embd = u32::try_from(model.n_embd_out()).ok().filter(|&n| n > 0)?;
    let vector = |pooling, is_trained| EmbedOutput::Vector { n_embd, pooling, is_trained };
    // With another number of values for each text, llama.cpp would read those of other texts.
    let classifies = gguf.classes() == Some(model.n_cls_out().into());
    let output = match gguf.pooling_type() {
        Some(MEAN) => vector(Pooling::Mean, true),
        Some(CLS) => vector(Pooling::Cls, true),
        Some(LAST) => vector(Pooling::Last, true),
        // Older files of rerankers name no pooling.
        Some(RANK) | None if classifies => EmbedOutput::Score,
        Some(RANK) => return None,
        _ if is_causal => vector(Pooling::Last, false),
        _ => vector(Pooling::Mean, false),
    };
    if gguf.architecture().is_some_and(|name| name.starts_with("t5")) {
        return None;
    }
    // A causal reranker judges by the last token's state, too.
    let is_last = matches!(output, EmbedOutput::Vector { pooling: Pooling::Last, .. } | EmbedOutput::Score);
    let is_divisible = is_causal && is_last;
    // A table of learned positions ends where training ended; llama.cpp would read beyond it.
    let n_ctx = n_ctx.min(model.n_ctx_train().max(1)).min(if is_divisible { MAX_DIVISIBLE } else { MAX_WHOLE });
    let n_ubatch = if is_divisible { n_ubatch.min(n_ctx) } else { n_ctx };
    Some(EmbedPlan { output, n_ctx, n_ubatch, is_divisible })
}

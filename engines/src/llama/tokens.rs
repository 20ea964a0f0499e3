//! A model's tokens as [`serving`](crate::serving) has them, from llama.cpp.

use std::path::Path;
use std::sync::Arc;

use baton_model::gguf::Gguf;
use baton_schemas::Token;
use baton_schemas::node::InfillTokens;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::token::LlamaToken;

use super::tokenizer::LlamaTokenizer;
use super::vocabulary::{control_spellings, vocabulary};
use crate::serving::LoadError;
use crate::serving::described::Tokenization;
use crate::serving::pair::Joints;

/// The tokens of a model that was loaded from the file at `path`.
pub(super) fn tokens(model: &Arc<LlamaModel>, gguf: &Gguf, path: &Path) -> Result<Tokenization, LoadError> {
    let vocab = model.vocab();
    let infill = || {
        let [prefix, suffix, middle] = [vocab.fim_pre(), vocab.fim_suf(), vocab.fim_mid()].map(id);
        Some(InfillTokens { prefix: prefix?, suffix: suffix?, middle: middle? })
    };
    Ok(Tokenization {
        vocabulary: Arc::new(vocabulary(model)),
        tokenizer: Arc::new(LlamaTokenizer::new(Arc::clone(model), gguf, path)?),
        bos: id(vocab.bos()),
        eos: id(vocab.eos()),
        adds_bos: vocab.should_add_bos(),
        control: control_spellings(model),
        infill: infill(),
    })
}

/// The tokens around a reranker's two texts.
pub(super) fn joints(model: &LlamaModel) -> Joints {
    let vocab = model.vocab();
    let bos = id(vocab.bos()).filter(|_| vocab.should_add_bos());
    let eos = id(vocab.eos()).or_else(|| id(vocab.sep())).filter(|_| vocab.should_add_eos());
    let sep = id(vocab.sep()).filter(|_| vocab.should_add_sep());
    Joints {
        before: bos.into_iter().collect(),
        between: eos.into_iter().chain(sep).collect(),
        after: eos.into_iter().collect(),
    }
}

/// A token's number. llama.cpp writes −1 for a token that the vocabulary lacks.
fn id(token: LlamaToken) -> Option<Token> {
    Token::try_from(token.0).ok()
}

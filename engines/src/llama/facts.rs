//! Facts about the model, for clients that request its description.

use baton_model::gguf::Gguf;
use baton_model::vocabulary::Vocabulary;
use baton_schemas::node::{InfillTokens, ModelFacts};
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::token::LlamaToken;

use super::{LlamaConfig, id};

/// Gathers the facts from the file and from llama.cpp.
pub(super) fn gather(config: &LlamaConfig, gguf: &Gguf, model: &LlamaModel, vocabulary: &Vocabulary) -> ModelFacts {
    let vocab = model.vocab();
    let text = |token: LlamaToken| vocabulary.text(id(token));
    let infill = || {
        let prefix = id(vocab.fim_pre())?;
        let suffix = id(vocab.fim_suf())?;
        let middle = id(vocab.fim_mid())?;
        Some(InfillTokens { prefix, suffix, middle })
    };
    ModelFacts {
        n_params: model.n_params(),
        file_bytes: gguf.files.n_bytes(),
        quantization: gguf.quantization().unwrap_or_default().to_owned(),
        chat_template: template_source(config, gguf).unwrap_or_default().to_owned(),
        bos_token: text(vocab.bos()),
        eos_token: text(vocab.eos()),
        infill: infill(),
    }
}

/// The operator's template, else the model's own.
pub(super) fn template_source<'a>(config: &'a LlamaConfig, gguf: &'a Gguf) -> Option<&'a str> {
    config.chat_template.as_deref().or_else(|| gguf.chat_template())
}

//! What engines share that read a model's description themselves: its template, and facts for clients.

use baton_model::gguf::Gguf;
use baton_model::template::{ChatTemplate, SpecialTokens};
use baton_model::vocabulary::{FileVocabulary, Vocabulary};
use baton_schemas::node::{InfillTokens, ModelFacts};

/// A model's header and vocabulary.
#[derive(Clone, Copy)]
pub(crate) struct Described<'a> {
    pub(crate) header: &'a Gguf,
    pub(crate) file: &'a FileVocabulary,
    pub(crate) vocabulary: &'a Vocabulary,
    /// The operator's template, which replaces the model's own.
    pub(crate) chat_template: Option<&'a str>,
}

impl<'a> Described<'a> {
    /// The operator's template, else the model's own.
    fn template_source(self) -> Option<&'a str> {
        self.chat_template.or_else(|| self.header.chat_template())
    }

    /// The chat template, compiled. `None`: there is none. Errors: the template engine's message.
    pub(crate) fn template(self) -> Result<Option<ChatTemplate>, String> {
        let Some(source) = self.template_source() else { return Ok(None) };
        let special = SpecialTokens {
            bos: self.vocabulary.text(self.file.bos),
            eos: self.vocabulary.text(self.file.eos),
            control: self.file.control_spellings(),
        };
        ChatTemplate::compile(source, special).map(Some).map_err(|error| error.to_string())
    }

    /// Facts for clients. `quantization` names the type of the weights.
    pub(crate) fn facts(self, quantization: &str) -> ModelFacts {
        let n_elements = |dims: &[u64]| dims.iter().fold(1u64, |n, dim| n.saturating_mul(*dim));
        let infill = match self.file.infill {
            [Some(prefix), Some(suffix), Some(middle)] => Some(InfillTokens { prefix, suffix, middle }),
            _ => None,
        };
        ModelFacts {
            n_params: self.header.tensors.iter().map(|tensor| n_elements(&tensor.dims)).fold(0, u64::saturating_add),
            file_bytes: self.header.files.n_bytes(),
            quantization: quantization.to_owned(),
            chat_template: self.template_source().unwrap_or_default().to_owned(),
            bos_token: self.vocabulary.text(self.file.bos),
            eos_token: self.vocabulary.text(self.file.eos),
            infill,
        }
    }
}

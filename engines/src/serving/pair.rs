//! Joins a query and a document for a reranker, as llama-server does. The model's file has a form for it, or they are
//! two texts between the tokens that the vocabulary adds.

use std::sync::Arc;

use baton_model::gguf::Gguf;
use baton_model::template::{SpecialTokens, TemplateError};
use baton_schemas::Token;

use super::template_process::Renderer;

/// The key of the form in a model's file, with llama.cpp's names of the two places.
const FORM: &str = "tokenizer.chat_template.rerank";
const QUERY: &str = "{query}";
const DOCUMENT: &str = "{document}";

/// How a reranker reads a query and a document.
pub(crate) enum PairForm {
    /// The file's form, as a template for two user messages: the query and the document.
    Template(Arc<Renderer>),
    /// The query and the document between tokens.
    Joined(Joints),
}

/// The tokens around the two texts.
pub(crate) struct Joints {
    pub(crate) before: Vec<Token>,
    pub(crate) between: Vec<Token>,
    pub(crate) after: Vec<Token>,
}

impl PairForm {
    /// The form of a model, whose joints are `joined` if its file has none. Errors: the form in its file cannot be used.
    pub(crate) fn of(gguf: &Gguf, special: SpecialTokens, joined: Joints) -> Result<PairForm, TemplateError> {
        match gguf.str(FORM) {
            // It only puts two texts between others.
            Some(form) => Renderer::here(&template(form), special).map(Arc::new).map(PairForm::Template),
            None => Ok(PairForm::Joined(joined)),
        }
    }
}

/// Writes a form as a chat template. Only the form's own text can then produce control tokens.
fn template(form: &str) -> String {
    let mut source = String::new();
    let mut rest = form;
    while !rest.is_empty() {
        let places = [(QUERY, "{{ messages[0].content }}"), (DOCUMENT, "{{ messages[1].content }}")];
        let next = places.iter().filter_map(|(name, place)| Some((rest.find(name)?, name, place))).min();
        let (text, after) = match next {
            Some((at, name, _)) => (&rest[..at], &rest[at + name.len()..]),
            None => (rest, ""),
        };
        // A JSON string is also a string of the template's language.
        source.push_str(&format!("{{{{ {} }}}}", serde_json::Value::from(text)));
        source.push_str(next.map_or("", |(_, _, place)| place));
        rest = after;
    }
    source
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use baton_model::template::ChatTemplate;
    use baton_schemas::MessageRole;
    use baton_schemas::generate::{Conversation, Message};

    use super::*;

    #[test]
    fn a_form_is_filled_with_both_texts_and_nothing_in_it_is_run() {
        let rendered = |form: &str| {
            let template = ChatTemplate::compile(&template(form), SpecialTokens::default()).unwrap();
            let messages = ["{document}", "\"d\""].map(|text| Message::new(MessageRole::User, text.to_owned()));
            let conversation = Conversation { messages: messages.into(), ..Conversation::default() };
            template.render(&conversation, SystemTime::UNIX_EPOCH).unwrap()
        };
        assert_eq!(rendered("<Q>: {query}\n<D>: {document}<|end|>\n\n"), "<Q>: {document}\n<D>: \"d\"<|end|>\n\n");
        assert_eq!(rendered("{document}{query}{{ 1 + 1 }}{% raw %}\\n é"), "\"d\"{document}{{ 1 + 1 }}{% raw %}\\n é");
        assert_eq!(rendered(""), "");
    }
}

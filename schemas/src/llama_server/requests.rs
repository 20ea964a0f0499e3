//! What clients send.

use crate::generate::ChatPrompt;
use crate::node::TokenizeRequest;
use crate::openai;
use crate::request::fields::Fields;
use crate::request::{InvalidRequest, json, tools};
use crate::sequence::Token;

/// `POST /tokenize`.
#[derive(Debug, Clone, PartialEq)]
pub struct Tokenize {
    /// Whose vocabulary.
    pub model: Option<String>,
    /// The text, and how to read it.
    pub text: TokenizeRequest,
}

/// `POST /detokenize`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Detokenize {
    /// Whose vocabulary.
    pub model: Option<String>,
    /// The tokens.
    pub tokens: Vec<Token>,
}

/// `POST /apply-template`.
#[derive(Debug, Clone, PartialEq)]
pub struct ApplyTemplate {
    /// Whose template.
    pub model: Option<String>,
    /// What to render.
    pub chat: ChatPrompt,
}

impl Tokenize {
    /// Reads a body.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        let object = json::read_object(body)?;
        let root = Fields::root(&object);
        if root.boolean("with_pieces")?.unwrap_or(false) {
            return Err(InvalidRequest::unsupported("with_pieces", "Tokens with their pieces"));
        }
        let text = root.string("content")?.ok_or_else(|| InvalidRequest::at("content", "is missing"))?;
        let text = TokenizeRequest {
            text: text.to_owned(),
            add_special: root.boolean("add_special")?.unwrap_or(false),
            parse_special: root.boolean("parse_special")?.unwrap_or(true),
        };
        Ok(Tokenize { model: model(root)?, text })
    }
}

impl Detokenize {
    /// Reads a body.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        let object = json::read_object(body)?;
        let root = Fields::root(&object);
        let tokens = root.array("tokens")?.ok_or_else(|| InvalidRequest::at("tokens", "is missing"))?;
        let token = |value: &serde_json::Value| value.as_u64().and_then(|id| Token::try_from(id).ok());
        let tokens: Option<_> = tokens.iter().map(token).collect();
        let tokens = tokens.ok_or_else(|| InvalidRequest::at("tokens", "must be an array of token ids"))?;
        Ok(Detokenize { model: model(root)?, tokens })
    }
}

impl ApplyTemplate {
    /// Reads a body. Messages and tools are OpenAI's.
    pub fn parse(body: &[u8]) -> Result<Self, InvalidRequest> {
        let object = json::read_object(body)?;
        let root = Fields::root(&object);
        let chat = ChatPrompt { conversation: openai::conversation(root)?, tools: tools::parse(root)? };
        Ok(ApplyTemplate { model: model(root)?, chat })
    }
}

fn model(root: Fields<'_>) -> Result<Option<String>, InvalidRequest> {
    Ok(root.string("model")?.filter(|model| !model.is_empty()).map(str::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenize(body: &str) -> Option<(String, bool, bool)> {
        let text = Tokenize::parse(body.as_bytes()).ok()?.text;
        Some((text.text, text.add_special, text.parse_special))
    }

    #[test]
    fn defaults_are_llama_servers() {
        assert_eq!(tokenize(r#"{"content": ""}"#), Some((String::new(), false, true)));
        let all = r#"{"content": "x", "add_special": true, "parse_special": false, "with_pieces": false}"#;
        assert_eq!(tokenize(all), Some(("x".into(), true, false)));
        for wrong in ["{}", r#"{"content": 1}"#, r#"{"content": "x", "with_pieces": true}"#] {
            assert_eq!(tokenize(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn tokens_are_read_or_refused() {
        let tokens = |body: &str| Detokenize::parse(body.as_bytes()).ok().map(|request| request.tokens);
        assert_eq!(tokens(r#"{"tokens": [1, 2]}"#), Some(vec![1, 2]));
        assert_eq!(tokens(r#"{"tokens": []}"#), Some(vec![]));
        for wrong in ["{}", r#"{"tokens": [-1]}"#, r#"{"tokens": ["a"]}"#, r#"{"tokens": [4294967296]}"#] {
            assert_eq!(tokens(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_template_is_applied_to_messages_and_never_taken() {
        let parsed = |body: &str| ApplyTemplate::parse(body.as_bytes());
        let request = parsed(r#"{"messages": [{"role": "user", "content": "hi"}], "model": "m"}"#).unwrap();
        assert_eq!((request.chat.conversation.messages.len(), request.model.as_deref()), (1, Some("m")));
        let theirs = r#"{"messages": [{"role": "user", "content": "hi"}], "chat_template": "x"}"#;
        assert_eq!(parsed(theirs).unwrap_err().param.as_deref(), Some("chat_template"));
        assert!(parsed("{}").is_err());
    }
}

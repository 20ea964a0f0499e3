//! The messages with which a node renders, tokenizes and spells.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::generate::Conversation;
use crate::key_tag::KeyTag;
use crate::sequence::Token;

/// A request to render a conversation with the model's chat template and to tokenize it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RenderRequest {
    /// The conversation to render.
    pub conversation: Conversation,
    /// The API key for which it is rendered.
    #[serde(default, skip_serializing_if = "KeyTag::is_none")]
    pub key: KeyTag,
}

/// A request to tokenize a text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenizeRequest {
    /// The text.
    #[serde(with = "crate::shared")]
    pub text: Arc<str>,
    /// Add the tokens that begin and end a text, if the model's file says so.
    pub add_special: bool,
    /// Read the spellings of control tokens, such as `<|im_end|>`, as control tokens.
    pub parse_special: bool,
    /// The API key for which it is tokenized.
    #[serde(default, skip_serializing_if = "KeyTag::is_none")]
    pub key: KeyTag,
}

/// A request to tokenize a query and a document together, in the form in which a reranker judges them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairRequest {
    /// The query.
    #[serde(with = "crate::shared")]
    pub query: Arc<str>,
    /// The document.
    pub document: String,
    /// The API key for which they are tokenized.
    #[serde(default, skip_serializing_if = "KeyTag::is_none")]
    pub key: KeyTag,
}

/// A list of tokens, in a request or a reply.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenList {
    /// The tokens.
    pub tokens: Vec<Token>,
}

/// The reply to a request to detokenize.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct DetokenizedText {
    /// The text, with U+FFFD where the tokens' bytes are not UTF-8.
    pub text: String,
}

/// The reply to a request for the bytes of each token.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenPieces {
    /// The bytes of each token.
    pub pieces: Vec<Vec<u8>>,
}

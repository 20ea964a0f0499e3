//! The JSON of those llama-server routes that clients use in addition to OpenAI's: `/tokenize`, `/detokenize`,
//! `/apply-template`, `/props`, `/slots`, `/completion`, `/infill`, `/embedding` and `/v1/rerank`. Shapes are those of
//! llama.cpp's `tools/server/README.md`.
//!
//! A llama-server has one model. Here a request may name one of several models in `model`.

pub mod generate;
pub mod load;
pub mod rerank;

mod props;
mod requests;

pub use props::{Props, SlotInfo, slots};
pub use requests::{
    ApplyTemplate, ApplyTemplateBody, Detokenize, DetokenizeBody, Tokenize, TokenizeBody, TokenizeForm,
};
use schemars::JsonSchema;
use serde::Serialize;

use crate::token::Token;

/// The reply to `POST /tokenize`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct TokenizeReply {
    /// The tokens: each as its id, or with its piece.
    pub tokens: ListedTokens,
    /// Their number, if the body has vLLM's form.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
    /// Tokens that one sequence can hold, if the body has vLLM's form and a node has the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_model_len: Option<u32>,
}

/// The tokens of a text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum ListedTokens {
    /// Ids.
    Ids(Vec<Token>),
    /// Ids and pieces.
    Pieces(Vec<TokenPiece>),
}

/// A token and its piece of the text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct TokenPiece {
    /// The token.
    pub id: Token,
    /// Its text, or its bytes if these are not UTF-8.
    pub piece: Piece,
}

/// A token's piece of the text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(untagged)]
pub enum Piece {
    /// UTF-8.
    Text(String),
    /// Part of a character.
    Bytes(Vec<u8>),
}

impl Piece {
    /// The piece with these bytes.
    pub fn new(bytes: Vec<u8>) -> Piece {
        String::from_utf8(bytes).map_or_else(|error| Piece::Bytes(error.into_bytes()), Piece::Text)
    }
}

/// The reply to `POST /detokenize`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct DetokenizeReply {
    /// The text, with U+FFFD where the tokens' bytes are not UTF-8.
    pub content: String,
    /// The same under vLLM's name.
    pub prompt: String,
}

/// The reply to vLLM's `GET /tokenizer_info`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct TokenizerInfo {
    /// The spelling of the token that begins a prompt; null if there is none.
    pub bos_token: Option<String>,
    /// The spelling of the token that ends a text; null if there is none.
    pub eos_token: Option<String>,
    /// Always null: nothing is padded.
    pub pad_token: Option<String>,
    /// The chat template, in Jinja; null if there is none.
    pub chat_template: Option<String>,
    /// Tokens that one sequence can hold.
    pub model_max_length: u32,
}

/// The reply to `POST /apply-template`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ApplyTemplateReply {
    /// The rendered conversation.
    pub prompt: String,
}

//! The JSON of those llama-server routes that clients use in addition to OpenAI's: `/tokenize`, `/detokenize`,
//! `/apply-template`, `/props`, `/slots`, `/completion`, `/infill` and `/embedding`. Shapes are those of llama.cpp's `tools/server/README.md`.
//!
//! A llama-server has one model. Here a request may name one of several models in `model`.

pub mod generate;

mod props;
mod requests;

pub use props::{Props, SlotInfo, slots};
pub use requests::{ApplyTemplate, ApplyTemplateBody, Detokenize, DetokenizeBody, Tokenize, TokenizeBody};
use schemars::JsonSchema;
use serde::Serialize;

use crate::token::Token;

/// The reply to `POST /tokenize`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct TokenizeReply {
    /// The tokens.
    pub tokens: Vec<Token>,
}

/// The reply to `POST /detokenize`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct DetokenizeReply {
    /// The text, with U+FFFD where the tokens' bytes are not UTF-8.
    pub content: String,
}

/// The reply to `POST /apply-template`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ApplyTemplateReply {
    /// The rendered conversation.
    pub prompt: String,
}

//! The JSON of llama-server's own routes, as far as clients use them beside OpenAI's: `/tokenize`, `/detokenize`,
//! `/apply-template`, `/props` and `/slots`. Shapes: its `tools/server/README.md`.
//!
//! A llama-server has one model. Where there are several, a request may name one under `model`.

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
    /// The text, U+FFFD where the tokens' bytes are not UTF-8.
    pub content: String,
}

/// The reply to `POST /apply-template`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ApplyTemplateReply {
    /// The rendered conversation.
    pub prompt: String,
}

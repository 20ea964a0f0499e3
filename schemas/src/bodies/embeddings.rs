//! `/v1/embeddings`.

use schemars::JsonSchema;
use serde_json::json;

use super::completion::{TextOrTokens, Tokens};
use super::shared::NonEmpty;
use crate::embed::MAX_INPUTS;

/// Texts whose vectors are wanted.
#[derive(JsonSchema)]
#[schemars(rename = "EmbeddingsRequest", example = json!({ "model": "smollm2", "input": "a text" }))]
pub struct EmbeddingsBody {
    /// One of the names in `/v1/models`.
    pub model: NonEmpty,
    /// The texts; 300,000 tokens in all.
    pub input: EmbeddingsInput,
    /// How vectors are written. OpenAI's SDKs ask for base64.
    pub encoding_format: Option<EncodingFormat>,
    /// Has to be the model's own number.
    #[schemars(range(min = 1, max = u32::MAX))]
    pub dimensions: Option<i64>,
}

/// What to embed.
#[derive(JsonSchema)]
#[serde(untagged)]
pub enum EmbeddingsInput {
    /// A text.
    Text(NonEmpty),
    /// A text as tokens.
    Tokens(Tokens),
    /// Several texts.
    Many(Inputs),
}

/// Several texts.
#[derive(JsonSchema)]
#[schemars(inline, extend("minItems" = 1, "maxItems" = MAX_INPUTS))]
pub struct Inputs(pub Vec<TextOrTokens>);

/// How vectors are written.
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "lowercase")]
pub enum EncodingFormat {
    /// Arrays of numbers.
    Float,
    /// 32-bit floats, the least significant byte first.
    Base64,
}

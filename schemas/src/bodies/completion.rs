//! `/v1/completions`.

use schemars::JsonSchema;
use serde_json::json;

use super::shared::{NonEmpty, ResponseFormat, Sampling, Stop, StreamOptions, TokenId};
use crate::openai::{MAX_PROMPT_CHOICES, N_CHOICES, TOP_LOGPROBS};

/// Texts to be continued.
#[derive(JsonSchema)]
#[schemars(rename = "CompletionRequest", example = json!({
    "model": "smollm2", "max_tokens": 8, "prompt": "Once upon a time"
}))]
pub struct CompletionBody {
    /// One of the names in `/v1/models`.
    pub model: NonEmpty,
    /// What to continue. Prompts times `n` are 64 at most.
    pub prompt: Prompt,
    /// What follows. Needs a model with infilling tokens, and the prompt as text.
    pub suffix: Option<String>,
    /// Choices for each prompt.
    #[schemars(range(min = *N_CHOICES.start(), max = *N_CHOICES.end()))]
    pub n: Option<i64>,
    /// Tokens of a text at most. Null: 16. -1: until the context ends.
    #[schemars(range(min = -1, max = u32::MAX))]
    pub max_tokens: Option<i64>,
    /// Where a text ends.
    pub stop: Option<Stop>,
    /// How tokens are drawn.
    #[serde(flatten)]
    pub sampling: Sampling,
    /// Report log-probabilities, with so many of the most likely tokens at each place. Not together with `echo`.
    #[schemars(range(min = *TOP_LOGPROBS.start(), max = *TOP_LOGPROBS.end()))]
    pub logprobs: Option<i64>,
    /// Each text begins with its prompt.
    pub echo: Option<bool>,
    /// As server-sent events.
    pub stream: Option<bool>,
    /// How the stream ends.
    pub stream_options: Option<StreamOptions>,
    /// What the text has to be.
    pub response_format: Option<ResponseFormat>,
    /// Go on past the model's own end.
    pub ignore_eos: Option<bool>,
}

/// What to continue.
#[derive(JsonSchema)]
#[serde(untagged)]
pub enum Prompt {
    /// A text.
    Text(NonEmpty),
    /// A text as tokens.
    Tokens(Tokens),
    /// Several prompts.
    Many(Prompts),
}

/// One of several prompts or inputs.
#[derive(JsonSchema)]
#[serde(untagged)]
pub enum TextOrTokens {
    /// A text.
    Text(NonEmpty),
    /// A text as tokens.
    Tokens(Tokens),
}

/// A text as tokens.
#[derive(JsonSchema)]
#[schemars(inline, extend("minItems" = 1))]
pub struct Tokens(pub Vec<TokenId>);

/// Several prompts.
#[derive(JsonSchema)]
#[schemars(inline, extend("minItems" = 1, "maxItems" = MAX_PROMPT_CHOICES))]
pub struct Prompts(pub Vec<TextOrTokens>);

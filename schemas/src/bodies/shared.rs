//! What the bodies of several routes have in common.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde_json::{Map, Value};

use crate::request::sampling::{BIAS, MAX_LOGIT_BIASES, REPEAT_PENALTY};
use crate::request::stop::{MAX_STOP_CHARS, MAX_STOPS};

/// A text of at least one character.
#[derive(JsonSchema)]
#[schemars(inline, extend("minLength" = 1))]
pub struct NonEmpty(pub String);

/// A token's number in the model's vocabulary. One that is not in it is a 400.
#[derive(JsonSchema)]
#[schemars(inline, extend("maximum" = u32::MAX))]
pub struct TokenId(pub u32);

/// A JSON Schema (draft 2020-12) of at most 20,000 values, nested 64 deep at most. A keyword that cannot be kept while
/// sampling is a 400.
#[derive(JsonSchema)]
#[schemars(inline)]
pub struct SchemaObject(pub Map<String, Value>);

/// How tokens are drawn. What is not given is llama-server's default, in Ollama's routes Ollama's.
#[derive(JsonSchema)]
pub struct Sampling {
    /// Any 64-bit integer. Without one, or with -1, a seed is drawn.
    #[schemars(with = "Option<i128>", range(min = i64::MIN, max = u64::MAX))]
    pub seed: Option<i128>,
    /// 0 takes the most likely token.
    #[schemars(range(min = 0, max = 2))]
    pub temperature: Option<f64>,
    /// The smallest set of tokens that reaches this probability.
    #[schemars(range(min = 0, max = 1))]
    pub top_p: Option<f64>,
    /// Tokens at least so likely, compared with the most likely one.
    #[schemars(range(min = 0, max = 1))]
    pub min_p: Option<f64>,
    /// The most likely tokens, so many; 0 and -1 are all of them.
    #[schemars(range(min = -1, max = i32::MAX))]
    pub top_k: Option<i64>,
    /// Subtracted for each time that a token has come.
    #[schemars(range(min = -2, max = 2))]
    pub frequency_penalty: Option<f64>,
    /// Subtracted from tokens that have come.
    #[schemars(range(min = -2, max = 2))]
    pub presence_penalty: Option<f64>,
    /// Divides the logits of tokens that have come.
    #[schemars(range(min = *REPEAT_PENALTY.start(), max = *REPEAT_PENALTY.end()))]
    pub repeat_penalty: Option<f64>,
    /// The same under vLLM's name.
    #[schemars(range(min = *REPEAT_PENALTY.start(), max = *REPEAT_PENALTY.end()))]
    pub repetition_penalty: Option<f64>,
    /// How many tokens back penalties look; -1 is all of them.
    #[schemars(range(min = -1, max = i32::MAX))]
    pub repeat_last_n: Option<i64>,
    /// Added to the logits of tokens, by their numbers.
    #[schemars(extend(
        "maxProperties" = MAX_LOGIT_BIASES,
        "propertyNames" = {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties" = {"type": "number", "minimum": BIAS.start(), "maximum": BIAS.end()},
    ))]
    pub logit_bias: Option<BTreeMap<String, f64>>,
}

/// A text before which generation ends.
#[derive(JsonSchema)]
#[schemars(inline, extend("minLength" = 1, "maxLength" = MAX_STOP_CHARS))]
pub struct StopString(pub String);

/// Several of them.
#[derive(JsonSchema)]
#[schemars(inline, extend("maxItems" = MAX_STOPS))]
pub struct StopStrings(pub Vec<StopString>);

/// Texts before which generation ends.
#[derive(JsonSchema)]
#[serde(untagged)]
pub enum Stop {
    /// One.
    One(StopString),
    /// Several.
    Many(StopStrings),
}

/// How hard a model is to think, where its template knows that.
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the words are all there is")]
pub enum Effort {
    None,
    Minimal,
    Low,
    Medium,
    High,
    Xhigh,
    Max,
}

/// What the reply has to be.
#[derive(JsonSchema)]
#[serde(untagged)]
pub enum ResponseFormat {
    /// Any text, or any JSON object.
    Plain {
        /// Which of them.
        r#type: Option<PlainFormat>,
        /// With `json_object`: JSON that this describes, as llama-server takes it.
        schema: Option<SchemaObject>,
    },
    /// JSON that a schema describes.
    Schema {
        /// Always this.
        r#type: JsonSchemaFormat,
        /// OpenAI's place for it.
        json_schema: NamedSchema,
    },
}

/// See [`ResponseFormat`].
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the words are all there is")]
pub enum PlainFormat {
    Text,
    JsonObject,
}

/// See [`ResponseFormat`].
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the words are all there is")]
pub enum JsonSchemaFormat {
    JsonSchema,
}

/// A schema with a name. The name has no effect, and every schema is kept strictly.
#[derive(JsonSchema)]
pub struct NamedSchema {
    /// The schema.
    pub schema: SchemaObject,
}

/// How a stream ends.
#[derive(JsonSchema)]
pub struct StreamOptions {
    /// With a last event that carries the usage.
    pub include_usage: Option<bool>,
}

/// Variables of the chat template. Those that the server sets cannot be among them.
#[derive(JsonSchema)]
#[schemars(inline, extend("propertyNames" = {"not": {"enum": crate::openai::RESERVED_TEMPLATE_ARGS}}))]
pub struct TemplateArgs(pub Map<String, Value>);

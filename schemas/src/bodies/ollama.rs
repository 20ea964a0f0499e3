//! Ollama's routes.

use schemars::JsonSchema;
use serde_json::{Map, Value, json};

use super::shared::{NonEmpty, Sampling, Stop};
use super::tools::ChatTools;
use crate::embed::MAX_INPUTS;
use crate::keep_alive::MAX_CHARS;
use crate::ollama::generate_request::{MAX_CONTEXT, MAX_TOKEN};
use crate::openai::TOP_LOGPROBS;

/// A chat to be continued. Without messages the model is loaded, or with a `keep_alive` of 0 unloaded.
#[derive(JsonSchema)]
#[schemars(rename = "OllamaChatRequest", example = json!({
    "model": "smollm2", "options": {"num_predict": 8}, "messages": [{"role": "user", "content": "Say hello."}]
}))]
pub struct ChatBody {
    /// The history.
    pub messages: Option<Vec<OllamaMessage>>,
    /// What all generations have.
    #[serde(flatten)]
    pub common: Common,
}

/// A text to be answered or continued. Without one the model is loaded, or with a `keep_alive` of 0 unloaded.
#[derive(JsonSchema)]
#[schemars(rename = "OllamaGenerateRequest", example = json!({
    "model": "smollm2", "options": {"num_predict": 8}, "prompt": "Say hello."
}))]
pub struct GenerateBody {
    /// The user's message; with `raw`, the whole prompt.
    pub prompt: Option<String>,
    /// What follows. Needs a model with infilling tokens.
    pub suffix: Option<String>,
    /// The system message.
    pub system: Option<String>,
    /// The prompt as it is, without the chat template.
    pub raw: Option<bool>,
    /// PNG, JPEG, WebP or GIF files in base64, for a model with a projector.
    #[schemars(length(max = 16))]
    pub images: Option<Vec<ImageFile>>,
    /// The tokens that an earlier reply ended with, to go on from there. Not together with `raw`, `suffix` or `images`.
    #[schemars(length(max = MAX_CONTEXT))]
    pub context: Option<Vec<ContextToken>>,
    /// What all generations have.
    #[serde(flatten)]
    pub common: Common,
}

/// A token's number in the model's vocabulary. One that is not in it is a 400.
#[derive(JsonSchema)]
#[schemars(inline, extend("maximum" = MAX_TOKEN))]
pub struct ContextToken(pub u32);

/// What `/api/chat` and `/api/generate` have in common.
#[derive(JsonSchema)]
pub struct Common {
    /// One of the names in `/api/tags`.
    pub model: NonEmpty,
    /// As lines of JSON, unless this is false.
    pub stream: Option<bool>,
    /// What the reply has to be.
    pub format: Option<Format>,
    /// Whether the model is to think. For one that cannot, a 400.
    pub think: Option<Think>,
    /// How long a model that comes and goes stays afterwards: 0 unloads it, below 0 it stays for good. One that is always
    /// there stays.
    pub keep_alive: Option<KeepAlive>,
    /// What the model may call.
    pub tools: Option<ChatTools>,
    /// Report the log-probabilities of tokens.
    pub logprobs: Option<bool>,
    /// With so many of the most likely tokens at each place.
    #[schemars(range(min = *TOP_LOGPROBS.start(), max = *TOP_LOGPROBS.end()))]
    pub top_logprobs: Option<i64>,
    /// How to generate.
    pub options: Option<Options>,
}

/// How to generate. Options that only concern how Ollama loads a model are ignored.
#[derive(JsonSchema)]
#[schemars(rename = "OllamaOptions")]
pub struct Options {
    /// How tokens are drawn.
    #[serde(flatten)]
    pub sampling: Sampling,
    /// Tokens of a reply at most. 0 and less: until the context ends.
    #[schemars(range(min = i32::MIN, max = u32::MAX))]
    pub num_predict: Option<i64>,
    /// Tokens of prompt and reply together at most: a longer prompt is a 400, and a reply ends there with `length`. 0, and
    /// more than the model's context, is no limit.
    #[schemars(range(min = 0, max = u32::MAX))]
    pub num_ctx: Option<i64>,
    /// Where a reply ends.
    pub stop: Option<Stop>,
}

/// What a reply has to be.
#[derive(JsonSchema)]
#[schemars(rename = "OllamaFormat")]
#[serde(untagged)]
pub enum Format {
    /// Any JSON object, or with the empty word any text.
    Json(FormatWord),
    /// JSON that a schema describes; the empty object asks for nothing.
    Schema(Map<String, Value>),
}

/// See [`Format`].
#[derive(JsonSchema)]
#[schemars(inline)]
#[allow(missing_docs, reason = "the words are all there is")]
pub enum FormatWord {
    #[serde(rename = "json")]
    Json,
    #[serde(rename = "")]
    Off,
}

/// Whether and how hard to think.
#[derive(JsonSchema)]
#[serde(untagged)]
pub enum Think {
    /// Whether.
    Switch(bool),
    /// How hard.
    Effort(ThinkEffort),
}

/// See [`Think`].
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the words are all there is")]
pub enum ThinkEffort {
    Low,
    Medium,
    High,
    Max,
}

/// What [`keep_alive`](crate::keep_alive) reads.
const KEEP_ALIVE: &str =
    "^([-+]?([0-9]+[.]?[0-9]*|[.][0-9]+)|[-+]?(([0-9]+[.]?[0-9]*|[.][0-9]+)(ns|us|µs|μs|ms|s|m|h))+)?$";

/// How long the model should stay.
#[derive(JsonSchema)]
#[serde(untagged)]
pub enum KeepAlive {
    /// Seconds.
    Seconds(f64),
    /// In Go's form, such as `5m`, or a number; the empty word says nothing.
    Duration(#[schemars(length(max = MAX_CHARS), regex(pattern = KEEP_ALIVE))] String),
}

/// A message of the history.
#[derive(JsonSchema)]
pub struct OllamaMessage {
    /// Who speaks.
    pub role: OllamaRole,
    /// What is said.
    pub content: Option<String>,
    /// What the model thought.
    pub thinking: Option<String>,
    /// What it called.
    pub tool_calls: Option<Vec<OllamaCall>>,
    /// Which tool this is the result of.
    pub tool_name: Option<String>,
    /// Which call this is the result of.
    pub tool_call_id: Option<String>,
    /// PNG, JPEG, WebP or GIF files in base64, for a model with a projector.
    #[schemars(length(max = 16))]
    pub images: Option<Vec<ImageFile>>,
}

/// An image's file in base64, as it is or as a data URI.
#[derive(JsonSchema)]
#[schemars(inline, extend("contentEncoding" = "base64"))]
pub struct ImageFile(pub String);

/// Who speaks.
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the words are all there is")]
pub enum OllamaRole {
    System,
    User,
    Assistant,
    Tool,
}

/// A call that the model made earlier.
#[derive(JsonSchema)]
#[schemars(rename = "OllamaEarlierCall")]
pub struct OllamaCall {
    /// By which its result refers to it.
    pub id: Option<String>,
    /// Which function, with what.
    pub function: OllamaFunction,
}

/// A function that was called.
#[derive(JsonSchema)]
#[schemars(rename = "OllamaEarlierFunction")]
pub struct OllamaFunction {
    /// Its name.
    pub name: NonEmpty,
    /// Its arguments.
    pub arguments: Option<Map<String, Value>>,
}

/// Texts whose vectors are wanted. Without one the model is loaded.
#[derive(JsonSchema)]
#[schemars(rename = "OllamaEmbedRequest", example = json!({ "model": "smollm2", "input": "a text" }))]
pub struct EmbedBody {
    /// One of the names in `/api/tags`.
    pub model: NonEmpty,
    /// The texts.
    pub input: Option<EmbedInput>,
    /// Cut texts that are too long, unless this is false.
    pub truncate: Option<bool>,
    /// 0, or the model's own number.
    #[schemars(range(min = 0, max = u32::MAX))]
    pub dimensions: Option<i64>,
}

/// What to embed.
#[derive(JsonSchema)]
#[schemars(rename = "OllamaEmbedInput")]
#[serde(untagged)]
pub enum EmbedInput {
    /// A text.
    One(String),
    /// Several.
    Many(EmbedTexts),
}

/// Several texts.
#[derive(JsonSchema)]
#[schemars(inline, extend("maxItems" = MAX_INPUTS))]
pub struct EmbedTexts(pub Vec<NonEmpty>);

/// A text whose vector is wanted. Without one the model is loaded.
#[derive(JsonSchema)]
#[schemars(rename = "OllamaEmbeddingsRequest", example = json!({ "model": "smollm2", "prompt": "a text" }))]
pub struct OlderEmbedBody {
    /// One of the names in `/api/tags`.
    pub model: NonEmpty,
    /// The text.
    pub prompt: Option<String>,
}

/// Names a model.
#[derive(JsonSchema)]
#[schemars(rename = "OllamaModelRequest", example = json!({ "model": "smollm2" }))]
#[serde(untagged)]
pub enum ModelBody {
    /// Under its name.
    Model {
        /// One of the names in `/api/tags`.
        model: NonEmpty,
        /// Ignored.
        name: Option<String>,
        /// As lines of JSON, where the call streams.
        stream: Option<bool>,
    },
    /// Under the older name.
    Name {
        /// One of the names in `/api/tags`.
        name: NonEmpty,
        /// Not given.
        model: Option<()>,
        /// As lines of JSON, where the call streams.
        stream: Option<bool>,
    },
}

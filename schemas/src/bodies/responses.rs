//! `/v1/responses`.

use schemars::JsonSchema;
use serde_json::{Map, Value, json};

use super::chat::{Arguments, AssistantRole, Part};
use super::shared::{Effort, JsonSchemaFormat, NonEmpty, PlainFormat, Sampling, SchemaObject, Stop, TemplateArgs};
use super::tools::{ResponseToolChoice, ResponseTools};
use crate::openai::{MAX_METADATA, TOP_LOGPROBS};

/// A conversation to be continued. Whatever would need a store is a 400.
#[derive(JsonSchema)]
#[schemars(rename = "ResponsesRequest", example = json!({
    "model": "smollm2", "max_output_tokens": 8, "input": "Say hello."
}))]
pub struct ResponsesBody {
    /// One of the names in `/v1/models`.
    pub model: NonEmpty,
    /// The history.
    pub input: Input,
    /// The system's message, before everything else.
    pub instructions: Option<String>,
    /// Tokens of the reply at most.
    #[schemars(range(min = 1, max = u32::MAX))]
    pub max_output_tokens: Option<i64>,
    /// Where the reply ends.
    pub stop: Option<Stop>,
    /// How tokens are drawn.
    #[serde(flatten)]
    pub sampling: Sampling,
    /// With so many of the most likely tokens at each place.
    #[schemars(range(min = *TOP_LOGPROBS.start(), max = *TOP_LOGPROBS.end()))]
    pub top_logprobs: Option<i64>,
    /// What else the reply should hold: `message.output_text.logprobs`.
    pub include: Option<Vec<Value>>,
    /// What the text has to be.
    pub text: Option<TextConfig>,
    /// How the model is to think.
    pub reasoning: Option<Reasoning>,
    /// The same under chats' name.
    pub reasoning_effort: Option<Effort>,
    /// Whether it is to think, for templates that know this switch.
    pub enable_thinking: Option<bool>,
    /// Other variables of the chat template.
    pub chat_template_kwargs: Option<TemplateArgs>,
    /// What the model may call.
    pub tools: Option<ResponseTools>,
    /// What it has to call.
    pub tool_choice: Option<ResponseToolChoice>,
    /// Whether one reply may hold several calls.
    pub parallel_tool_calls: Option<bool>,
    /// As server-sent events.
    pub stream: Option<bool>,
    /// Nothing is stored.
    #[schemars(extend("enum" = [false, null]))]
    pub store: Option<bool>,
    /// Nothing runs without its client.
    #[schemars(extend("enum" = [false, null]))]
    pub background: Option<bool>,
    /// No conversation is cut.
    #[schemars(extend("not" = {"const": "auto"}))]
    pub truncation: Option<String>,
    /// Echoed.
    #[schemars(extend("maxProperties" = MAX_METADATA))]
    pub metadata: Option<Map<String, Value>>,
    /// Echoed.
    #[schemars(range(min = 1, max = u32::MAX))]
    pub max_tool_calls: Option<i64>,
    /// Echoed.
    pub safety_identifier: Option<String>,
    /// Echoed.
    pub prompt_cache_key: Option<String>,
    /// Echoed.
    pub user: Option<String>,
    /// Go on past the model's own end.
    pub ignore_eos: Option<bool>,
}

/// The history.
#[derive(JsonSchema)]
#[schemars(rename = "ResponsesInput")]
#[serde(untagged)]
pub enum Input {
    /// The user's message.
    Text(String),
    /// Items.
    Items(Items),
}

/// At least one item.
#[derive(JsonSchema)]
#[schemars(inline, extend("minItems" = 1))]
pub struct Items(pub Vec<InputItem>);

/// An item of the history. References to items are a 400. Items of tools that are skipped are skipped, too.
#[derive(JsonSchema)]
#[serde(untagged)]
pub enum InputItem {
    /// What anybody said.
    Message {
        /// Always this.
        r#type: Option<MessageType>,
        /// Who.
        role: InputRole,
        /// What.
        content: InputContent,
    },
    /// What the model called.
    FunctionCall {
        /// Always this.
        r#type: FunctionCallType,
        /// By which its output refers to it.
        call_id: NonEmpty,
        /// Which function.
        name: NonEmpty,
        /// With what.
        arguments: Option<Arguments>,
    },
    /// What came of it.
    FunctionCallOutput {
        /// Always this.
        r#type: FunctionCallOutputType,
        /// Which call.
        call_id: NonEmpty,
        /// What came of it.
        output: Option<InputContent>,
    },
    /// What the model thought.
    Reasoning {
        /// Always this.
        r#type: ReasoningType,
        /// The text, where it is readable.
        content: Option<Vec<Value>>,
    },
}

/// What is said.
#[derive(JsonSchema)]
#[serde(untagged)]
pub enum InputContent {
    /// A text.
    Text(String),
    /// Texts, which newlines will join, and images.
    Parts(Vec<Part>),
}

/// Who speaks.
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(untagged)]
pub enum InputRole {
    /// Anybody but the model.
    Other(InputOtherRole),
    /// The model.
    Assistant(AssistantRole),
}

/// See [`InputRole`].
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the words are all there is")]
pub enum InputOtherRole {
    System,
    Developer,
    User,
}

/// See [`InputItem`].
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the word is all there is")]
pub enum MessageType {
    Message,
}

/// See [`InputItem`].
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the word is all there is")]
pub enum FunctionCallType {
    FunctionCall,
}

/// See [`InputItem`].
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the word is all there is")]
pub enum FunctionCallOutputType {
    FunctionCallOutput,
}

/// See [`InputItem`].
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the word is all there is")]
pub enum ReasoningType {
    Reasoning,
}

/// What the text has to be.
#[derive(JsonSchema)]
pub struct TextConfig {
    /// See its variants.
    pub format: Option<TextFormat>,
}

/// What the text has to be.
#[derive(JsonSchema)]
#[serde(untagged)]
pub enum TextFormat {
    /// Any text, or any JSON object.
    Plain {
        /// Which of them.
        r#type: Option<PlainFormat>,
    },
    /// JSON that a schema describes.
    Schema {
        /// Always this.
        r#type: JsonSchemaFormat,
        /// The schema.
        schema: SchemaObject,
    },
}

/// How the model is to think.
#[derive(JsonSchema)]
pub struct Reasoning {
    /// How hard.
    pub effort: Option<Effort>,
}

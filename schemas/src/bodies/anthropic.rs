//! Anthropic's routes.

use schemars::JsonSchema;
use serde_json::{Map, Value, json};

use super::shared::{JsonSchemaFormat, NonEmpty, Sampling, SchemaObject, StopStrings};
use super::tools::{MessagesToolChoice, MessagesTools};

/// A conversation whose next message is wanted.
#[derive(JsonSchema)]
#[schemars(rename = "MessagesRequest", example = json!({
    "model": "smollm2", "max_tokens": 8, "messages": [{"role": "user", "content": "Say hello."}]
}))]
pub struct MessagesBody {
    /// Tokens of the message at most.
    #[schemars(range(min = 1, max = u32::MAX))]
    pub max_tokens: i64,
    /// What the prompt is made of.
    #[serde(flatten)]
    pub prompt: CountBody,
    /// Where the message ends.
    pub stop_sequences: Option<MessagesStop>,
    /// How tokens are drawn.
    #[serde(flatten)]
    pub sampling: Sampling,
    /// The older place of `output_config.format`.
    pub output_format: Option<OutputFormat>,
    /// As server-sent events.
    pub stream: Option<bool>,
}

/// A conversation whose tokens are to be counted.
#[derive(JsonSchema)]
#[schemars(rename = "CountTokensRequest", example = json!({
    "model": "smollm2", "messages": [{"role": "user", "content": "Say hello."}]
}))]
pub struct CountBody {
    /// One of the names in `/v1/models`.
    pub model: NonEmpty,
    /// The history. Its last message is not the assistant's: that would have to be continued.
    #[schemars(length(min = 1))]
    pub messages: Vec<Message>,
    /// The system's message.
    pub system: Option<Texts>,
    /// What the model may call.
    pub tools: Option<MessagesTools>,
    /// What it has to call.
    pub tool_choice: Option<MessagesToolChoice>,
    /// Whether the model is to think.
    pub thinking: Option<Thinking>,
    /// How the reply has to be.
    pub output_config: Option<OutputConfig>,
}

/// Where a message ends.
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(untagged)]
pub enum MessagesStop {
    /// One text.
    One(super::shared::StopString),
    /// Several.
    Many(StopStrings),
}

/// How the reply has to be.
#[derive(JsonSchema)]
pub struct OutputConfig {
    /// How hard the model is to think.
    pub effort: Option<OutputEffort>,
    /// What the text has to be.
    pub format: Option<OutputFormat>,
}

/// See [`OutputConfig`].
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the words are all there is")]
pub enum OutputEffort {
    Low,
    Medium,
    High,
    Xhigh,
    Max,
}

/// JSON that a schema describes.
#[derive(JsonSchema)]
pub struct OutputFormat {
    /// Always this.
    pub r#type: JsonSchemaFormat,
    /// The schema.
    pub schema: SchemaObject,
}

/// Whether the model is to think. `budget_tokens` is not kept.
#[derive(JsonSchema)]
pub struct Thinking {
    /// Whether.
    pub r#type: ThinkingType,
}

/// See [`Thinking`].
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the words are all there is")]
pub enum ThinkingType {
    Enabled,
    Disabled,
    Adaptive,
}

/// A text, or text blocks.
#[derive(JsonSchema)]
#[serde(untagged)]
pub enum Texts {
    /// A text.
    Text(String),
    /// Several.
    Blocks(Vec<TextBlock>),
}

/// A block that is a text.
#[derive(JsonSchema)]
pub struct TextBlock {
    /// Always this.
    pub r#type: TextType,
    /// The text.
    pub text: String,
}

/// See [`TextBlock`].
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the word is all there is")]
pub enum TextType {
    Text,
}

/// A message of the history.
#[derive(JsonSchema)]
#[schemars(rename = "MessagesMessage")]
#[serde(tag = "role", rename_all = "lowercase")]
pub enum Message {
    /// From the user.
    User {
        /// What it says.
        content: Blocks<UserBlock>,
    },
    /// From the model.
    Assistant {
        /// What it says.
        content: Blocks<AssistantBlock>,
    },
    /// From the system.
    System {
        /// What it says.
        content: Texts,
    },
}

/// A text, or blocks.
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(untagged)]
pub enum Blocks<B> {
    /// A text.
    Text(String),
    /// Blocks.
    Blocks(Vec<B>),
}

/// What a user can say. Documents that are not plain text are a 400, and so are images for a model without a projector.
#[derive(JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum UserBlock {
    /// A text.
    Text {
        /// The text.
        text: String,
    },
    /// A document.
    Document {
        /// Its text.
        source: PlainDocument,
        /// Its title.
        title: Option<String>,
    },
    /// What a tool said.
    ToolResult {
        /// Which call this is the result of.
        tool_use_id: NonEmpty,
        /// The result.
        content: Option<Blocks<ResultBlock>>,
        /// The call failed.
        is_error: Option<bool>,
    },
    /// An image.
    Image {
        /// The file.
        source: ImageSource,
    },
}

/// What a tool can say.
#[derive(JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ResultBlock {
    /// A text.
    Text {
        /// The text.
        text: String,
    },
    /// An image.
    Image {
        /// The file.
        source: ImageSource,
    },
}

/// An image itself: URLs are never fetched.
#[derive(JsonSchema)]
pub struct ImageSource {
    /// Always this.
    pub r#type: Base64Type,
    /// A PNG, JPEG, WebP or GIF file in base64.
    #[schemars(regex(pattern = r"^[A-Za-z0-9+/]+={0,2}$"))]
    pub data: String,
}

/// See [`ImageSource`].
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the word is all there is")]
pub enum Base64Type {
    Base64,
}

/// A document of plain text.
#[derive(JsonSchema)]
pub struct PlainDocument {
    /// Always this.
    pub r#type: TextType,
    /// The text.
    pub data: String,
}

/// What a model can have said. Calls of tools that run on Anthropic's servers, and what they found, are left out.
#[derive(JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum AssistantBlock {
    /// A text.
    Text {
        /// The text.
        text: String,
    },
    /// A call.
    ToolUse {
        /// By which its result refers to it.
        id: NonEmpty,
        /// Which tool.
        name: NonEmpty,
        /// With what.
        input: Option<Map<String, Value>>,
    },
    /// What it thought.
    Thinking {
        /// The text.
        thinking: Option<String>,
    },
    /// What another server encrypted, which is left out.
    RedactedThinking {},
}

//! `/v1/chat/completions`, and `/baton/plan`, which takes the same.

use schemars::JsonSchema;
use serde_json::{Map, Value, json};

use super::shared::{Effort, NonEmpty, ResponseFormat, Sampling, Stop, StreamOptions, TemplateArgs};
use super::tools::{ChatToolChoice, ChatTools, FunctionChoice, FunctionType, Functions};
use crate::openai::{N_CHOICES, TOP_LOGPROBS};

/// A chat to be continued.
#[derive(JsonSchema)]
#[schemars(rename = "ChatCompletionRequest", example = json!({
    "model": "smollm2", "max_tokens": 8, "messages": [{"role": "user", "content": "Say hello."}]
}))]
pub struct ChatBody {
    /// One of the names in `/v1/models`.
    pub model: NonEmpty,
    /// The history.
    pub messages: ChatMessages,
    /// Choices: replies that differ in their seeds.
    #[schemars(range(min = *N_CHOICES.start(), max = *N_CHOICES.end()))]
    pub n: Option<i64>,
    /// Tokens of a reply at most. Null and -1: until the context ends. 0: none, the prompt is computed.
    #[schemars(range(min = -1, max = u32::MAX))]
    pub max_completion_tokens: Option<i64>,
    /// The older name, which the other wins over.
    #[schemars(range(min = -1, max = u32::MAX))]
    pub max_tokens: Option<i64>,
    /// Where a reply ends.
    pub stop: Option<Stop>,
    /// How tokens are drawn.
    #[serde(flatten)]
    pub sampling: Sampling,
    /// Report the log-probabilities of tokens.
    pub logprobs: Option<bool>,
    /// With so many of the most likely tokens at each place. More than 0 needs `logprobs`.
    #[schemars(range(min = *TOP_LOGPROBS.start(), max = *TOP_LOGPROBS.end()))]
    pub top_logprobs: Option<i64>,
    /// As server-sent events.
    pub stream: Option<bool>,
    /// How the stream ends.
    pub stream_options: Option<StreamOptions>,
    /// What the reply has to be.
    pub response_format: Option<ResponseFormat>,
    /// What the model may call.
    pub tools: Option<ChatTools>,
    /// What it has to call.
    pub tool_choice: Option<ChatToolChoice>,
    /// Whether one reply may hold several calls.
    pub parallel_tool_calls: Option<bool>,
    /// The older form of `tools`. Not both.
    pub functions: Option<Functions>,
    /// The older form of `tool_choice`.
    pub function_call: Option<FunctionChoice>,
    /// How hard the model is to think.
    pub reasoning_effort: Option<Effort>,
    /// Whether it is to think, for templates that know this switch.
    pub enable_thinking: Option<bool>,
    /// Other variables of the chat template.
    pub chat_template_kwargs: Option<TemplateArgs>,
    /// Go on past the model's own end.
    pub ignore_eos: Option<bool>,
    /// Replies are text.
    pub modalities: Option<Vec<Modality>>,
}

/// A history of at least one message.
#[derive(JsonSchema)]
#[schemars(inline, extend("minItems" = 1))]
pub struct ChatMessages(pub Vec<ChatMessage>);

/// What a reply can be.
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the word is all there is")]
pub enum Modality {
    Text,
}

/// A message of the history.
#[derive(JsonSchema)]
#[serde(untagged)]
pub enum ChatMessage {
    /// From anybody but the model.
    Other(OtherMessage),
    /// From the model.
    Assistant(AssistantMessage),
}

/// What anybody but the model said.
#[derive(JsonSchema)]
pub struct OtherMessage {
    /// Who.
    pub role: OtherRole,
    /// What.
    pub content: Content,
    /// The speaker's or the tool's name.
    pub name: Option<String>,
    /// Which call this is the result of.
    pub tool_call_id: Option<String>,
    /// Kept for the template.
    pub reasoning_content: Option<String>,
    /// The same under OpenRouter's name.
    pub reasoning: Option<String>,
}

/// Who speaks. `developer` is `system`, and `function` is `tool`.
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the words are all there is")]
pub enum OtherRole {
    System,
    Developer,
    User,
    Tool,
    Function,
}

/// What the model said: a text, calls, or at least what it thought.
#[derive(JsonSchema)]
#[schemars(extend("anyOf" = [
    {"required": ["content"]},
    {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}},
    {"required": ["function_call"], "properties": {"function_call": {"type": "object"}}},
    {"required": ["reasoning_content"], "properties": {"reasoning_content": {"type": "string"}}},
    {"required": ["reasoning"], "properties": {"reasoning": {"type": "string"}}}
]))]
pub struct AssistantMessage {
    /// Who.
    pub role: AssistantRole,
    /// The text.
    pub content: Option<Content>,
    /// The speaker's name.
    pub name: Option<String>,
    /// Has no meaning here, and is kept for the template.
    pub tool_call_id: Option<String>,
    /// What it thought.
    pub reasoning_content: Option<String>,
    /// The same under OpenRouter's name.
    pub reasoning: Option<String>,
    /// What it called.
    pub tool_calls: Option<Vec<EarlierCall>>,
    /// What it called, in the older form.
    pub function_call: Option<EarlierFunction>,
}

/// The model.
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the word is all there is")]
pub enum AssistantRole {
    Assistant,
}

/// A message's content. Audio and files are a 400, and so are images for a model without a projector.
#[derive(JsonSchema)]
#[serde(untagged)]
pub enum Content {
    /// A text.
    Text(String),
    /// Texts, which newlines will join, and images.
    Parts(Vec<Part>),
    /// None.
    Nothing(()),
}

/// A text or an image among others.
#[derive(JsonSchema)]
#[serde(untagged)]
pub enum Part {
    /// A text.
    Text {
        /// The dialects' names for the same.
        r#type: TextPart,
        /// The text.
        text: String,
    },
    /// What the model said when it refused.
    Refusal {
        /// Always this.
        r#type: RefusalPart,
        /// The text.
        refusal: String,
    },
    /// An image.
    Image {
        /// The dialects' names for the same.
        r#type: ImagePart,
        /// The image itself: URLs are never fetched.
        image_url: ImageUrl,
    },
}

/// See [`Part::Image`].
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the words are all there is")]
pub enum ImagePart {
    ImageUrl,
    InputImage,
}

/// An image, plain or in an object.
#[derive(JsonSchema)]
#[serde(untagged)]
pub enum ImageUrl {
    /// As responses have it.
    Plain(DataUri),
    /// As chats have it.
    Object {
        /// The image.
        url: DataUri,
    },
}

/// A PNG, JPEG, WebP or GIF file as a data URI in base64.
#[derive(JsonSchema)]
#[schemars(inline)]
pub struct DataUri(
    #[schemars(regex(pattern = r"^data:image/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+={0,2}$"))] pub String,
);

/// See [`Part::Text`].
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the words are all there is")]
pub enum TextPart {
    Text,
    InputText,
    OutputText,
}

/// See [`Part::Refusal`].
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the word is all there is")]
pub enum RefusalPart {
    Refusal,
}

/// A call that the model made earlier.
#[derive(JsonSchema)]
pub struct EarlierCall {
    /// By which its result refers to it.
    pub id: Option<String>,
    /// The only type there is.
    pub r#type: Option<FunctionType>,
    /// Which function, with what.
    pub function: EarlierFunction,
}

/// A function that was called.
#[derive(JsonSchema)]
pub struct EarlierFunction {
    /// Its name.
    pub name: NonEmpty,
    /// Its arguments.
    pub arguments: Option<Arguments>,
}

/// The arguments of a call.
#[derive(JsonSchema)]
#[serde(untagged)]
pub enum Arguments {
    /// As JSON in a string.
    Text(String),
    /// As they are.
    Object(Map<String, Value>),
}

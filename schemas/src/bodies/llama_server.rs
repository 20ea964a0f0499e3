//! llama-server's own routes.

use schemars::JsonSchema;
use serde_json::json;

use super::chat::ChatMessages;
use super::shared::{Effort, TemplateArgs, TokenId};
use super::tools::{ChatToolChoice, ChatTools};

/// A text whose tokens are wanted.
#[derive(JsonSchema)]
#[schemars(rename = "TokenizeRequest", example = json!({ "content": "a text" }))]
pub struct TokenizeBody {
    /// Whose vocabulary; without a name, that of the first model.
    pub model: Option<String>,
    /// The text.
    pub content: String,
    /// With the tokens that begin and end a text.
    pub add_special: Option<bool>,
    /// Whether control tokens that the text spells are such. They are by default.
    pub parse_special: Option<bool>,
}

/// Tokens whose text is wanted.
#[derive(JsonSchema)]
#[schemars(rename = "DetokenizeRequest", example = json!({ "tokens": [1, 2] }))]
pub struct DetokenizeBody {
    /// Whose vocabulary; without a name, that of the first model.
    pub model: Option<String>,
    /// The tokens.
    pub tokens: Vec<TokenId>,
}

/// A chat whose prompt is wanted.
#[derive(JsonSchema)]
#[schemars(rename = "ApplyTemplateRequest", example = json!({ "messages": [{"role": "user", "content": "Hi."}] }))]
pub struct ApplyTemplateBody {
    /// Whose template; without a name, that of the first model.
    pub model: Option<String>,
    /// The history.
    pub messages: ChatMessages,
    /// What the model may call.
    pub tools: Option<ChatTools>,
    /// What it has to call.
    pub tool_choice: Option<ChatToolChoice>,
    /// Whether one reply may hold several calls.
    pub parallel_tool_calls: Option<bool>,
    /// How hard the model is to think.
    pub reasoning_effort: Option<Effort>,
    /// Whether it is to think, for templates that know this switch.
    pub enable_thinking: Option<bool>,
    /// Other variables of the chat template.
    pub chat_template_kwargs: Option<TemplateArgs>,
}

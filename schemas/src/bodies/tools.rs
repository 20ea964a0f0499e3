//! Tools and the choice among them, as each dialect writes them down.

use schemars::JsonSchema;

use super::shared::SchemaObject;
use crate::tools::{MAX_NAME_CHARS, MAX_TOOLS};

/// A tool's name. No two tools of a request may have the same.
#[derive(JsonSchema)]
#[schemars(inline, extend("minLength" = 1, "maxLength" = MAX_NAME_CHARS, "pattern" = "^[a-zA-Z0-9_.-]+$"))]
pub struct ToolName(pub String);

/// The type of tools that the client runs.
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the word is all there is")]
pub enum FunctionType {
    Function,
}

/// A function that the model may call.
#[derive(JsonSchema)]
pub struct Function {
    /// What the model calls it.
    pub name: ToolName,
    /// What it is for, in words.
    pub description: Option<String>,
    /// The schema of its arguments.
    pub parameters: Option<SchemaObject>,
    /// Arguments follow the schema even where the model is free to call it or not.
    pub strict: Option<bool>,
}

/// A tool of `/v1/chat/completions`.
#[derive(JsonSchema)]
pub struct ChatTool {
    /// The only type there is.
    pub r#type: Option<FunctionType>,
    /// The function.
    pub function: Function,
}

/// The tools of a chat.
#[derive(JsonSchema)]
#[schemars(inline, extend("maxItems" = MAX_TOOLS))]
pub struct ChatTools(pub Vec<ChatTool>);

/// The tools of a chat, in the older form.
#[derive(JsonSchema)]
#[schemars(inline, extend("maxItems" = MAX_TOOLS))]
pub struct Functions(pub Vec<Function>);

/// A choice that names no tool. `required` needs tools.
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the words are all there is")]
pub enum ChoiceWord {
    Auto,
    None,
    Required,
}

/// What a chat's reply has to do with its tools.
#[derive(JsonSchema)]
#[serde(untagged)]
pub enum ChatToolChoice {
    /// In a word.
    Word(ChoiceWord),
    /// A call of this tool, which has to be among `tools`.
    Named {
        /// The only type there is.
        r#type: Option<FunctionType>,
        /// Which.
        function: ToolNamed,
    },
    /// Some of them: the model is not told of the others.
    Allowed {
        /// Always this.
        r#type: AllowedTools,
        /// Which, and what the reply has to do with them.
        allowed_tools: AllowedChatTools,
    },
}

/// See [`ChatToolChoice::Allowed`].
#[derive(JsonSchema)]
pub struct AllowedChatTools {
    /// What it has to do with them.
    pub mode: Option<AllowedMode>,
    /// Which.
    #[schemars(length(min = 1))]
    pub tools: Vec<AllowedChatTool>,
}

/// See [`AllowedChatTools`].
#[derive(JsonSchema)]
pub struct AllowedChatTool {
    /// Which function.
    pub function: ToolNamed,
}

/// Names a tool.
#[derive(JsonSchema)]
pub struct ToolNamed {
    /// Its name.
    pub name: ToolName,
}

/// What the reply has to do with `functions`.
#[derive(JsonSchema)]
#[serde(untagged)]
pub enum FunctionChoice {
    /// In a word.
    Word(FunctionChoiceWord),
    /// A call of this function, which has to be among `functions`.
    Named(ToolNamed),
}

/// See [`FunctionChoice`].
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the words are all there is")]
pub enum FunctionChoiceWord {
    Auto,
    None,
}

/// A tool of `/v1/responses`. Tools of other types run on OpenAI's servers, and are left out.
#[derive(JsonSchema)]
#[serde(untagged)]
pub enum ResponseTool {
    /// A function.
    Function {
        /// Always this.
        r#type: Option<FunctionType>,
        /// The function.
        #[serde(flatten)]
        function: Function,
    },
    /// Skipped.
    Other {
        /// Any other.
        #[schemars(extend("not" = {"const": "function"}))]
        r#type: String,
    },
}

/// The tools of `/v1/responses`.
#[derive(JsonSchema)]
#[schemars(inline, extend("maxItems" = MAX_TOOLS))]
pub struct ResponseTools(pub Vec<ResponseTool>);

/// What a response has to do with its tools.
#[derive(JsonSchema)]
#[serde(untagged)]
pub enum ResponseToolChoice {
    /// In a word.
    Word(ChoiceWord),
    /// A call of this function, which has to be among `tools`.
    Named {
        /// Always this.
        r#type: FunctionType,
        /// Which.
        name: ToolName,
    },
    /// Some of the functions among `tools`.
    Allowed {
        /// Always this.
        r#type: AllowedTools,
        /// What it has to do with them.
        mode: Option<AllowedMode>,
        /// Which.
        #[schemars(length(min = 1))]
        tools: Vec<ToolNamed>,
    },
}

/// See [`ResponseToolChoice::Allowed`].
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the word is all there is")]
pub enum AllowedTools {
    AllowedTools,
}

/// See [`ResponseToolChoice::Allowed`].
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the words are all there is")]
pub enum AllowedMode {
    Auto,
    Required,
}

/// A tool of `/v1/messages`. Tools that Anthropic defines have types of their own, and are left out.
#[derive(JsonSchema)]
#[serde(untagged)]
pub enum MessagesTool {
    /// The client's own.
    Custom {
        /// Always this.
        r#type: Option<CustomType>,
        /// What the model calls it.
        name: ToolName,
        /// What it is for, in words.
        description: Option<String>,
        /// The schema of its arguments.
        input_schema: Option<SchemaObject>,
        /// Arguments follow the schema even where the model is free to call it or not.
        strict: Option<bool>,
    },
    /// Skipped.
    Other {
        /// Any other.
        #[schemars(extend("not" = {"const": "custom"}))]
        r#type: String,
    },
}

/// The tools of `/v1/messages`.
#[derive(JsonSchema)]
#[schemars(inline, extend("maxItems" = MAX_TOOLS))]
pub struct MessagesTools(pub Vec<MessagesTool>);

/// See [`MessagesTool::Custom`].
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the word is all there is")]
pub enum CustomType {
    Custom,
}

/// What a message has to do with its tools.
#[derive(JsonSchema)]
pub struct MessagesToolChoice {
    /// What. `any` and `tool` need tools.
    pub r#type: MessagesChoiceWord,
    /// With `tool`, which one.
    pub name: Option<String>,
    /// One call at most.
    pub disable_parallel_tool_use: Option<bool>,
}

/// See [`MessagesToolChoice`].
#[derive(JsonSchema)]
#[schemars(inline)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "the words are all there is")]
pub enum MessagesChoiceWord {
    Auto,
    Any,
    Tool,
    None,
}

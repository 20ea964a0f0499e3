//! The one internal request that every public dialect is parsed into.
//!
//! Numbers are range-checked by the dialect that built this, so nothing below the HTTP layer checks them again
//! except engines, which refuse what they could not survive.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::constraint::Constraint;
use crate::image::Image;
use crate::keep_alive::KeepAlive;
use crate::message_role::MessageRole;
pub use crate::sampling::Sampling;
use crate::sampling_fields::SamplingFields;
use crate::token::Token;
use crate::tools::ToolUse;

/// A client's request, free of any dialect.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateRequest {
    /// The model's public name, as the client wrote it.
    pub model: String,
    /// What to continue.
    pub input: Input,
    /// Independent completions of the same input, at least 1.
    pub n: u32,
    /// New tokens at most, per choice. `None`: until the context ends. 0: prefill only.
    pub max_tokens: Option<u32>,
    /// Generation ends before the first of these; none is empty.
    pub stop: Vec<String>,
    /// How tokens are drawn. The seed is always set: the dialect draws one where the client sent none.
    pub sampling: Sampling,
    /// Which of its fields the client chose: the others may be the model's own defaults.
    pub chosen: SamplingFields,
    /// `Some(k)`: log-probabilities of each token and of the k most likely ones at its place.
    pub top_logprobs: Option<u32>,
    /// Go on past the model's end-of-turn tokens, up to `max_tokens` or the end of the context.
    pub ignore_eos: bool,
    /// What the text has to be.
    pub constraint: Option<Constraint>,
    /// What the model may call.
    pub tools: ToolUse,
    /// The client insists on a model that thinks before it answers.
    pub wants_thinking: bool,
    /// How long the model is to stay in memory afterwards, if the client says so.
    pub keep_alive: Option<KeepAlive>,
    /// Tokens of prompt and reply together at most, where the client wants fewer than the model's context holds.
    pub num_ctx: Option<u32>,
    /// `Some`: the reply tells its [tokens](Self::earlier_tokens), with which a later request may go on. These are those
    /// of an earlier reply, or none.
    pub context: Option<Vec<Token>>,
}

impl GenerateRequest {
    /// Images in the conversation.
    pub fn images(&self) -> &[Image] {
        match &self.input {
            Input::Chat(conversation) => &conversation.images,
            Input::Text(_) | Input::Infill { .. } | Input::Tokens(_) => &[],
        }
    }

    /// Tokens that stand before the rendered conversation: prompt and reply of an earlier request.
    pub fn earlier_tokens(&self) -> &[Token] {
        self.context.as_deref().unwrap_or_default()
    }

    /// Tokens that prompt and reply may have on a model that holds `n_ctx`.
    pub fn context_within(&self, n_ctx: u32) -> u32 {
        self.num_ctx.map_or(n_ctx, |wanted| wanted.min(n_ctx))
    }

    /// New tokens at most after a prompt of so many, on a model that holds `n_ctx`. A context that is no smaller than the
    /// model's is no limit: the engine ends there by itself.
    pub fn max_tokens_after(&self, n_prompt: u32, n_ctx: u32) -> Option<u32> {
        let left = self.num_ctx.filter(|wanted| *wanted < n_ctx).map(|wanted| wanted.saturating_sub(n_prompt));
        self.max_tokens.into_iter().chain(left).min()
    }
}

/// What a model continues.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// A conversation, rendered by the model's own chat template.
    Chat(Conversation),
    /// A whole prompt as text: control tokens that it spells are control tokens.
    Text(String),
    /// What stands between two texts, for models that were trained for it.
    Infill {
        /// The text before.
        prefix: String,
        /// The text after.
        suffix: String,
    },
    /// Exact tokens.
    Tokens(Vec<Token>),
}

/// What a chat's prompt is made of: a conversation, and the tools that the model sees.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ChatPrompt {
    /// What was said.
    pub conversation: Conversation,
    /// What the model may call.
    pub tools: ToolUse,
}

/// A conversation in the form that chat templates expect.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Conversation {
    /// Oldest first.
    pub messages: Vec<Message>,
    /// Tool definitions, `{"type":"function","function":{…}}`, for templates that know tools: see
    /// [`Tool::definition`](crate::tools::Tool::definition). Dialects leave this empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<Value>,
    /// Extra template variables, e.g. `enable_thinking`. Never a template.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub template_args: Map<String, Value>,
    /// Images, each with its [mark](Image::mark) in a message. Never shown to a template, which sees the marks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<Image>,
}

/// One message. Serializes to exactly the JSON that chat templates read.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks.
    pub role: MessageRole,
    /// The text; empty where the client sent null or nothing.
    #[serde(default)]
    pub content: String,
    /// The model's earlier reasoning, for templates that replay it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Calls the assistant made; arguments as JSON objects, which is what templates iterate.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<Value>,
    /// The call this `tool` message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The speaker's or tool's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// A message that is only a text.
    pub fn new(role: MessageRole, content: String) -> Message {
        Message { role, content, ..Message::default() }
    }
}

//! The internal request. Every public dialect parses its bodies into it.
//!
//! The dialect checks the ranges of numbers. Later layers do not check them again, except engines, which refuse values
//! that would make them fail.

use std::borrow::Cow;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::constraint::{Asker, Constraint};
use crate::held_schema::Unheld;
use crate::image::{Image, LinkedImage};
use crate::keep_alive::KeepAlive;
use crate::message_role::MessageRole;
pub use crate::sampling::Sampling;
use crate::sampling_fields::SamplingFields;
use crate::token::Token;
use crate::tools::{Strictness, Tool, ToolUse};

/// A client's request, independent of the dialect.
///
/// A body with 64 prompts becomes 64 of these. Whatever a client can make long, and they have in common, is shared.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateRequest {
    /// The model's public name, as the client wrote it.
    pub model: String,
    /// The input to continue.
    pub input: Input,
    /// The number of independent completions of the input, at least 1.
    pub n: u32,
    /// The most new tokens per choice. `None`: until the context ends. 0: prefill only.
    pub max_tokens: Option<u32>,
    /// Strings that end the generation. None is empty.
    pub stop: Arc<[String]>,
    /// How tokens are sampled. The seed is always set: the dialect draws one if the client sent none.
    pub sampling: Sampling,
    /// The sampling fields that the client chose. The model's own defaults may replace the others.
    pub chosen: SamplingFields,
    /// `Some(k)`: report the log-probabilities of each token and of the k most likely tokens at its position.
    pub top_logprobs: Option<u32>,
    /// Report the log-probabilities of the prompt's tokens, too.
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// What the client expects the reply to be. Only the time depends on it.
    pub predicted: Option<Arc<str>>,
    /// Continue after the model's end-of-turn tokens, up to `max_tokens` or the end of the context.
    pub ignore_eos: bool,
    /// The form that the text must have.
    pub constraint: Option<Arc<Constraint>>,
    /// The tools that the model may call.
    pub tools: ToolUse,
    /// What the request says about reasoning, besides the template's variables.
    pub thinking: Thinking,
    /// How long the model stays in memory after the request, if the client says so.
    pub keep_alive: Option<KeepAlive>,
    /// The most tokens in prompt and reply together, if the client sets a limit.
    pub num_ctx: Option<u32>,
    /// `Some`: the reply reports its tokens, so that a later request can continue from them. Holds the tokens that an
    /// earlier reply reported, or none.
    pub context: Option<Vec<Token>>,
    /// The client reads the reply piece by piece, and not as one object at its end.
    pub is_streamed: bool,
}

/// What a request says about the model's reasoning, besides the variables of its template.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Thinking {
    /// Nothing.
    #[default]
    AsSaid,
    /// It is off because that is the dialect's default: the variables turn it off, and a model without a switch may think.
    OffByDefault,
    /// A model that cannot think is refused.
    Required,
}

impl GenerateRequest {
    /// Returns the schemas of which engines do not hold every part, each with the part of the request that sets it.
    pub fn unheld(&self) -> impl Iterator<Item = (Asker<'_>, &Unheld)> {
        let of_text = match self.constraint.as_deref() {
            Some(Constraint::JsonSchema { unheld, field, .. }) => Some((Asker { field, tool: None }, unheld)),
            _ => None,
        };
        let callable = self.tools.callable().into_iter();
        let of_tools = callable.map(|tool| (Asker { field: "tools", tool: Some(&tool.name) }, &tool.unheld));
        of_text.into_iter().chain(of_tools).filter(|(_, unheld)| !unheld.parts.is_empty())
    }

    /// Returns the images in the conversation.
    pub fn images(&self) -> &[Image] {
        match &self.input {
            Input::Chat(conversation) => &conversation.images,
            Input::Text(_) | Input::Infill { .. } | Input::Tokens(_) => &[],
        }
    }

    /// Returns the linked images in the conversation.
    pub fn linked_images(&self) -> &[LinkedImage] {
        match &self.input {
            Input::Chat(conversation) => &conversation.linked_images,
            Input::Text(_) | Input::Infill { .. } | Input::Tokens(_) => &[],
        }
    }

    /// Returns the bytes of memory that it keeps until its reply ends. Its texts are tokens once it has started, or an
    /// upstream has them.
    pub fn kept_bytes(&self) -> usize {
        // Named one by one: a new field is put on one side or the other.
        let GenerateRequest {
            model: _,
            input: _,
            n: _,
            max_tokens: _,
            stop,
            sampling: Sampling { logit_bias, .. },
            chosen: _,
            top_logprobs: _,
            prompt_logprobs: _,
            predicted,
            ignore_eos: _,
            constraint,
            tools,
            thinking: _,
            keep_alive: _,
            num_ctx: _,
            context,
            is_streamed: _,
        } = self;
        // Engines need the images again if they continue the reply elsewhere.
        let images: usize = self.images().iter().map(|image| image.bytes().len()).sum();
        // The reader of calls has them. The rules for forced and strict ones repeat their schemas.
        let n_copies = |tool: &Tool| if tools.is_forced() || tool.strict != Strictness::Loose { 2 } else { 1 };
        let tools: usize = tools.tools.iter().map(|tool| n_copies(tool) * tool.memory_bytes()).sum();
        let constraint = constraint.as_ref().map_or(0, |constraint| constraint.memory_bytes());
        let stop: usize = stop.iter().map(|stop| size_of::<String>() + stop.capacity()).sum();
        let context = context.as_ref().map_or(0, |tokens| size_of_val(&**tokens));
        // Each choice gets its tokens.
        let predicted = predicted.as_ref().map_or(0, |text| text.len());
        images + tools + constraint + stop + context + predicted + size_of_val(&**logit_bias)
    }

    /// Returns the tokens before the rendered conversation: prompt and reply of an earlier request.
    pub fn earlier_tokens(&self) -> &[Token] {
        self.context.as_deref().unwrap_or_default()
    }

    /// Returns true if the reply lists the token that ends its text. A client that gets the log-probabilities of prompt
    /// and text in one list takes the last entries for the text's: of a text without tokens, one entry is needed.
    pub fn reports_end(&self) -> bool {
        self.prompt_logprobs.is_some() && self.top_logprobs.is_some()
    }

    /// Returns how many tokens prompt and reply may have on a model with a context of `n_ctx` tokens.
    pub fn context_within(&self, n_ctx: u32) -> u32 {
        self.num_ctx.map_or(n_ctx, |wanted| wanted.min(n_ctx))
    }

    /// Returns the most new tokens after a prompt of `n_prompt` tokens, on a model with a context of `n_ctx` tokens. A
    /// client's limit above `n_ctx` has no effect: the engine stops at `n_ctx` by itself.
    pub fn max_tokens_after(&self, n_prompt: u32, n_ctx: u32) -> Option<u32> {
        let left = self.num_ctx.filter(|wanted| *wanted < n_ctx).map(|wanted| wanted.saturating_sub(n_prompt));
        self.max_tokens.into_iter().chain(left).min()
    }
}

/// What a client wants to know about its prompt's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptLogprobs {
    /// The most likely tokens to report at each position.
    pub n_top: u32,
    /// The most log-probabilities that the reply may hold of this prompt, those of its own tokens included.
    pub most: u32,
    /// The field of the body that asks for them, for errors.
    pub field: &'static str,
}

/// The fields of a gap's texts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InfillNames {
    /// The field of the text before the gap.
    pub prefix: &'static str,
    /// The field of the text after the gap.
    pub suffix: &'static str,
}

impl InfillNames {
    /// OpenAI's and Ollama's names.
    pub const COMMON: InfillNames = InfillNames { prefix: "prompt", suffix: "suffix" };
}

/// The input that a model continues.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// A conversation. The model's chat template renders it.
    Chat(Conversation),
    /// A whole prompt as text. The spelling of a control token in it is the control token.
    Text(Arc<str>),
    /// A gap to fill between two texts, for models that were trained for it.
    Infill {
        /// The text before the gap.
        prefix: Arc<str>,
        /// The text after the gap. The prompts of one body share it.
        suffix: Arc<str>,
        /// The fields of the body that have them, for errors.
        names: InfillNames,
    },
    /// Exact tokens.
    Tokens(Vec<Token>),
}

/// The parts of a chat's prompt: a conversation, and the tools that the model sees.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ChatPrompt {
    /// The conversation.
    pub conversation: Conversation,
    /// The tools that the model may call.
    pub tools: ToolUse,
}

/// A conversation in the form that chat templates read.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Conversation {
    /// The messages, oldest first.
    pub messages: Vec<Message>,
    /// Definitions of tools, `{"type":"function","function":{…}}`, for templates that have a form for them: see
    /// [`Tool::definition`](crate::tools::Tool::definition). Dialects leave this empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<Value>,
    /// Extra variables for the template, e.g. `enable_thinking`. Never a template.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub template_args: Map<String, Value>,
    /// Images. Each has its [mark](Image::mark) in a message; templates see only the marks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<Image>,
    /// Images that upstreams fetch. No node gets one, so they have no form for nodes.
    #[serde(skip)]
    pub linked_images: Vec<LinkedImage>,
}

impl Conversation {
    /// The messages with all system messages joined into one at the beginning, which every template can render.
    pub fn with_system_first(&self) -> Cow<'_, [Message]> {
        let is_system = |message: &Message| message.role == MessageRole::System;
        if !self.messages.iter().skip(1).any(is_system) {
            return Cow::Borrowed(&self.messages);
        }
        let (systems, others): (Vec<_>, Vec<_>) = self.messages.iter().cloned().partition(is_system);
        let mut system = Message::new(MessageRole::System, String::new());
        systems.iter().for_each(|message| system.append(&message.content));
        Cow::Owned(std::iter::once(system).chain(others).collect())
    }
}

/// One message. Its JSON is exactly what chat templates read.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// The role of the author.
    pub role: MessageRole,
    /// The text; empty if the client sent null or nothing.
    #[serde(default)]
    pub content: String,
    /// The model's earlier reasoning, for templates that show it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The same under the name that gpt-oss's template reads. Only its format of calls sets it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thinking: Option<String>,
    /// Calls that the assistant made. Arguments are JSON objects, because templates iterate over them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<Value>,
    /// The id of the call that this `tool` message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The speaker's or the tool's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// A message that is only a text.
    pub fn new(role: MessageRole, content: String) -> Message {
        Message { role, content, ..Message::default() }
    }

    /// Appends a text, after an empty line.
    pub fn append(&mut self, text: &str) {
        if !self.content.is_empty() && !text.is_empty() {
            self.content.push_str("\n\n");
        }
        self.content.push_str(text);
    }
}

//! A whole message, and what it has in common with a streamed one.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::sequence::FinishReason;
use crate::tools::ToolCallDelta;

/// A reply, or its beginning.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "Message")]
pub struct MessageReply {
    id: String,
    #[serde(rename = "type")]
    #[schemars(extend("const" = "message"))]
    kind: &'static str,
    #[schemars(extend("const" = "assistant"))]
    role: &'static str,
    model: String,
    content: Vec<Block>,
    #[schemars(extend("enum" = ["end_turn", "stop_sequence", "max_tokens", "tool_use", null]))]
    stop_reason: Option<&'static str>,
    stop_sequence: Option<String>,
    stop_details: Option<()>,
    container: Option<()>,
    usage: MessageUsage,
}

/// A part of a message. In a stream's first event of it, its text is empty.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schemars(rename = "ContentBlock")]
pub enum Block {
    /// What the model thinks.
    Thinking {
        /// All of it.
        thinking: String,
        /// See [`SIGNATURE`].
        signature: &'static str,
    },
    /// What the model says.
    Text {
        /// All of it.
        text: String,
        /// Documents are not cited here.
        citations: Option<()>,
    },
    /// A call of one of the request's tools.
    ToolUse {
        /// By which the tool's result will refer to it.
        id: String,
        /// Which one.
        name: String,
        /// Its arguments.
        input: Map<String, Value>,
        /// The caller.
        caller: ToolUseCaller,
    },
}

impl Block {
    /// A text.
    pub(super) fn text(text: String) -> Self {
        Block::Text { text, citations: None }
    }

    /// A call before its arguments.
    pub(super) fn call(id: String, name: String) -> Self {
        Block::ToolUse { id, name, input: Map::new(), caller: ToolUseCaller::Direct }
    }
}

/// The caller of a tool: always the model itself, never code that it ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schemars(rename = "Caller")]
pub enum ToolUseCaller {
    /// The model.
    Direct,
}

/// Thinking is not signed here: nothing depends on who wrote it, and it is read back as any other text. Clients drop
/// blocks without a signature from their histories, so there is one; it is base64 of "unsigned".
pub const SIGNATURE: &str = "dW5zaWduZWQ=";

/// The blocks of a whole message as they come to be.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MessageContent {
    blocks: Vec<Block>,
    /// The last block's call is open, with these arguments so far.
    arguments: Option<String>,
}

impl MessageContent {
    /// More text.
    pub fn text(&mut self, more: &str) {
        match self.blocks.last_mut() {
            _ if more.is_empty() => {}
            Some(Block::Text { text, .. }) => text.push_str(more),
            _ => self.blocks.push(Block::text(more.to_owned())),
        }
    }

    /// More of what the model thinks.
    pub fn thinking(&mut self, more: &str) {
        match self.blocks.last_mut() {
            Some(Block::Thinking { thinking, .. }) => thinking.push_str(more),
            _ => self.blocks.push(Block::Thinking { thinking: more.to_owned(), signature: SIGNATURE }),
        }
    }

    /// A step of a call.
    pub fn call(&mut self, step: &ToolCallDelta) {
        match step {
            ToolCallDelta::Begin { id, name, .. } => {
                self.blocks.push(Block::call(id.clone(), name.clone()));
                self.arguments = Some(String::new());
            }
            ToolCallDelta::Arguments { fragment, .. } => {
                if let Some(arguments) = &mut self.arguments {
                    arguments.push_str(fragment);
                }
            }
            ToolCallDelta::End { .. } => self.end_call(),
        }
    }

    /// The open call, if there is one, has its arguments. What is no object, because the model went wrong or a limit
    /// cut it off, is kept as Anthropic asks clients to keep it.
    fn end_call(&mut self) {
        let (Some(written), Some(Block::ToolUse { input, .. })) = (self.arguments.take(), self.blocks.last_mut())
        else {
            return;
        };
        *input = match serde_json::from_str(&written) {
            Ok(Value::Object(object)) => object,
            _ => Map::from_iter([("INVALID_JSON".to_owned(), json!(written))]),
        };
    }

    fn into_blocks(mut self) -> Vec<Block> {
        self.end_call();
        self.blocks
    }
}

/// Token counts. Those of the prompt that were cached are counted apart from the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct MessageUsage {
    #[serde(flatten)]
    counts: Counts,
    cache_creation: CacheCreation,
    inference_geo: Option<()>,
    service_tier: &'static str,
}

/// What a stream's end repeats of the usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "MessageCounts")]
pub(super) struct Counts {
    input_tokens: u32,
    cache_creation_input_tokens: u32,
    cache_read_input_tokens: u32,
    output_tokens: u32,
    output_tokens_details: MessageOutputDetails,
    server_tool_use: Option<()>,
}

/// Tokens that were cached because a client marked them. None are: whatever was computed is cached, unmarked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, JsonSchema)]
struct CacheCreation {
    ephemeral_5m_input_tokens: u32,
    ephemeral_1h_input_tokens: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
struct MessageOutputDetails {
    thinking_tokens: u32,
}

impl MessageUsage {
    /// The usage of a prompt with `n_cached` cached tokens and of the reply so far, with `n_reasoning` tokens of thinking.
    pub fn new(n_prompt: u32, n_cached: u32, n_completion: u32, n_reasoning: u32) -> Self {
        let counts = Counts {
            input_tokens: n_prompt.saturating_sub(n_cached),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: n_cached.min(n_prompt),
            output_tokens: n_completion,
            output_tokens_details: MessageOutputDetails { thinking_tokens: n_reasoning },
            server_tool_use: None,
        };
        let cache_creation = CacheCreation::default();
        MessageUsage { counts, cache_creation, inference_geo: None, service_tier: "standard" }
    }

    /// The counts alone.
    pub(super) fn counts(&self) -> &Counts {
        &self.counts
    }
}

/// Why a message ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stop {
    /// The engine's reason.
    pub reason: FinishReason,
    /// The stop sequence that was reached, if one was.
    pub sequence: Option<String>,
}

impl Stop {
    pub(super) fn reason(&self) -> &'static str {
        match (self.reason, &self.sequence) {
            (FinishReason::Stop, Some(_)) => "stop_sequence",
            (FinishReason::Stop, None) => "end_turn",
            (FinishReason::Length, _) => "max_tokens",
            (FinishReason::ToolCalls, _) => "tool_use",
        }
    }
}

impl MessageReply {
    /// Before its first block.
    pub fn begun(id: String, model: String, usage: MessageUsage) -> Self {
        MessageReply {
            id,
            kind: "message",
            role: "assistant",
            model,
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            stop_details: None,
            container: None,
            usage,
        }
    }

    /// With all its blocks. A message that says nothing has none.
    pub fn ended(self, content: MessageContent, stop: Stop) -> Self {
        MessageReply {
            content: content.into_blocks(),
            stop_reason: Some(stop.reason()),
            stop_sequence: stop.sequence,
            ..self
        }
    }
}

/// The reply to `count_tokens`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct TokenCount {
    /// Of the whole prompt.
    pub input_tokens: u32,
}

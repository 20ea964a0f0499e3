//! A whole message, and the parts that it shares with a streamed one.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Map;

use crate::sequence::FinishReason;
use crate::tools::ToolCallDelta;
use crate::written_object::WrittenObject;

/// A reply, or the beginning of a streamed one.
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
    #[schemars(extend("enum" = ["end_turn", "stop_sequence", "max_tokens", "tool_use", "refusal", null]))]
    stop_reason: Option<&'static str>,
    stop_sequence: Option<String>,
    stop_details: Option<()>,
    container: Option<()>,
    usage: MessageUsage,
}

/// A block of a message. It is empty in the event that opens it in a stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schemars(rename = "ContentBlock")]
pub enum Block {
    /// The model's reasoning.
    Thinking {
        /// The reasoning.
        thinking: String,
        /// See [`SIGNATURE`].
        signature: &'static str,
    },
    /// The model's text.
    Text {
        /// The text.
        text: String,
        /// Always null: documents are not cited.
        citations: Option<()>,
    },
    /// A call of one of the request's tools.
    ToolUse {
        /// The id that the tool's result will refer to.
        id: String,
        /// The tool's name.
        name: String,
        /// Its arguments.
        input: WrittenObject,
        /// The caller.
        caller: ToolUseCaller,
    },
}

impl Block {
    /// A block of text.
    pub(super) fn text(text: String) -> Self {
        Block::Text { text, citations: None }
    }

    /// A call without its arguments.
    pub(super) fn call(id: String, name: String) -> Self {
        Block::ToolUse { id, name, input: WrittenObject::default(), caller: ToolUseCaller::Direct }
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

/// The signature of every block of reasoning: base64 of "unsigned". Nothing here needs a real one, but clients drop
/// blocks without a signature from their histories.
pub const SIGNATURE: &str = "dW5zaWduZWQ=";

/// Collects the blocks of a whole message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MessageContent {
    blocks: Vec<Block>,
    /// The arguments so far of the last block, if it is a call that is still open.
    arguments: Option<String>,
    /// The last block of text is a refusal.
    is_refusing: bool,
}

impl MessageContent {
    /// Adds text.
    pub fn text(&mut self, more: &str) {
        self.add_text(more, false);
    }

    /// Adds to a refusal, which is a block of text of its own.
    pub fn refusal(&mut self, more: &str) {
        self.add_text(more, true);
    }

    fn add_text(&mut self, more: &str, is_refusal: bool) {
        if more.is_empty() {
            return;
        }
        let goes_on = std::mem::replace(&mut self.is_refusing, is_refusal) == is_refusal;
        match self.blocks.last_mut() {
            Some(Block::Text { text, .. }) if goes_on => text.push_str(more),
            _ => self.blocks.push(Block::text(more.to_owned())),
        }
    }

    /// Adds to the model's reasoning.
    pub fn thinking(&mut self, more: &str) {
        match self.blocks.last_mut() {
            Some(Block::Thinking { thinking, .. }) => thinking.push_str(more),
            _ => self.blocks.push(Block::Thinking { thinking: more.to_owned(), signature: SIGNATURE }),
        }
    }

    /// Adds a step of a call.
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

    /// Takes the arguments of the open call, if there is one. Arguments that are not an object, because the model made
    /// a mistake or a limit cut them off, are kept as a string, in the form that Anthropic documents for clients.
    fn end_call(&mut self) {
        let (Some(written), Some(Block::ToolUse { input, .. })) = (self.arguments.take(), self.blocks.last_mut())
        else {
            return;
        };
        *input = WrittenObject::read(&written)
            .unwrap_or_else(|| Map::from_iter([("INVALID_JSON".to_owned(), written.into())]).into());
    }

    /// Ends the message. A call that is still open was cut off by a limit. After complete calls it is left out: clients
    /// run every call of a message, and must not run this one.
    fn into_blocks(mut self) -> Vec<Block> {
        let n_calls = self.blocks.iter().filter(|block| matches!(block, Block::ToolUse { .. })).count();
        if self.arguments.is_some() && n_calls > 1 {
            self.blocks.pop();
        } else {
            self.end_call();
        }
        self.blocks
    }
}

/// Token counts. Cached tokens of the prompt are counted separately.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct MessageUsage {
    #[serde(flatten)]
    counts: Counts,
    cache_creation: CacheCreation,
    inference_geo: Option<()>,
    service_tier: &'static str,
}

/// The part of the usage that the end of a stream repeats.
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

/// Tokens that were cached because the client marked them: always 0, because everything is cached without marks.
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
    /// The usage of a prompt and of the reply so far. The prompt includes `n_cached` tokens, the reply `n_reasoning`.
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

    /// Returns the part that the end of a stream repeats.
    pub(super) fn counts(&self) -> &Counts {
        &self.counts
    }
}

/// Why a message ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stop {
    /// The engine's reason for the end.
    pub reason: FinishReason,
    /// The stop sequence that ended it, if one did.
    pub sequence: Option<String>,
}

impl Stop {
    pub(super) fn reason(&self) -> &'static str {
        match (self.reason, &self.sequence) {
            (FinishReason::Stop, Some(_)) => "stop_sequence",
            (FinishReason::Stop, None) => "end_turn",
            (FinishReason::Length, _) => "max_tokens",
            (FinishReason::ToolCalls, _) => "tool_use",
            (FinishReason::Refusal | FinishReason::ContentFilter, _) => "refusal",
        }
    }
}

impl MessageReply {
    /// A message before its first block.
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

    /// Completes the message with its blocks, possibly none.
    pub fn ended(self, content: MessageContent, stop: Stop) -> Self {
        MessageReply {
            content: content.into_blocks(),
            stop_reason: Some(stop.reason()),
            stop_sequence: stop.sequence,
            ..self
        }
    }
}

/// The reply to `POST /v1/messages/count_tokens`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct TokenCount {
    /// Tokens in the whole prompt, tools included.
    pub input_tokens: u32,
}

//! A whole message, and what it has in common with a streamed one.

use serde::Serialize;

use crate::sequence::FinishReason;

/// A reply, or its beginning.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Reply {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    role: &'static str,
    model: String,
    content: Vec<Block>,
    stop_reason: Option<&'static str>,
    stop_sequence: Option<String>,
    usage: Usage,
}

/// A part of a message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Block {
    /// What the model says.
    Text {
        /// All of it; in a stream's first event of it, nothing.
        text: String,
    },
}

/// Token counts. Those of the prompt that were cached are counted apart from the others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    input_tokens: u32,
    cache_creation_input_tokens: u32,
    cache_read_input_tokens: u32,
    output_tokens: u32,
}

impl Usage {
    /// Of a prompt of which so much was cached, and the reply so far.
    pub fn new(n_prompt: u32, n_cached: u32, n_completion: u32) -> Self {
        Usage {
            input_tokens: n_prompt.saturating_sub(n_cached),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: n_cached.min(n_prompt),
            output_tokens: n_completion,
        }
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

impl Reply {
    /// Before its first text.
    pub fn begun(id: String, model: String, usage: Usage) -> Self {
        let (kind, role) = ("message", "assistant");
        Reply { id, kind, role, model, content: Vec::new(), stop_reason: None, stop_sequence: None, usage }
    }

    /// With all its text. A message that says nothing has no blocks.
    pub fn ended(self, text: String, stop: Stop) -> Self {
        let content = if text.is_empty() { Vec::new() } else { vec![Block::Text { text }] };
        Reply { content, stop_reason: Some(stop.reason()), stop_sequence: stop.sequence, ..self }
    }
}

/// The reply to `count_tokens`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct TokenCount {
    /// Of the whole prompt.
    pub input_tokens: u32,
}

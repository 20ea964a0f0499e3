//! The parts of OpenAI's replies that are checked. They are read into types, without a tree; text is borrowed from the
//! line unless it has escapes.
//!
//! These types are apart from those of `baton_schemas`, so that a mistake there is found here.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::IgnoredAny;

/// A string of a reply.
#[derive(Debug, Deserialize)]
pub(super) struct ReplyText<'a>(#[serde(borrow)] pub(super) Cow<'a, str>);

/// A chunk of a stream, of either API.
#[derive(Debug, Deserialize)]
pub(super) struct CheckedEvent<'a> {
    #[serde(borrow, default)]
    pub(super) id: Option<ReplyText<'a>>,
    #[serde(borrow, default)]
    pub(super) choices: Vec<EventChoice<'a>>,
    #[serde(default)]
    pub(super) usage: Option<ClaimedUsage>,
    #[serde(default)]
    pub(super) error: Option<IgnoredAny>,
}

#[derive(Debug, Deserialize)]
pub(super) struct EventChoice<'a> {
    /// The member `delta` of a chat's chunk.
    #[serde(borrow, default)]
    pub(super) delta: Option<CheckedMessage<'a>>,
    /// The member `message` of a chat's whole reply.
    #[serde(borrow, default)]
    pub(super) message: Option<CheckedMessage<'a>>,
    /// The text of a completion.
    #[serde(borrow, default)]
    pub(super) text: Option<ReplyText<'a>>,
    #[serde(default)]
    pub(super) finish_reason: Option<ClaimedFinish>,
}

#[derive(Debug, Deserialize)]
pub(super) struct CheckedMessage<'a> {
    #[serde(default)]
    pub(super) role: Option<IgnoredAny>,
    #[serde(borrow, default)]
    content: Option<ReplyText<'a>>,
    #[serde(borrow, default)]
    reasoning_content: Option<ReplyText<'a>>,
    /// The same in newer versions of vLLM.
    #[serde(borrow, default)]
    reasoning: Option<ReplyText<'a>>,
    #[serde(default)]
    tool_calls: Option<IgnoredAny>,
}

/// A reply's own count of its tokens.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(super) struct ClaimedUsage {
    pub(super) prompt_tokens: u64,
    #[serde(default)]
    pub(super) completion_tokens: u64,
    #[serde(default)]
    pub(super) total_tokens: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ClaimedFinish {
    Stop,
    Length,
    ToolCalls,
    FunctionCall,
    ContentFilter,
    #[serde(other)]
    Unknown,
}

impl ClaimedFinish {
    /// The reply's word.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            ClaimedFinish::Stop => "stop",
            ClaimedFinish::Length => "length",
            ClaimedFinish::ToolCalls => "tool_calls",
            ClaimedFinish::FunctionCall => "function_call",
            ClaimedFinish::ContentFilter => "content_filter",
            ClaimedFinish::Unknown => "an unknown finish_reason",
        }
    }
}

impl EventChoice<'_> {
    /// The message of a chat.
    pub(super) fn chat(&self) -> Option<&CheckedMessage<'_>> {
        self.delta.as_ref().or(self.message.as_ref())
    }

    /// All text, in order: reasoning first.
    pub(super) fn texts(&self) -> impl Iterator<Item = &str> {
        let chat = self.chat();
        let reasoning = chat.and_then(|message| message.reasoning_content.as_ref().or(message.reasoning.as_ref()));
        let content = chat.and_then(|message| message.content.as_ref());
        let texts = [reasoning, content, self.text.as_ref()];
        texts.into_iter().flatten().map(|text| text.0.as_ref()).filter(|text| !text.is_empty())
    }

    pub(super) fn has_tool_call(&self) -> bool {
        self.chat().is_some_and(|message| message.tool_calls.is_some())
    }
}

//! The reply to `POST /v1/chat/completions`: one object, or a stream of chunks.
//!
//! The order of fields is part of the contract, and tests pin it. Two mistakes that break real clients cannot happen:
//! only [`ChunkChoice::role`] puts a role into a delta, and `finish_reason` is always present.
//!
//! A stream serializes its [`ReplyHead`] once, as [`SharedFields`](crate::json_output::SharedFields), and then a
//! [`ChunkStep`] for each chunk.

use schemars::JsonSchema;
use serde::Serialize;

use super::logprobs::ChoiceLogprobs;
use super::usage::{TimingsReport, Usage};
use crate::sequence::FinishReason;
use crate::tools::ToolCallDelta;

/// The fields that all parts of one reply share.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct ReplyHead {
    /// The reply's id: `chatcmpl-…`, or `cmpl-…` for a plain completion.
    pub id: String,
    /// `chat.completion`, `chat.completion.chunk` or `text_completion`.
    #[schemars(extend("enum" = [ReplyHead::COMPLETION, ReplyHead::CHUNK, ReplyHead::TEXT]))]
    pub object: &'static str,
    /// When the reply began, in Unix seconds.
    pub created: u64,
    /// The model's public name.
    pub model: String,
    /// The build that answers.
    pub system_fingerprint: String,
}

impl ReplyHead {
    /// `object` of a whole reply.
    pub const COMPLETION: &'static str = "chat.completion";
    /// `object` of a chunk.
    pub const CHUNK: &'static str = "chat.completion.chunk";
    /// `object` of a plain completion, whole or in chunks.
    pub const TEXT: &'static str = "text_completion";
}

/// A whole reply to a chat.
pub type ChatCompletion = Completion<Choice>;

/// One event of a chat's stream.
pub type ChatChunk<'a> = CompletionChunk<'a, ChunkChoice<'a>>;

/// A whole reply with choices of type `C`.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "CompletionOf{C}")]
pub struct Completion<C> {
    /// The fields that all parts share.
    #[serde(flatten)]
    pub head: ReplyHead,
    /// The choices, ordered by index.
    pub choices: Vec<C>,
    /// Token counts.
    pub usage: Usage,
    /// llama-server's timings.
    pub timings: TimingsReport,
}

/// One choice of a whole reply.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "ChatChoice")]
pub struct Choice {
    /// From 0.
    pub index: u32,
    /// The model's message.
    pub message: ReplyMessage,
    /// Log-probabilities, if requested.
    pub logprobs: Option<ChoiceLogprobs>,
    /// Why the choice ended.
    #[schemars(extend("enum" = ["stop", "length", "tool_calls", "function_call", "content_filter"]))]
    pub finish_reason: &'static str,
}

/// The assistant's message.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct ReplyMessage {
    /// Always `assistant`.
    #[schemars(extend("const" = "assistant"))]
    pub role: &'static str,
    /// The text; null if the message has only calls, or a refusal.
    pub content: Option<String>,
    /// The words with which the model of an upstream refuses to answer.
    pub refusal: Option<String>,
    /// The model's reasoning before its answer, under DeepSeek's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// The same under OpenRouter's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// The calls of tools.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ReplyToolCall>,
    /// The call of a function, for requests with `functions`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function_call: Option<FunctionCall>,
}

impl ReplyMessage {
    /// A message that is only a text.
    pub fn new(content: String) -> Self {
        ReplyMessage {
            role: "assistant",
            content: Some(content),
            refusal: None,
            reasoning_content: None,
            reasoning: None,
            tool_calls: Vec::new(),
            function_call: None,
        }
    }
}

/// A call of a tool.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "ToolCall")]
pub struct ReplyToolCall {
    /// The id that the tool's message refers to.
    pub id: String,
    /// Always `function`.
    pub r#type: &'static str,
    /// The function and its arguments.
    pub function: FunctionCall,
}

/// A function's name and its arguments.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct FunctionCall {
    /// The name of one of the request's tools.
    pub name: String,
    /// The arguments, as JSON in a string.
    pub arguments: String,
}

impl ReplyToolCall {
    /// A call without its arguments.
    pub fn new(id: String, name: String) -> Self {
        ReplyToolCall { id, r#type: "function", function: FunctionCall { name, arguments: String::new() } }
    }
}

/// One event of a stream with choices of type `C`.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "ChunkOf{C}")]
pub struct CompletionChunk<'a, C> {
    /// The fields that all chunks share.
    #[serde(flatten)]
    pub head: &'a ReplyHead,
    /// The other fields.
    #[serde(flatten)]
    pub step: ChunkStep<'a, C>,
}

/// The fields of a chunk that differ from chunk to chunk.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "ChunkStepOf{C}")]
pub struct ChunkStep<'a, C> {
    /// One choice, or none in the chunk with the usage. Never missing.
    pub choices: &'a [C],
    /// Only with `include_usage`: null in all chunks except the last, as in OpenAI's API.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    /// llama-server's timings, in the last chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timings: Option<TimingsReport>,
}

/// A step of one choice in a stream.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "ChatChunkChoice")]
pub struct ChunkChoice<'a> {
    /// From 0.
    pub index: u32,
    /// The new part.
    pub delta: ReplyDelta<'a>,
    /// Log-probabilities of the tokens in this delta, if requested.
    pub logprobs: Option<ChoiceLogprobs>,
    /// Why the choice ended; null except in its last chunk.
    #[schemars(extend("enum" = ["stop", "length", "tool_calls", "function_call", "content_filter", null]))]
    pub finish_reason: Option<&'static str>,
}

/// The new part of a choice.
#[derive(Debug, Clone, Default, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "ChatDelta")]
pub struct ReplyDelta<'a> {
    /// `assistant`, only in a choice's first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// More text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<&'a str>,
    /// More of the model's reasoning, under DeepSeek's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<&'a str>,
    /// The same under OpenRouter's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<&'a str>,
    /// More of a refusal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refusal: Option<&'a str>,
    /// More of a call.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Vec<ToolCallFragment<'a>>")]
    pub tool_calls: Option<[ToolCallFragment<'a>; 1]>,
    /// More of a function's call, for requests with `functions`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function_call: Option<FunctionFragment<'a>>,
}

/// A step of a call. SDKs concatenate the strings of fragments with the same index, so only arguments come repeatedly.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ToolCallFragment<'a> {
    /// The index of the call in the message, from 0.
    pub index: u32,
    /// The call's id, only in its first fragment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<&'a str>,
    /// `function`, only in the call's first fragment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r#type: Option<&'static str>,
    /// The new part of the function.
    pub function: FunctionFragment<'a>,
}

/// The new part of a call's function.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, JsonSchema)]
pub struct FunctionFragment<'a> {
    /// The function's name, only in the call's first fragment.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    /// More of the arguments' JSON; empty in the first fragment.
    pub arguments: &'a str,
}

impl<'a> ToolCallFragment<'a> {
    /// Converts a step of a call. `None` for its end, which OpenAI's API does not report.
    pub fn of(call: &'a ToolCallDelta) -> Option<Self> {
        match call {
            ToolCallDelta::Begin { index, id, name } => {
                let function = FunctionFragment { name: Some(name), arguments: "" };
                Some(ToolCallFragment { index: *index, id: Some(id), r#type: Some("function"), function })
            }
            ToolCallDelta::Arguments { index, fragment } => {
                let function = FunctionFragment { name: None, arguments: fragment };
                Some(ToolCallFragment { index: *index, function, ..ToolCallFragment::default() })
            }
            ToolCallDelta::End { .. } => None,
        }
    }
}

impl<'a> ChunkChoice<'a> {
    /// A choice's first chunk.
    pub fn role(index: u32) -> Self {
        let delta = ReplyDelta { role: Some("assistant"), content: Some(""), ..ReplyDelta::default() };
        ChunkChoice { index, delta, logprobs: None, finish_reason: None }
    }

    /// More text.
    pub fn content(index: u32, text: &'a str, logprobs: Option<ChoiceLogprobs>) -> Self {
        let delta = ReplyDelta { content: Some(text), ..ReplyDelta::default() };
        ChunkChoice { index, delta, logprobs, finish_reason: None }
    }

    /// More of the model's reasoning.
    pub fn reasoning(index: u32, text: &'a str) -> Self {
        let delta = ReplyDelta { reasoning_content: Some(text), reasoning: Some(text), ..ReplyDelta::default() };
        ChunkChoice { index, delta, logprobs: None, finish_reason: None }
    }

    /// More of a refusal.
    pub fn refusal(index: u32, text: &'a str) -> Self {
        let delta = ReplyDelta { refusal: Some(text), ..ReplyDelta::default() };
        ChunkChoice { index, delta, logprobs: None, finish_reason: None }
    }

    /// More of a call.
    pub fn tool_call(index: u32, fragment: ToolCallFragment<'a>) -> Self {
        let delta = ReplyDelta { tool_calls: Some([fragment]), ..ReplyDelta::default() };
        ChunkChoice { index, delta, logprobs: None, finish_reason: None }
    }

    /// More of a function's call.
    pub fn function_call(index: u32, fragment: FunctionFragment<'a>) -> Self {
        let delta = ReplyDelta { function_call: Some(fragment), ..ReplyDelta::default() };
        ChunkChoice { index, delta, logprobs: None, finish_reason: None }
    }

    /// A choice's last chunk, with [`finish_reason`] or [`function_finish_reason`].
    pub fn finish(index: u32, finish_reason: &'static str) -> Self {
        ChunkChoice { index, delta: ReplyDelta::default(), logprobs: None, finish_reason: Some(finish_reason) }
    }
}

/// Returns OpenAI's word for why a choice ended.
pub fn finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        // A refusal is a message of its own, not an end of its own.
        FinishReason::Stop | FinishReason::Refusal => "stop",
        FinishReason::Length => "length",
        FinishReason::ToolCalls => "tool_calls",
        FinishReason::ContentFilter => "content_filter",
    }
}

/// Returns the word for requests with `functions`.
pub fn function_finish_reason(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::ToolCalls => "function_call",
        other => finish_reason(other),
    }
}

#[cfg(test)]
mod tests {
    use std::slice;

    use bytes::BytesMut;

    use super::*;
    use crate::json_output::{SharedFields, write_event};
    use crate::openai::error::{ErrorBody, ErrorEnvelope, ErrorKind};
    use crate::openai::logprobs::TokenLogprob;
    use crate::sequence::{Logprobs, Timings};

    fn head(object: &'static str) -> ReplyHead {
        ReplyHead {
            id: "chatcmpl-1".into(),
            object,
            created: 1_700_000_000,
            model: "m".into(),
            system_fingerprint: "baton-0".into(),
        }
    }

    fn logprobs() -> Option<ChoiceLogprobs> {
        let token = TokenLogprob::new(b"Hi", &Logprobs { chosen: -0.5, rank: None, top: vec![] });
        Some(ChoiceLogprobs { content: vec![token], refusal: None })
    }

    #[test]
    fn a_whole_reply_has_openais_shape_and_order() {
        let reply = ChatCompletion {
            head: head(ReplyHead::COMPLETION),
            choices: vec![Choice {
                index: 0,
                message: ReplyMessage::new("Hi".into()),
                logprobs: None,
                finish_reason: finish_reason(FinishReason::Stop),
            }],
            usage: Usage::new(3, 1, 1),
            timings: TimingsReport::default(),
        };
        assert_eq!(serde_json::to_string_pretty(&reply).unwrap() + "\n", include_str!("golden/chat_completion.json"),);
    }

    #[test]
    fn a_stream_has_openais_shape_and_order() {
        let head = head(ReplyHead::CHUNK);
        let shared = SharedFields::of(&head);
        let mut transcript = BytesMut::new();
        let mut write = |step: ChunkStep<'_, ChunkChoice<'_>>| {
            let before = transcript.len();
            shared.write_event(&mut transcript, &step);
            // The schema is that of the whole chunk.
            let whole = serde_json::to_string(&ChatChunk { head: &head, step }).unwrap();
            assert_eq!(transcript[before..], *format!("data: {whole}\n\n").as_bytes());
        };
        let begin = ToolCallDelta::Begin { index: 0, id: "call_1".into(), name: "f".into() };
        let arguments = ToolCallDelta::Arguments { index: 0, fragment: "{\"a\":".into() };
        let fragment = |call| ChunkChoice::tool_call(0, ToolCallFragment::of(call).unwrap());
        assert_eq!(ToolCallFragment::of(&ToolCallDelta::End { index: 0 }), None);
        let timings = Timings {
            queue_ms: 0.0,
            prompt_n: 2,
            prompt_ms: 4.0,
            predicted_n: 2,
            predicted_ms: 5.0,
            ..Timings::default()
        };
        let steps = [
            ChunkChoice::role(0),
            ChunkChoice::content(0, "Hi", logprobs()),
            ChunkChoice::content(0, " \u{1F600}\n", None),
            ChunkChoice::reasoning(0, "hm"),
            fragment(&begin),
            fragment(&arguments),
            ChunkChoice::finish(0, finish_reason(FinishReason::ToolCalls)),
            ChunkChoice::finish(0, finish_reason(FinishReason::Length)),
        ];
        for choice in &steps {
            write(ChunkStep { choices: slice::from_ref(choice), usage: Some(None), timings: None });
        }
        let finish = ChunkChoice::finish(0, finish_reason(FinishReason::Stop));
        write(ChunkStep { choices: &[finish], usage: None, timings: None });
        let usage = Some(Some(Usage::new(3, 1, 2)));
        write(ChunkStep { choices: &[], usage, timings: Some(TimingsReport::new(1, &timings, None)) });
        let error = ErrorEnvelope { error: ErrorBody::new(ErrorKind::Unavailable, "The engine stopped.") };
        write_event(&mut transcript, &error);
        assert_eq!(transcript, include_str!("golden/chat_chunks.sse"));
    }
}

//! The replies to `/api/chat` and `/api/generate`: the lines of a stream, or one object. The last line, or the object,
//! has `done: true`.

use schemars::JsonSchema;
use serde::Serialize;

use super::common::LoadOnly;
use crate::openai::logprobs::TokenLogprob;
use crate::sequence::{FinishReason, Timings, Token};
use crate::written_object::WrittenObject;

/// One line of a stream, or a whole reply.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "OllamaLine")]
pub struct OllamaReplyLine<'a> {
    /// The model, as the client wrote it.
    pub model: &'a str,
    /// When the line was written, in RFC 3339.
    pub created_at: &'a str,
    /// The new text; in a whole reply, all of it.
    #[serde(flatten)]
    pub text: Text<'a>,
    /// Log-probabilities of the tokens in this line, if requested, in OpenAI's shape.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub logprobs: Vec<TokenLogprob>,
    /// True in the last line. A stream without such a line has failed.
    pub done: bool,
    /// The fields that only the last line has.
    #[serde(flatten)]
    pub end: Option<OllamaEnd>,
}

/// The text of a line. Each route has its own name for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "OllamaText")]
pub enum Text<'a> {
    /// In `/api/chat`.
    Message {
        /// Always `assistant`.
        role: &'static str,
        /// The text; may be empty.
        content: &'a str,
        /// The model's reasoning before its answer.
        #[serde(skip_serializing_if = "str::is_empty")]
        thinking: &'a str,
        /// Whole calls: Ollama does not stream their arguments.
        #[serde(skip_serializing_if = "<[_]>::is_empty")]
        tool_calls: &'a [OllamaToolCall],
    },
    /// In `/api/generate`.
    #[serde(untagged)]
    Response {
        /// The text; may be empty.
        response: &'a str,
        /// The model's reasoning before its answer.
        #[serde(skip_serializing_if = "str::is_empty")]
        thinking: &'a str,
    },
}

impl<'a> Text<'a> {
    /// The text of a line of `/api/chat`.
    pub fn message(content: &'a str) -> Self {
        Text::Message { role: "assistant", content, thinking: "", tool_calls: &[] }
    }

    /// The text of a line of `/api/generate`.
    pub fn response(response: &'a str) -> Self {
        Text::Response { response, thinking: "" }
    }
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct OllamaToolCall {
    /// The id that the tool's message can refer to.
    pub id: String,
    /// The function and its arguments.
    pub function: OllamaFunctionCall,
}

/// The function of an [`OllamaToolCall`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct OllamaFunctionCall {
    /// The index of the call in the message, from 0.
    pub index: u32,
    /// The name of one of the request's tools.
    pub name: String,
    /// The arguments, as an object. OpenAI's API has a string here.
    pub arguments: WrittenObject,
}

/// Why a reply ended, and what it took.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct OllamaEnd {
    /// `stop`, `length`, `load` or `unload`.
    #[schemars(extend("enum" = ["stop", "length", "load", "unload"]))]
    pub done_reason: &'static str,
    /// The tokens of prompt and reply. A later request to `/api/generate` continues from them. Only from models that
    /// run here, and not with `raw`, `suffix` or images.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub context: Vec<Token>,
    /// The value of `x-baton-route`, if the head of the stream left before it was known. Not in Ollama.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub route: Option<String>,
    /// Missing if nothing was generated.
    #[serde(flatten)]
    pub metrics: Option<Metrics>,
}

impl OllamaEnd {
    /// The end of a generation.
    pub fn generated(reason: FinishReason, metrics: Metrics) -> Self {
        let done_reason = match reason {
            // Ollama has no reason of its own for tool calls and refusals.
            FinishReason::Stop | FinishReason::ToolCalls | FinishReason::Refusal => "stop",
            // Nor for a filter. A cut reply must not pass as a whole one.
            FinishReason::Length | FinishReason::ContentFilter => "length",
        };
        OllamaEnd { done_reason, context: Vec::new(), route: None, metrics: Some(metrics) }
    }

    /// The end of a reply to a request that only loads or unloads the model.
    pub fn loaded(load_only: LoadOnly) -> Self {
        OllamaEnd { done_reason: load_only.done_reason(), context: Vec::new(), route: None, metrics: None }
    }
}

/// Token counts, and durations in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "OllamaMetrics")]
pub struct Metrics {
    /// Time from the request's arrival to the end of the reply.
    pub total_duration: u64,
    /// Time before the prompt was computed. The model is loaded already, so this is the wait for a slot.
    pub load_duration: u64,
    /// Tokens in the prompt, including cached ones.
    pub prompt_eval_count: u32,
    /// Time to compute the tokens that were not cached.
    pub prompt_eval_duration: u64,
    /// Generated tokens.
    pub eval_count: u32,
    /// Time from the first generated token to the last.
    pub eval_duration: u64,
}

impl Metrics {
    /// The metrics of a reply that took `total_ms` in all.
    pub fn new(total_ms: f64, n_prompt: u32, n_completion: u32, timings: &Timings) -> Self {
        Metrics {
            total_duration: nanoseconds(total_ms),
            load_duration: nanoseconds(timings.queue_ms),
            prompt_eval_count: n_prompt,
            prompt_eval_duration: nanoseconds(timings.prompt_ms),
            eval_count: n_completion,
            eval_duration: nanoseconds(timings.predicted_ms),
        }
    }
}

/// Converts milliseconds, saturating. Negative numbers and NaN become 0.
fn nanoseconds(ms: f64) -> u64 {
    (ms * 1e6).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ollama::OllamaErrorReply;
    use crate::openai::{ErrorBody, ErrorKind};
    use crate::sequence::Logprobs;

    fn line(text: Text<'_>) -> OllamaReplyLine<'_> {
        let created_at = "2026-01-02T03:04:05.678901Z";
        OllamaReplyLine { model: "m", created_at, text, logprobs: vec![], done: false, end: None }
    }

    #[test]
    fn streams_have_ollamas_shape_and_order() {
        let timings = Timings {
            queue_ms: 0.5,
            prompt_n: 2,
            prompt_ms: 4.0,
            predicted_n: 2,
            predicted_ms: 5.25,
            ..Timings::default()
        };
        let end = |reason| Some(OllamaEnd::generated(reason, Metrics::new(12.5, 3, 2, &timings)));
        let chat = |text: &'static str| line(Text::message(text));
        let plain = |text: &'static str| line(Text::response(text));
        let function =
            OllamaFunctionCall { index: 0, name: "f".into(), arguments: WrittenObject::read("{\"a\":1}").unwrap() };
        let tool_calls = &[OllamaToolCall { id: "call_1".into(), function }];
        let calling = Text::Message { role: "assistant", content: "", thinking: "hm", tool_calls };
        let logprobs = vec![TokenLogprob::new(b"Hi", &Logprobs { chosen: -0.5, rank: None, top: vec![] })];
        let lines = [
            chat("Hi"),
            OllamaReplyLine { logprobs, ..chat(" \u{1F600}\n") },
            OllamaReplyLine { done: true, end: end(FinishReason::Stop), ..chat("") },
            line(calling),
            plain("Hi"),
            line(Text::Response { response: "", thinking: "hm" }),
            OllamaReplyLine { done: true, end: end(FinishReason::Length), ..plain("") },
            OllamaReplyLine { done: true, end: Some(OllamaEnd::loaded(LoadOnly::Load)), ..chat("") },
            OllamaReplyLine { done: true, end: Some(OllamaEnd::loaded(LoadOnly::Unload)), ..plain("") },
        ];
        let mut transcript: String = lines.iter().map(|line| serde_json::to_string(line).unwrap() + "\n").collect();
        transcript += &serde_json::to_string(&OllamaErrorReply::from(ErrorBody::new(
            ErrorKind::Unavailable,
            "The engine stopped.",
        )))
        .unwrap();
        assert_eq!(transcript + "\n", include_str!("golden/lines.ndjson"));
    }

    #[test]
    fn a_duration_is_never_nonsense() {
        assert_eq!(nanoseconds(1.5), 1_500_000);
        assert_eq!(nanoseconds(-1.0), 0);
        assert_eq!(nanoseconds(f64::NAN), 0);
        assert_eq!(nanoseconds(f64::INFINITY), u64::MAX);
    }
}

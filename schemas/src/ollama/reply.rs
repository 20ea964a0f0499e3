//! The replies of `/api/chat` and `/api/generate`: the lines of a stream. The last line, or the only one, has
//! `done: true`.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value};

use super::common::LoadOnly;
use crate::openai::logprobs::TokenLogprob;
use crate::sequence::{FinishReason, Timings, Token};

/// One line, or a whole reply.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[schemars(rename = "OllamaLine")]
pub struct OllamaReplyLine<'a> {
    /// The model, as the client wrote it.
    pub model: &'a str,
    /// RFC 3339.
    pub created_at: String,
    /// What is new; in a whole reply, everything.
    #[serde(flatten)]
    pub text: Text,
    /// Of the tokens in this line, if asked for. The shape is OpenAI's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub logprobs: Vec<TokenLogprob>,
    /// This is the last line. A stream without a last line has failed.
    pub done: bool,
    /// What the last line says.
    #[serde(flatten)]
    pub end: Option<OllamaEnd>,
}

/// The text of a line, under the name that its route has for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
#[schemars(rename = "OllamaText")]
pub enum Text {
    /// Of `/api/chat`.
    Message {
        /// Always `assistant`.
        role: &'static str,
        /// May be empty.
        content: String,
        /// What the model thought before it answered.
        #[serde(skip_serializing_if = "String::is_empty")]
        thinking: String,
        /// Whole calls: Ollama does not cut them up.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        tool_calls: Vec<OllamaToolCall>,
    },
    /// Of `/api/generate`.
    #[serde(untagged)]
    Response {
        /// May be empty.
        response: String,
        /// What the model thought before it answered.
        #[serde(skip_serializing_if = "String::is_empty")]
        thinking: String,
    },
}

impl Text {
    /// The text of a chat.
    pub fn message(content: String) -> Self {
        Text::Message { role: "assistant", content, thinking: String::new(), tool_calls: Vec::new() }
    }

    /// The text of a generation.
    pub fn response(response: String) -> Self {
        Text::Response { response, thinking: String::new() }
    }
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct OllamaToolCall {
    /// By which the tool's message may refer to it.
    pub id: String,
    /// Which one, with what.
    pub function: OllamaFunctionCall,
}

/// Part of [`OllamaToolCall`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct OllamaFunctionCall {
    /// Its place among the message's calls.
    pub index: u32,
    /// One of the request's tools.
    pub name: String,
    /// An object, unlike OpenAI's.
    pub arguments: Map<String, Value>,
}

/// Why a reply ended, and where its time went.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct OllamaEnd {
    /// `stop`, `length`, `load` or `unload`.
    #[schemars(extend("enum" = ["stop", "length", "load", "unload"]))]
    pub done_reason: &'static str,
    /// The tokens of prompt and reply, with which `/api/generate` goes on where they are sent back. Of one of our own
    /// models, and neither with `raw`, `suffix` nor images.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub context: Vec<Token>,
    /// Absent where nothing was generated.
    #[serde(flatten)]
    pub metrics: Option<Metrics>,
}

impl OllamaEnd {
    /// The end of a generation.
    pub fn generated(reason: FinishReason, metrics: Metrics) -> Self {
        let done_reason = match reason {
            // Ollama has no word of its own for calls.
            FinishReason::Stop | FinishReason::ToolCalls => "stop",
            FinishReason::Length => "length",
        };
        OllamaEnd { done_reason, context: Vec::new(), metrics: Some(metrics) }
    }

    /// The answer to a request without anything to answer.
    pub fn loaded(wish: LoadOnly) -> Self {
        OllamaEnd { done_reason: wish.done_reason(), context: Vec::new(), metrics: None }
    }
}

/// Counts, and durations in nanoseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, JsonSchema)]
#[schemars(rename = "OllamaMetrics")]
pub struct Metrics {
    /// From the request's arrival to its end.
    pub total_duration: u64,
    /// Before the prompt was begun with. A model is loaded already, so that is waiting for a slot.
    pub load_duration: u64,
    /// Tokens in the prompt, the cached ones included.
    pub prompt_eval_count: u32,
    /// Computing those that were not cached.
    pub prompt_eval_duration: u64,
    /// Tokens generated.
    pub eval_count: u32,
    /// From the first of them to the last.
    pub eval_duration: u64,
}

impl Metrics {
    /// The metrics of a reply whose whole life was `total_ms`.
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

/// Saturates; what is negative or no number is 0.
fn nanoseconds(ms: f64) -> u64 {
    (ms * 1e6).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ollama::OllamaErrorReply;
    use crate::openai::{ErrorBody, ErrorKind};
    use crate::sequence::Logprobs;

    fn line(text: Text) -> OllamaReplyLine<'static> {
        let created_at = "2026-01-02T03:04:05.678901Z".to_owned();
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
        let chat = |text: &str| line(Text::message(text.into()));
        let plain = |text: &str| line(Text::response(text.into()));
        let function =
            OllamaFunctionCall { index: 0, name: "f".into(), arguments: Map::from_iter([("a".into(), 1.into())]) };
        let tool_calls = vec![OllamaToolCall { id: "call_1".into(), function }];
        let calling = Text::Message { role: "assistant", content: String::new(), thinking: "hm".into(), tool_calls };
        let logprobs = vec![TokenLogprob::new(b"Hi", &Logprobs { chosen: -0.5, top: vec![] })];
        let lines = [
            chat("Hi"),
            OllamaReplyLine { logprobs, ..chat(" \u{1F600}\n") },
            OllamaReplyLine { done: true, end: end(FinishReason::Stop), ..chat("") },
            line(calling),
            plain("Hi"),
            line(Text::Response { response: String::new(), thinking: "hm".into() }),
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

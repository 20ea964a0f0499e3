//! Data and helpers shared by the lines of one reply.

use std::borrow::Cow;
use std::fmt::Display;
use std::time::Instant;

use axum::Json;
use axum::response::{IntoResponse, Response};
use baton_reply::TokenLogprobs;
use baton_schemas::FinishReason;
use baton_schemas::ollama::reply::{Metrics, OllamaEnd, OllamaFunctionCall, OllamaReplyLine, OllamaToolCall, Text};
use baton_schemas::openai::logprobs::TokenLogprob;
use baton_schemas::tools;
use baton_schemas::written_object::WrittenObject;

use crate::http::reply::reply_totals::ReplyTotals;

/// The route whose format a reply uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OllamaRoute {
    Chat,
    Generate,
}

#[derive(Debug, Clone, Default)]
pub(super) struct LineContent<'a> {
    pub(super) text: Cow<'a, str>,
    pub(super) thinking: Cow<'a, str>,
    /// Only in a chat: `/api/generate` has no tools.
    pub(super) calls: Vec<OllamaToolCall>,
}

impl<'a> LineContent<'a> {
    pub(super) fn text(text: impl Into<Cow<'a, str>>) -> Self {
        LineContent { text: text.into(), ..LineContent::default() }
    }

    pub(super) fn thinking(thinking: &'a str) -> Self {
        LineContent { thinking: thinking.into(), ..LineContent::default() }
    }

    /// Writes a tool call. Ollama's format allows only objects as arguments, so anything else that the model wrote
    /// becomes text, as in Ollama.
    pub(super) fn call(call: tools::ToolCall) -> Self {
        match WrittenObject::read(&call.arguments) {
            Some(arguments) => {
                let function = OllamaFunctionCall { index: call.index, name: call.name, arguments };
                LineContent { calls: vec![OllamaToolCall { id: call.id, function }], ..LineContent::default() }
            }
            None => LineContent::unfinished(&call),
        }
    }

    /// Writes a tool call that was cut off, as text.
    pub(super) fn unfinished(call: &tools::ToolCall) -> Self {
        LineContent::text(format!("{{\"name\": \"{}\", \"arguments\": {}", call.name, call.arguments))
    }

    /// Appends later content.
    pub(super) fn append(&mut self, more: LineContent<'_>) {
        self.text.to_mut().push_str(&more.text);
        self.thinking.to_mut().push_str(&more.thinking);
        self.calls.extend(more.calls);
    }
}

/// The parts of a request that its reply depends on.
#[derive(Debug, Clone)]
pub(super) struct LineShape {
    pub(super) route: OllamaRoute,
    /// The model's name as the client wrote it.
    pub(super) model: String,
    /// The time when the request arrived.
    pub(super) since: Instant,
}

impl LineShape {
    /// A line that is not the last, with the time when it is written.
    pub(super) fn line<'a>(
        &'a self,
        created_at: &'a str,
        said: &'a LineContent<'_>,
        tokens: &[TokenLogprobs],
    ) -> OllamaReplyLine<'a> {
        let LineContent { text, thinking, calls } = said;
        let text = match self.route {
            OllamaRoute::Chat => Text::Message { role: "assistant", content: text, thinking, tool_calls: calls },
            OllamaRoute::Generate => Text::Response { response: text, thinking },
        };
        let logprobs = tokens.iter().map(|token| TokenLogprob::new(&token.bytes, &token.logprobs)).collect();
        OllamaReplyLine { model: &self.model, created_at, text, logprobs, done: false, end: None }
    }

    /// A whole reply.
    pub(super) fn whole(&self, said: &LineContent<'_>, tokens: &[TokenLogprobs], end: OllamaEnd) -> Response {
        let created_at = now().to_string();
        let line = self.line(&created_at, said, tokens);
        Json(OllamaReplyLine { done: true, end: Some(end), ..line }).into_response()
    }

    /// Ollama's word for the finish reason.
    pub(super) fn end(&self, reason: FinishReason, totals: &ReplyTotals) -> OllamaEnd {
        let total_ms = self.since.elapsed().as_secs_f64() * 1e3;
        let metrics = Metrics::new(total_ms, totals.counts.n_prompt, totals.counts.n_completion, &totals.timings);
        OllamaEnd { context: totals.context.clone(), ..OllamaEnd::generated(reason, metrics) }
    }
}

/// The current time. Its text is RFC 3339, in UTC.
pub(super) fn now() -> impl Display {
    jiff::Timestamp::now()
}

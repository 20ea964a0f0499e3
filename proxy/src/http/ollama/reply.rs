//! What the lines of one reply have in common.

use std::time::Instant;

use baton_reply::TokenLogprobs;
use baton_schemas::FinishReason;
use baton_schemas::ollama::reply::{End, FunctionCall, Line, Metrics, Text, ToolCall};
use baton_schemas::openai::logprobs::TokenLogprob;
use baton_schemas::tools;

use crate::http::tally::Tally;

/// Which route's words a reply uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    /// `/api/chat`.
    Chat,
    /// `/api/generate`.
    Generate,
}

/// What a line says.
#[derive(Debug, Clone, Default)]
pub(super) struct Said {
    pub(super) text: String,
    pub(super) thinking: String,
    /// In a chat alone: there are no tools elsewhere.
    pub(super) calls: Vec<ToolCall>,
}

impl Said {
    pub(super) fn text(text: String) -> Self {
        Said { text, ..Said::default() }
    }

    /// A call. Ollama's form holds objects alone: what the model wrote instead of one is text, as it is in Ollama.
    pub(super) fn call(call: tools::ToolCall) -> Self {
        match serde_json::from_str(&call.arguments) {
            Ok(arguments) => {
                let function = FunctionCall { index: call.index, name: call.name, arguments };
                Said { calls: vec![ToolCall { id: call.id, function }], ..Said::default() }
            }
            Err(_) => Said::unfinished(&call),
        }
    }

    /// A call that was cut off.
    pub(super) fn unfinished(call: &tools::ToolCall) -> Self {
        Said::text(format!("{{\"name\": \"{}\", \"arguments\": {}", call.name, call.arguments))
    }

    /// Adds what came later.
    pub(super) fn append(&mut self, more: Said) {
        self.text += &more.text;
        self.thinking += &more.thinking;
        self.calls.extend(more.calls);
    }
}

/// What of a request its reply depends on.
#[derive(Debug, Clone)]
pub(super) struct ReplyShape {
    pub(super) route: Route,
    /// As the client wrote it.
    pub(super) model: String,
    /// When the request came.
    pub(super) since: Instant,
}

impl ReplyShape {
    /// A line that others follow.
    pub(super) fn line(&self, said: Said, tokens: &[TokenLogprobs]) -> Line<'_> {
        let Said { text, thinking, calls } = said;
        let text = match self.route {
            Route::Chat => Text::Message { role: "assistant", content: text, thinking, tool_calls: calls },
            Route::Generate => Text::Response { response: text, thinking },
        };
        let logprobs = tokens.iter().map(|token| TokenLogprob::new(&token.bytes, &token.logprobs)).collect();
        Line { model: &self.model, created_at: now(), text, logprobs, done: false, end: None }
    }

    /// The last line, or the only one.
    pub(super) fn last(&self, said: Said, tokens: &[TokenLogprobs], end: End) -> Line<'_> {
        Line { done: true, end: Some(end), ..self.line(said, tokens) }
    }

    /// How a generation ended.
    pub(super) fn end(&self, reason: FinishReason, tally: &Tally) -> End {
        let total_ms = self.since.elapsed().as_secs_f64() * 1e3;
        let metrics = Metrics::new(total_ms, tally.n_prompt, tally.n_completion, &tally.timings);
        End { context: tally.context.clone(), ..End::generated(reason, metrics) }
    }
}

/// RFC 3339, in UTC.
fn now() -> String {
    jiff::Timestamp::now().to_string()
}

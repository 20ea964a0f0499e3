//! What the lines of one reply have in common.

use std::time::Instant;

use baton_schemas::FinishReason;
use baton_schemas::ollama::reply::{End, Line, Metrics, Text};
use baton_schemas::openai::logprobs::TokenLogprob;

use crate::generate::TokenLogprobs;
use crate::http::tally::Tally;

/// Which route's words a reply uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    /// `/api/chat`.
    Chat,
    /// `/api/generate`.
    Generate,
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
    pub(super) fn line(&self, text: String, tokens: &[TokenLogprobs]) -> Line<'_> {
        let text = match self.route {
            Route::Chat => Text::message(text),
            Route::Generate => Text::Response(text),
        };
        let logprobs = tokens.iter().map(|token| TokenLogprob::new(&token.bytes, &token.logprobs)).collect();
        Line { model: &self.model, created_at: now(), text, logprobs, done: false, end: None }
    }

    /// The last line, or the only one.
    pub(super) fn last(&self, text: String, tokens: &[TokenLogprobs], end: End) -> Line<'_> {
        Line { done: true, end: Some(end), ..self.line(text, tokens) }
    }

    /// How a generation ended.
    pub(super) fn end(&self, reason: FinishReason, tally: &Tally) -> End {
        let total_ms = self.since.elapsed().as_secs_f64() * 1e3;
        End::generated(reason, Metrics::new(total_ms, tally.n_prompt, tally.n_completion, &tally.timings))
    }
}

/// RFC 3339, in UTC.
fn now() -> String {
    jiff::Timestamp::now().to_string()
}

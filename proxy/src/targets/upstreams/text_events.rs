//! Turns one choice's reply from an upstream into events: finds stop strings, ends a reply after its only call, and counts
//! tokens.

use baton_engines::upstream::{TextDelta, TextEnd, TextToken, TextUsage, UpstreamError, UpstreamFailure};
use baton_reply::tools::PartContent;
use baton_reply::{PartReply, ReplyPart, TokenLogprobs};
use baton_schemas::tools::ToolCallDelta;
use baton_schemas::{FinishReason, GenerateRequest};
use futures::future::BoxFuture;
use futures::{Stream, StreamExt};

use super::StartedChoice;
use super::client_error::broken_reply;
use super::prompt_estimate::tokens_of;
use crate::choice_clock::ChoiceClock;
use crate::error::RequestError;
use crate::reply_event::{EventKind, ReplyEvent};

/// The measurements of a reply.
pub(crate) struct ReplyMeter {
    /// Counts and times tokens.
    pub(crate) clock: ChoiceClock,
    /// The estimated number of the prompt's tokens.
    pub(crate) n_prompt: u32,
}

/// The events of a choice, once it has started. Dropping the stream closes the connection.
pub(crate) fn text_events(
    choice: u32,
    started: BoxFuture<'static, Result<StartedChoice, RequestError>>,
    request: &GenerateRequest,
    ReplyMeter { mut clock, n_prompt }: ReplyMeter,
) -> impl Stream<Item = Result<ReplyEvent, RequestError>> + Send + use<> {
    let mut reader = ChoiceReader::new(request);
    async_stream::try_stream! {
        let StartedChoice { first, mut rest, server, asked, span } = started.await?;
        // Ends with the reply.
        let _span = span;
        clock.started_at(asked);
        yield EventKind::Started { n_cached: 0 }.of(choice);
        let mut next = Some(first);
        loop {
            let delta = match next.take() {
                Some(delta) => delta,
                None => match rest.next().await {
                    Some(Ok(delta)) => delta,
                    ended => {
                        let cut = || UpstreamError::Failed {
                            failure: UpstreamFailure::CutShort,
                            detail: "the reply stopped".to_owned(),
                        };
                        let error = ended.and_then(Result::err).unwrap_or_else(cut);
                        if let UpstreamError::Failed { failure, .. } = &error {
                            server.failed(*failure);
                        }
                        tracing::debug!(upstream = server.name(), %error, "an upstream's reply broke off");
                        Err(broken_reply(error))?
                    }
                },
            };
            let step = reader.read(delta, &mut clock);
            for part in step.parts {
                yield EventKind::from(part).of(choice);
            }
            let Some(TextEnd { reason, usage }) = step.end else { continue };
            if let Some(n_completion) = usage.n_completion {
                clock.correct(n_completion);
            }
            if let Some(n_reported) = usage.n_prompt.filter(|_| choice == 0) {
                let n_cached = usage.n_cached.unwrap_or(0).min(n_reported);
                clock.n_computed = n_reported - n_cached;
                yield EventKind::Usage { n_estimated: n_prompt, n_prompt: n_reported, n_cached }.of(choice);
            }
            let finished = EventKind::Finished {
                reason,
                stop: reader.reply.stop_string(),
                n_completion: clock.n_tokens,
                n_reasoning: usage.n_reasoning.unwrap_or(reader.reply.n_reasoning()).min(clock.n_tokens),
                timings: clock.timings(),
            };
            yield finished.of(choice);
            break;
        }
    }
}

/// The parts of one delta.
#[derive(Default)]
struct ChoiceStep {
    parts: Vec<ReplyPart>,
    /// Set once the choice is complete.
    end: Option<TextEnd>,
}

struct ChoiceReader {
    reply: PartReply,
    /// Alternatives that the client requested with each token.
    n_top: usize,
    /// The client requested no token (`max_tokens: 0`), so the reply is dropped.
    wants_no_token: bool,
    n_bytes: usize,
    n_reasoning_bytes: usize,
}

impl ChoiceReader {
    fn new(request: &GenerateRequest) -> ChoiceReader {
        ChoiceReader {
            reply: PartReply::new(request.stop.clone(), !request.tools.parallel),
            n_top: request.top_logprobs.unwrap_or(0) as usize,
            wants_no_token: request.max_tokens == Some(0),
            n_bytes: 0,
            n_reasoning_bytes: 0,
        }
    }

    fn read(&mut self, delta: TextDelta, clock: &mut ChoiceClock) -> ChoiceStep {
        if self.wants_no_token {
            return ChoiceStep { parts: Vec::new(), end: end_of_prompt(delta) };
        }
        let part = match delta {
            TextDelta::Finished(TextEnd { reason, usage }) => {
                let step = self.reply.finish();
                let reason = self.reply.reason(reason);
                return ChoiceStep { parts: step.parts, end: Some(TextEnd { reason, usage }) };
            }
            TextDelta::Text { text, tokens } => {
                let tokens = tokens.into_iter().map(|token| self.token(token)).collect();
                ReplyPart { content: PartContent::Text(text), tokens }
            }
            TextDelta::Reasoning(text) => ReplyPart { content: PartContent::Reasoning(text), tokens: Vec::new() },
            TextDelta::Call(call) => ReplyPart { content: PartContent::Call(call), tokens: Vec::new() },
        };
        self.count(&part, clock);
        let step = self.reply.feed(part);
        // The reply ends here and not at the upstream, so the upstream reports no counts.
        let end = || TextEnd { reason: self.reply.reason(FinishReason::Stop), usage: self.estimated_usage(clock) };
        ChoiceStep { parts: step.parts, end: step.stopped.then(end) }
    }

    /// Counts one token for each piece, or the tokens that the upstream lists.
    fn count(&mut self, ReplyPart { content, tokens }: &ReplyPart, clock: &mut ChoiceClock) {
        let n_bytes = match content {
            PartContent::Text(text) | PartContent::Reasoning(text) => text.len(),
            PartContent::Call(ToolCallDelta::Begin { name, .. }) => name.len(),
            PartContent::Call(ToolCallDelta::Arguments { fragment, .. }) => fragment.len(),
            PartContent::Call(ToolCallDelta::End { .. }) => return,
        };
        self.n_bytes += n_bytes;
        if matches!(content, PartContent::Reasoning(_)) {
            self.n_reasoning_bytes += n_bytes;
        }
        for _ in 0..tokens.len().max(1) {
            clock.token();
        }
    }

    /// Estimates the token counts of a reply that the upstream does not count: at least one token for each piece, and more
    /// for long pieces, such as whole calls.
    fn estimated_usage(&self, clock: &ChoiceClock) -> TextUsage {
        let at_least = |n_pieces: u32, n_bytes: usize| Some(n_pieces.max(tokens_of(n_bytes)));
        TextUsage {
            n_completion: at_least(clock.n_tokens, self.n_bytes),
            n_reasoning: at_least(self.reply.n_reasoning(), self.n_reasoning_bytes),
            ..TextUsage::default()
        }
    }

    /// Removes alternatives that the client did not request. Some servers give no log-probabilities for 0 alternatives, so
    /// they were asked for one.
    fn token(&self, mut token: TextToken) -> TokenLogprobs {
        token.logprobs.top.truncate(self.n_top);
        TokenLogprobs { bytes: token.bytes, logprobs: token.logprobs }
    }
}

/// The end of a reply to a request for no token. The upstream must be asked for one token, which is dropped.
fn end_of_prompt(delta: TextDelta) -> Option<TextEnd> {
    let TextDelta::Finished(TextEnd { usage, .. }) = delta else { return None };
    let usage = TextUsage { n_completion: Some(0), n_reasoning: Some(0), ..usage };
    Some(TextEnd { reason: FinishReason::Length, usage })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use baton_schemas::generate::{Conversation, Input};
    use baton_schemas::tools::ToolUse;
    use prometheus_client::metrics::histogram::Histogram;
    use serde_json::{Value, json};

    use super::*;
    use crate::observe::tests::request;

    fn chat(messages: Value) -> GenerateRequest {
        let conversation: Conversation = serde_json::from_value(json!({ "messages": messages })).unwrap();
        GenerateRequest { input: Input::Chat(conversation), ..request("m") }
    }

    #[test]
    fn a_reply_to_no_token_reports_only_its_prompt() {
        let nothing = GenerateRequest { max_tokens: Some(0), ..chat(json!([{ "role": "user", "content": "x" }])) };
        let mut reader = ChoiceReader::new(&nothing);
        let mut clock = ChoiceClock::start(5, Histogram::new(std::iter::empty()), Arc::default());
        for delta in [
            TextDelta::Reasoning("hm".into()),
            TextDelta::Text { text: "Hi".into(), tokens: Vec::new() },
            TextDelta::Call(ToolCallDelta::Begin { index: 0, id: "c".into(), name: "f".into() }),
            TextDelta::Call(ToolCallDelta::End { index: 0 }),
        ] {
            let step = reader.read(delta, &mut clock);
            assert!(step.parts.is_empty() && step.end.is_none());
        }
        let usage = TextUsage { n_prompt: Some(7), n_completion: Some(1), ..TextUsage::default() };
        let finished = TextDelta::Finished(TextEnd { reason: FinishReason::Stop, usage });
        let step = reader.read(finished, &mut clock);
        let end = step.end.unwrap();
        assert!(step.parts.is_empty() && clock.n_tokens == 0);
        assert_eq!((end.reason, end.usage.n_prompt, end.usage.n_completion), (FinishReason::Length, Some(7), Some(0)));
    }

    #[test]
    fn a_reply_that_ends_here_counts_what_came() {
        let one_call = GenerateRequest {
            tools: ToolUse { parallel: false, ..ToolUse::default() },
            ..chat(json!([{ "role": "user", "content": "x" }]))
        };
        let mut reader = ChoiceReader::new(&one_call);
        let mut clock = ChoiceClock::start(5, Histogram::new(std::iter::empty()), Arc::default());
        let fragment = "x".repeat(400);
        for delta in [
            TextDelta::Reasoning("y".repeat(80)),
            TextDelta::Call(ToolCallDelta::Begin { index: 0, id: "c".into(), name: "f".into() }),
            TextDelta::Call(ToolCallDelta::Arguments { index: 0, fragment }),
        ] {
            assert!(reader.read(delta, &mut clock).end.is_none());
        }
        let end = reader.read(TextDelta::Call(ToolCallDelta::End { index: 0 }), &mut clock).end.unwrap();
        assert_eq!((end.usage.n_completion, end.usage.n_reasoning), (Some(120), Some(20)));
    }
}

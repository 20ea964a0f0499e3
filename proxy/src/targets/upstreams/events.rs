//! One choice's reply from an upstream, as events: stop strings are found, calls are held to what was asked for, tokens
//! are counted.

use baton_engines::upstream::{TextDelta, TextEnd, TextToken, TextUsage, UpstreamError};
use baton_reply::TokenLogprobs;
use baton_reply::stop::StopScanner;
use baton_schemas::generate::{Input, Message};
use baton_schemas::tools::ToolCallDelta;
use baton_schemas::{FinishReason, GenerateRequest};
use futures::{Stream, StreamExt};
use serde_json::Value;

use super::TextChoice;
use super::asking::broken;
use crate::choice_clock::ChoiceClock;
use crate::error::RequestError;
use crate::reply_event::{EventKind, ReplyEvent};

/// A choice's events. Dropping the stream closes the connection.
pub(crate) fn text_events(
    choice: u32,
    TextChoice { first, mut rest, member, asked, span }: TextChoice,
    request: &GenerateRequest,
    mut clock: ChoiceClock,
    n_prompt: u32,
) -> impl Stream<Item = Result<ReplyEvent, RequestError>> + Send + use<> {
    let mut reader = Reader::new(choice, request);
    async_stream::try_stream! {
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
                        let error = match ended {
                            Some(Err(error)) => error,
                            _ => UpstreamError::Failed { reason: "cut_short", detail: "the reply stopped".into() },
                        };
                        if let UpstreamError::Failed { reason, .. } = &error {
                            member.failed(reason);
                        }
                        tracing::debug!(upstream = member.name(), %error, "a reply of an upstream broke off");
                        Err(broken(error))?
                    }
                },
            };
            let (events, end) = reader.read(delta, &mut clock);
            for event in events {
                yield event;
            }
            let Some(End { reason, usage }) = end else { continue };
            if let Some(n_completion) = usage.n_completion {
                clock.correct(n_completion);
            }
            if let Some(n_told) = usage.n_prompt.filter(|_| choice == 0) {
                let n_cached = usage.n_cached.unwrap_or(0).min(n_told);
                clock.n_computed = n_told - n_cached;
                yield EventKind::Usage { n_estimated: n_prompt, n_prompt: n_told, n_cached }.of(choice);
            }
            let finished = EventKind::Finished {
                reason,
                stop: reader.stop.reached().map(str::to_owned),
                n_completion: clock.n_tokens,
                n_reasoning: usage.n_reasoning.unwrap_or(reader.n_reasoning).min(clock.n_tokens),
                timings: clock.timings(),
            };
            yield finished.of(choice);
            break;
        }
    }
}

/// About how many tokens a prompt has, where nobody has told yet: one for four bytes, as most tokenizers have it.
pub(crate) fn estimated_tokens(request: &GenerateRequest) -> u32 {
    let n_bytes = match &request.input {
        Input::Tokens(tokens) => return u32::try_from(tokens.len()).unwrap_or(u32::MAX),
        Input::Text(text) => text.len(),
        Input::Infill { prefix, suffix } => prefix.len() + suffix.len(),
        Input::Chat(conversation) => {
            let tools: usize = request.tools.offered().iter().map(|tool| json_bytes(&tool.definition())).sum();
            tools + conversation.messages.iter().map(message_bytes).sum::<usize>()
        }
    };
    tokens_of(n_bytes).max(1)
}

fn message_bytes(message: &Message) -> usize {
    let reasoning = message.reasoning_content.as_ref().map_or(0, String::len);
    let calls: usize = message.tool_calls.iter().map(json_bytes).sum();
    message.content.len() + reasoning + calls + MESSAGE_BYTES
}

/// What a template puts around a message.
const MESSAGE_BYTES: usize = 16;

const BYTES_PER_TOKEN: usize = 4;

fn json_bytes(value: &Value) -> usize {
    value.to_string().len()
}

fn tokens_of(n_bytes: usize) -> u32 {
    u32::try_from(n_bytes / BYTES_PER_TOKEN).unwrap_or(u32::MAX)
}

/// How a choice ends.
struct End {
    reason: FinishReason,
    usage: TextUsage,
}

struct Reader {
    choice: u32,
    stop: StopScanner,
    stops: Vec<String>,
    one_call: bool,
    /// Alternatives that each token is told with.
    n_top: usize,
    /// Only the prompt was to be computed (`max_tokens: 0`).
    wants_nothing: bool,
    has_called: bool,
    n_reasoning: u32,
    /// Bytes of all that came, and of the reasoning in it.
    n_bytes: usize,
    n_reasoning_bytes: usize,
}

impl Reader {
    fn new(choice: u32, request: &GenerateRequest) -> Reader {
        Reader {
            choice,
            stop: StopScanner::new(request.stop.clone()),
            stops: request.stop.clone(),
            one_call: !request.tools.parallel,
            n_top: request.top_logprobs.unwrap_or(0) as usize,
            wants_nothing: request.max_tokens == Some(0),
            has_called: false,
            n_reasoning: 0,
            n_bytes: 0,
            n_reasoning_bytes: 0,
        }
    }

    /// What is told of a reply that ends here and not at the upstream, which would have told: a token for each piece,
    /// and more where pieces are long, as whole calls are.
    fn counted(&self, n_pieces: u32) -> TextUsage {
        let at_least = |n_pieces: u32, n_bytes: usize| Some(n_pieces.max(tokens_of(n_bytes)));
        TextUsage {
            n_completion: at_least(n_pieces, self.n_bytes),
            n_reasoning: at_least(self.n_reasoning, self.n_reasoning_bytes),
            ..TextUsage::default()
        }
    }

    /// What a delta becomes, and the end if it is one.
    fn read(&mut self, delta: TextDelta, clock: &mut ChoiceClock) -> (Vec<ReplyEvent>, Option<End>) {
        if self.wants_nothing {
            return (Vec::new(), end_of_prompt(delta));
        }
        let choice = self.choice;
        let mut events = Vec::new();
        let mut end = None;
        match delta {
            TextDelta::Text { text, tokens } => {
                self.n_bytes += text.len();
                for _ in 0..tokens.len().max(1) {
                    clock.token();
                }
                let scan = self.stop.feed(&text);
                let tokens = if scan.stopped { Vec::new() } else { tokens };
                let tokens = tokens.into_iter().map(|mut told| {
                    // One more was asked for where none would have been understood as nothing at all.
                    told.logprobs.top.truncate(self.n_top);
                    token(told)
                });
                let tokens: Vec<_> = tokens.collect();
                if !scan.text.is_empty() || !tokens.is_empty() {
                    events.push(EventKind::Text { text: scan.text, tokens }.of(choice));
                }
                end = scan.stopped.then_some(FinishReason::Stop);
            }
            TextDelta::Reasoning(text) => {
                clock.token();
                self.n_reasoning += 1;
                self.n_bytes += text.len();
                self.n_reasoning_bytes += text.len();
                events.push(EventKind::Reasoning { text }.of(choice));
            }
            TextDelta::Call(call) => {
                if matches!(call, ToolCallDelta::Begin { .. }) {
                    // In arguments a stop string would cut JSON.
                    let held = std::mem::replace(&mut self.stop, StopScanner::new(self.stops.clone())).finish();
                    events.extend(text_event(choice, held.text));
                }
                self.n_bytes += match &call {
                    ToolCallDelta::Begin { name, .. } => name.len(),
                    ToolCallDelta::Arguments { fragment, .. } => fragment.len(),
                    ToolCallDelta::End { .. } => 0,
                };
                let ends = matches!(call, ToolCallDelta::End { .. });
                if !ends {
                    clock.token();
                }
                self.has_called |= ends;
                events.push(EventKind::ToolCall { call }.of(choice));
                end = (ends && self.one_call).then_some(FinishReason::ToolCalls);
            }
            TextDelta::Finished(TextEnd { reason, usage }) => {
                let scan = self.stop.finish();
                events.extend(text_event(choice, scan.text));
                let reason = match reason {
                    _ if scan.stopped => FinishReason::Stop,
                    FinishReason::Stop if self.has_called => FinishReason::ToolCalls,
                    reason => reason,
                };
                return (events, Some(End { reason, usage }));
            }
        }
        (events, end.map(|reason| End { reason, usage: self.counted(clock.n_tokens) }))
    }
}

/// The end of a reply of which only the prompt was wanted. The upstream was asked for a token: what came of it is nobody's.
fn end_of_prompt(delta: TextDelta) -> Option<End> {
    let TextDelta::Finished(TextEnd { usage, .. }) = delta else { return None };
    let usage = TextUsage { n_completion: Some(0), n_reasoning: Some(0), ..usage };
    Some(End { reason: FinishReason::Length, usage })
}

fn text_event(choice: u32, text: String) -> Option<ReplyEvent> {
    (!text.is_empty()).then(|| EventKind::Text { text, tokens: Vec::new() }.of(choice))
}

fn token(token: TextToken) -> TokenLogprobs {
    TokenLogprobs { bytes: token.bytes, logprobs: token.logprobs }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use baton_schemas::generate::Conversation;
    use baton_schemas::tools::{Strictness, Tool, ToolUse};
    use prometheus_client::metrics::histogram::Histogram;
    use serde_json::json;

    use super::*;
    use crate::observe::tests::request;

    fn chat(messages: Value) -> GenerateRequest {
        let conversation: Conversation = serde_json::from_value(json!({ "messages": messages })).unwrap();
        GenerateRequest { input: Input::Chat(conversation), ..request("m") }
    }

    #[test]
    fn tools_calls_and_reasoning_are_part_of_an_estimated_prompt() {
        let bare = chat(json!([{ "role": "assistant", "content": "x" }]));
        let n_bare = estimated_tokens(&bare);
        let long = "word ".repeat(100);
        let call = json!({ "function": { "arguments": { "a": long } } });
        for more in [
            json!({ "role": "assistant", "content": "x", "reasoning_content": long }),
            json!({ "role": "assistant", "content": "x", "tool_calls": [call] }),
        ] {
            assert!(estimated_tokens(&chat(json!([more]))) > n_bare + 100, "{more}");
        }
        let (name, description) = ("f".to_owned(), Some(long));
        let tool = Tool { name, description, parameters: Tool::no_parameters(), strict: Strictness::Loose };
        let told = GenerateRequest { tools: ToolUse { tools: vec![tool], ..ToolUse::default() }, ..bare };
        assert!(estimated_tokens(&told) > n_bare + 100);
    }

    #[test]
    fn of_a_reply_to_no_token_nothing_is_told_but_its_prompt() {
        let nothing = GenerateRequest { max_tokens: Some(0), ..chat(json!([{ "role": "user", "content": "x" }])) };
        let mut reader = Reader::new(0, &nothing);
        let mut clock = ChoiceClock::start(5, Histogram::new(std::iter::empty()), Arc::default());
        for delta in [
            TextDelta::Reasoning("hm".into()),
            TextDelta::Text { text: "Hi".into(), tokens: Vec::new() },
            TextDelta::Call(ToolCallDelta::Begin { index: 0, id: "c".into(), name: "f".into() }),
            TextDelta::Call(ToolCallDelta::End { index: 0 }),
        ] {
            let (events, end) = reader.read(delta, &mut clock);
            assert!(events.is_empty() && end.is_none());
        }
        let usage = TextUsage { n_prompt: Some(7), n_completion: Some(1), ..TextUsage::default() };
        let finished = TextDelta::Finished(TextEnd { reason: FinishReason::Stop, usage });
        let (events, end) = reader.read(finished, &mut clock);
        let end = end.unwrap();
        assert!(events.is_empty() && clock.n_tokens == 0);
        assert_eq!((end.reason, end.usage.n_prompt, end.usage.n_completion), (FinishReason::Length, Some(7), Some(0)));
    }

    #[test]
    fn a_reply_that_ends_here_counts_what_came() {
        let one_call = GenerateRequest {
            tools: ToolUse { parallel: false, ..ToolUse::default() },
            ..chat(json!([{ "role": "user", "content": "x" }]))
        };
        let mut reader = Reader::new(0, &one_call);
        let mut clock = ChoiceClock::start(5, Histogram::new(std::iter::empty()), Arc::default());
        let fragment = "x".repeat(400);
        for delta in [
            TextDelta::Reasoning("y".repeat(80)),
            TextDelta::Call(ToolCallDelta::Begin { index: 0, id: "c".into(), name: "f".into() }),
            TextDelta::Call(ToolCallDelta::Arguments { index: 0, fragment }),
        ] {
            assert!(reader.read(delta, &mut clock).1.is_none());
        }
        let end = reader.read(TextDelta::Call(ToolCallDelta::End { index: 0 }), &mut clock).1.unwrap();
        assert_eq!((end.usage.n_completion, end.usage.n_reasoning), (Some(120), Some(20)));
    }
}

//! Reads the deltas of one choice from an upstream: finds stop strings, ends a reply after its only call, counts and limits tokens.

use baton_reply::tools::PartContent;
use baton_reply::{PartReply, ReplyPart, ReplyParts, TokenLogprobs};
use baton_schemas::tools::{ToolCallDelta, ToolChoice};
use baton_schemas::{FinishReason, GenerateRequest};
use baton_upstream::{TextDelta, TextEnd, TextToken, TextUsage};

use super::prompt_estimate::tokens_of;
use crate::choice_clock::ChoiceClock;

/// The most bytes of text for each requested token: half of the longest tokens of common vocabularies, runs of spaces.
const MAX_BYTES_PER_TOKEN: usize = 64;

/// Bytes of text beyond that, and bytes of reasoning, which some servers do not count as requested tokens.
const SPARE_TEXT_BYTES: usize = 4 << 10;
const SPARE_REASONING_BYTES: usize = 1 << 20;

/// The most tokens of a reply whose request sets no limit, if nobody knows the size of the model's context. Hidden reasoning
/// counts as tokens.
const MAX_REPLY_TOKENS: u32 = 1 << 20;

/// The parts of one delta.
#[derive(Default)]
pub(super) struct ChoiceStep {
    pub(super) parts: ReplyParts,
    /// Set once the choice is complete.
    pub(super) end: Option<TextEnd>,
}

pub(super) struct ChoiceReader {
    pub(super) reply: PartReply,
    /// Alternatives that the client requested with each token.
    n_top: usize,
    /// The client requested no token (`max_tokens: 0`), so the reply is dropped.
    wants_no_token: bool,
    /// The client forbids calls, so a call is text, as from an engine.
    forbids_calls: bool,
    /// The most tokens: the client's limit, or what the model's context has room for.
    max_tokens: u32,
    n_bytes: usize,
    n_reasoning_bytes: usize,
}

impl ChoiceReader {
    pub(super) fn new(request: &GenerateRequest) -> ChoiceReader {
        ChoiceReader {
            reply: PartReply::new(request.stop.to_vec(), !request.tools.parallel),
            n_top: request.top_logprobs.unwrap_or(0) as usize,
            wants_no_token: request.max_tokens == Some(0),
            forbids_calls: request.tools.choice == ToolChoice::None,
            max_tokens: request.max_tokens.unwrap_or(MAX_REPLY_TOKENS),
            n_bytes: 0,
            n_reasoning_bytes: 0,
        }
    }

    /// The model's context has room for so many tokens, if anybody knows.
    pub(super) fn bound(&mut self, n_ctx: Option<u32>) {
        self.max_tokens = self.max_tokens.min(n_ctx.unwrap_or(u32::MAX));
    }

    pub(super) fn read(&mut self, delta: TextDelta, clock: &mut ChoiceClock) -> ChoiceStep {
        let part = match delta {
            TextDelta::Finished(end) => return self.finish(end),
            TextDelta::Text { text, tokens } => {
                let tokens = tokens.into_iter().map(|token| self.token(token)).collect();
                ReplyPart { content: PartContent::Text(text), tokens }
            }
            TextDelta::Reasoning(text) => ReplyPart { content: PartContent::Reasoning(text), tokens: Vec::new() },
            TextDelta::Refusal(text) => ReplyPart { content: PartContent::Refusal(text), tokens: Vec::new() },
            TextDelta::Call(call) => {
                let content = if self.forbids_calls { as_text(call) } else { PartContent::Call(call) };
                ReplyPart { content, tokens: Vec::new() }
            }
            // It is no part of the reply.
            TextDelta::LeftOut(_) => return ChoiceStep::default(),
        };
        let n_tokens = self.count(&part);
        if self.is_overlong() {
            let usage = self.estimated_usage(clock);
            return self.finish(TextEnd { reason: FinishReason::Length, unknown: None, usage });
        }
        if self.wants_no_token {
            return ChoiceStep::default();
        }
        (0..n_tokens).for_each(|_| clock.token());
        let step = self.reply.feed(part);
        // The reply ends here and not at the upstream, so the upstream reports no counts.
        let end = || TextEnd {
            reason: self.reply.reason(FinishReason::Stop),
            unknown: None,
            usage: self.estimated_usage(clock),
        };
        ChoiceStep { parts: step.parts, end: step.stopped.then(end) }
    }

    fn finish(&mut self, TextEnd { reason, unknown, usage }: TextEnd) -> ChoiceStep {
        if self.wants_no_token {
            // The upstream must be asked for one token.
            let usage = TextUsage { n_completion: Some(0), n_reasoning: Some(0), ..usage };
            let end = TextEnd { reason: FinishReason::Length, unknown, usage };
            return ChoiceStep { parts: ReplyParts::new(), end: Some(end) };
        }
        let step = self.reply.finish();
        let reason = match self.reply.reason(reason) {
            FinishReason::ToolCalls if self.forbids_calls => FinishReason::Stop,
            reason => reason,
        };
        ChoiceStep { parts: step.parts, end: Some(TextEnd { reason, unknown, usage }) }
    }

    /// Returns true if the upstream ignores `max_tokens`, or its reply cannot fit the context. One piece may have several
    /// tokens, or a part of one, so the bytes decide.
    pub(super) fn is_overlong(&self) -> bool {
        let n_text_bytes = self.n_bytes.saturating_sub(self.n_reasoning_bytes);
        let max_bytes = (self.max_tokens as usize).saturating_mul(MAX_BYTES_PER_TOKEN);
        n_text_bytes > max_bytes.saturating_add(SPARE_TEXT_BYTES)
            || self.n_reasoning_bytes > max_bytes.saturating_add(SPARE_REASONING_BYTES)
    }

    /// So many tokens, or fewer if the reply has fewer bytes.
    pub(super) fn at_most_a_byte_each(&self, n_tokens: u32) -> u32 {
        n_tokens.min(u32::try_from(self.n_bytes).unwrap_or(u32::MAX))
    }

    /// An upstream's count of the reply's tokens, as far as it can be true: at most as many as were requested, or as the
    /// reply has bytes.
    pub(super) fn believable(&self, n_completion: u32) -> u32 {
        let n_bytes = u32::try_from(self.n_bytes).unwrap_or(u32::MAX);
        n_completion.min(self.max_tokens.max(n_bytes))
    }

    /// Counts a piece's bytes. Returns its tokens: those that the upstream lists, or one.
    fn count(&mut self, ReplyPart { content, tokens }: &ReplyPart) -> usize {
        let n_bytes = match content {
            PartContent::Text(text) | PartContent::Reasoning(text) | PartContent::Refusal(text) => text.len(),
            PartContent::Call(ToolCallDelta::Begin { name, .. }) => name.len(),
            PartContent::Call(ToolCallDelta::Arguments { fragment, .. }) => fragment.len(),
            PartContent::Call(ToolCallDelta::End { .. }) => return 0,
        };
        // Tokens without text count, too.
        let n_bytes = n_bytes.max(tokens.len());
        self.n_bytes += n_bytes;
        if matches!(content, PartContent::Reasoning(_)) {
            self.n_reasoning_bytes += n_bytes;
        }
        tokens.len().max(1)
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
        TokenLogprobs { id: None, bytes: token.bytes, logprobs: token.logprobs }
    }
}

/// A step of a call as text.
fn as_text(call: ToolCallDelta) -> PartContent {
    PartContent::Text(match call {
        ToolCallDelta::Begin { name, .. } => format!("{{\"name\": \"{name}\", \"arguments\": "),
        ToolCallDelta::Arguments { fragment, .. } => fragment,
        ToolCallDelta::End { .. } => "}".to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use baton_schemas::generate::{Conversation, Input};
    use baton_schemas::tools::ToolUse;
    use serde_json::{Value, json};

    use super::*;
    use crate::observe::tests::request;
    use crate::targets::upstreams::prompt_estimate::most_tokens;
    use crate::token_gaps::TokenGaps;

    fn chat(messages: Value) -> GenerateRequest {
        let conversation: Conversation = serde_json::from_value(json!({ "messages": messages })).unwrap();
        GenerateRequest { input: Input::Chat(conversation), ..request("m") }
    }

    #[test]
    fn a_reply_to_no_token_reports_only_its_prompt() {
        let nothing = GenerateRequest { max_tokens: Some(0), ..chat(json!([{ "role": "user", "content": "x" }])) };
        let mut reader = ChoiceReader::new(&nothing);
        let mut clock = ChoiceClock::start(5, TokenGaps::unread(), Arc::default());
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
        let finished = TextDelta::Finished(TextEnd { reason: FinishReason::Stop, unknown: None, usage });
        let step = reader.read(finished, &mut clock);
        let end = step.end.unwrap();
        assert!(step.parts.is_empty() && clock.n_tokens == 0);
        assert_eq!((end.reason, end.usage.n_prompt, end.usage.n_completion), (FinishReason::Length, Some(7), Some(0)));
    }

    #[test]
    fn a_reply_that_ignores_max_tokens_or_its_context_is_ended() {
        for (max_tokens, n_ctx, is_reasoning, most) in [
            (Some(5), None, false, 6),
            (Some(0), None, false, 6),
            (Some(5), None, true, 1_100),
            (Some(500), Some(5), false, 6),
            (None, Some(5), false, 6),
            (None, Some(5), true, 1_100),
            (None, None, false, 66_000),
        ] {
            let few = GenerateRequest { max_tokens, ..chat(json!([])) };
            let mut reader = ChoiceReader::new(&few);
            reader.bound(n_ctx);
            let mut clock = ChoiceClock::start(5, TokenGaps::unread(), Arc::default());
            let text = "x".repeat(1 << 10);
            let piece = || match is_reasoning {
                true => TextDelta::Reasoning(text.clone()),
                false => TextDelta::Text { text: text.clone(), tokens: Vec::new() },
            };
            let end = (0..most).find_map(|_| reader.read(piece(), &mut clock).end).expect("the reply goes on");
            assert_eq!(end.reason, FinishReason::Length);
            assert_eq!(end.usage.n_completion == Some(0), max_tokens == Some(0));
        }
    }

    #[test]
    fn a_count_is_believed_as_far_as_it_can_be_true() {
        let believed = |max_tokens, text: &str, reported| {
            let mut reader = ChoiceReader::new(&GenerateRequest { max_tokens, ..chat(json!([])) });
            let mut clock = ChoiceClock::start(5, TokenGaps::unread(), Arc::default());
            reader.read(TextDelta::Text { text: text.to_owned(), tokens: Vec::new() }, &mut clock);
            reader.believable(reported)
        };
        assert_eq!(believed(Some(5), "hi", u32::MAX), 5);
        assert_eq!(believed(Some(5), "more than it was asked for", 9), 9);
        assert_eq!(believed(None, "hidden reasoning", 90_000), 90_000);
        assert_eq!(believed(None, "hi", u32::MAX), MAX_REPLY_TOKENS);
        assert_eq!((most_tokens(5), most_tokens(u32::MAX)), (16_424, u32::MAX));
    }

    #[test]
    fn a_call_is_text_if_the_client_forbids_calls() {
        let read = |choice| {
            let tools = ToolUse { choice, ..ToolUse::default() };
            let mut reader = ChoiceReader::new(&GenerateRequest { tools, ..chat(json!([])) });
            let mut clock = ChoiceClock::start(5, TokenGaps::unread(), Arc::default());
            let end = TextEnd { reason: FinishReason::ToolCalls, unknown: None, usage: TextUsage::default() };
            let steps = [
                TextDelta::Call(ToolCallDelta::Begin { index: 0, id: "c".into(), name: "f".into() }),
                TextDelta::Call(ToolCallDelta::Arguments { index: 0, fragment: "{}".into() }),
                TextDelta::Call(ToolCallDelta::End { index: 0 }),
                TextDelta::Finished(end),
            ];
            let steps: Vec<ChoiceStep> = steps.into_iter().map(|delta| reader.read(delta, &mut clock)).collect();
            let contents = steps.iter().flat_map(|step| &step.parts).map(|part| part.content.clone());
            (contents.collect::<Vec<_>>(), steps[3].end.as_ref().unwrap().reason)
        };
        let texts = ["{\"name\": \"f\", \"arguments\": ", "{}", "}"].map(|text| PartContent::Text(text.into()));
        assert_eq!(read(ToolChoice::None), (texts.to_vec(), FinishReason::Stop));
        let (parts, reason) = read(ToolChoice::Auto);
        assert!(parts.iter().all(|part| matches!(part, PartContent::Call(_))) && reason == FinishReason::ToolCalls);
    }

    #[test]
    fn a_reply_that_ends_here_counts_what_came() {
        let one_call = GenerateRequest {
            tools: ToolUse { parallel: false, ..ToolUse::default() },
            ..chat(json!([{ "role": "user", "content": "x" }]))
        };
        let mut reader = ChoiceReader::new(&one_call);
        let mut clock = ChoiceClock::start(5, TokenGaps::unread(), Arc::default());
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

//! Ollama's replies: a JSON object in each line.

use baton_schemas::FinishReason;
use baton_schemas::tools::ToolCallDelta;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use crate::reply::delta::{DeltaReader, new_call_id};
use crate::reply::logprobs::TokenEntry;
use crate::reply::refusal;
use crate::{TextDelta, TextEnd, TextToken, TextUsage, UpstreamError};

/// The most calls in one reply.
const MAX_CALLS: u32 = 128;

#[derive(Deserialize)]
struct IncomingLine<'a> {
    #[serde(borrow)]
    message: Option<LineMessage<'a>>,
    /// The text, in replies of `/api/generate`.
    response: Option<String>,
    thinking: Option<String>,
    #[serde(default)]
    done: bool,
    done_reason: Option<String>,
    prompt_eval_count: Option<u32>,
    eval_count: Option<u32>,
    /// The log-probabilities of this line's tokens, including those that are not text.
    #[serde(borrow)]
    logprobs: Option<&'a RawValue>,
    error: Option<IgnoredAny>,
}

#[derive(Default, Deserialize)]
struct LineMessage<'a> {
    content: Option<String>,
    thinking: Option<String>,
    #[serde(borrow)]
    tool_calls: Option<Vec<LineCall<'a>>>,
}

#[derive(Deserialize)]
struct LineCall<'a> {
    id: Option<String>,
    #[serde(borrow)]
    function: LineFunction<'a>,
}

#[derive(Deserialize)]
struct LineFunction<'a> {
    name: String,
    /// An object, which goes on as it is.
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
}

/// The most tokens that wait for their text. Ollama holds back the text of a call, which is shorter.
const MAX_HELD: usize = 1 << 16;

/// Reads one reply's lines.
#[derive(Default)]
pub(super) struct LineReader {
    end: Option<TextEnd>,
    n_calls: u32,
    wants_logprobs: bool,
    /// Log-probabilities were requested, and none have come yet.
    lacks_logprobs: bool,
    /// Tokens whose text has not come yet.
    held: Vec<TextToken>,
}

impl DeltaReader for LineReader {
    fn read(&mut self, event: &[u8], out: &mut Vec<TextDelta>) -> Result<(), UpstreamError> {
        let line: IncomingLine<'_> = serde_json::from_slice(event).map_err(UpstreamError::malformed)?;
        if line.error.is_some() {
            return Err(refusal::in_stream(event));
        }
        let message = line.message.unwrap_or_default();
        let filled = |text: Option<String>| text.filter(|text| !text.is_empty());
        let reasoning = filled(message.thinking.or(line.thinking));
        let calls = message.tool_calls.unwrap_or_default();
        if let Some(logprobs) = line.logprobs.filter(|_| self.wants_logprobs) {
            self.hold(serde_json::from_str(logprobs.get()).map_err(UpstreamError::malformed)?)?;
        }
        if let Some(text) = filled(message.content.or(line.response)) {
            if self.lacks_logprobs {
                // An older Ollama, or a model that reports none.
                return Err(UpstreamError::Unsupported { field: "logprobs" });
            }
            out.extend(reasoning.map(TextDelta::Reasoning));
            let tokens = self.take_tokens_of(&text);
            out.push(TextDelta::Text { text, tokens });
        } else if reasoning.is_some() || !calls.is_empty() {
            // The tokens belong to these, which are passed on without log-probabilities.
            self.held.clear();
            out.extend(reasoning.map(TextDelta::Reasoning));
        }
        for call in calls {
            self.call(call, out)?;
        }
        if line.done {
            let reason = match line.done_reason.as_deref() {
                Some("length") => FinishReason::Length,
                _ if self.n_calls > 0 => FinishReason::ToolCalls,
                _ => FinishReason::Stop,
            };
            let usage =
                TextUsage { n_prompt: line.prompt_eval_count, n_completion: line.eval_count, ..TextUsage::default() };
            self.end = Some(TextEnd { reason, usage });
        }
        Ok(())
    }

    fn end(&mut self, _out: &mut Vec<TextDelta>) -> Option<TextEnd> {
        self.end
    }
}

impl LineReader {
    /// A reader of one reply, for which log-probabilities may have been requested.
    pub(super) fn new(wants_logprobs: bool) -> LineReader {
        LineReader { wants_logprobs, lacks_logprobs: wants_logprobs, ..LineReader::default() }
    }

    /// Keeps a line's tokens until their text comes: Ollama may hold text back until it knows that it is no call.
    /// Errors: too many wait.
    fn hold(&mut self, tokens: Vec<TokenEntry<'_>>) -> Result<(), UpstreamError> {
        self.lacks_logprobs &= tokens.is_empty();
        if self.held.len() + tokens.len() > MAX_HELD {
            return Err(UpstreamError::malformed("too many tokens without their text"));
        }
        self.held.extend(tokens.into_iter().map(TextToken::from));
        Ok(())
    }

    /// Takes the held tokens that spell this text. Tokens before them were not shown, such as the tags of reasoning.
    fn take_tokens_of(&mut self, text: &str) -> Vec<TextToken> {
        let mut unspelled = text.as_bytes();
        let mut spelled = None;
        for (at, token) in self.held.iter().enumerate().rev() {
            let Some(rest) = unspelled.strip_suffix(&token.bytes[..]) else { break };
            unspelled = rest;
            spelled = Some(at);
        }
        let mut held = std::mem::take(&mut self.held);
        held.split_off(spelled.unwrap_or(0))
    }

    /// Ollama sends whole calls.
    fn call(&mut self, call: LineCall<'_>, out: &mut Vec<TextDelta>) -> Result<(), UpstreamError> {
        let index = self.n_calls;
        if index >= MAX_CALLS {
            return Err(UpstreamError::malformed("too many calls in one reply"));
        }
        self.n_calls += 1;
        let id = call.id.filter(|id| !id.is_empty()).unwrap_or_else(new_call_id);
        let arguments = call.function.arguments.map_or("{}", RawValue::get);
        if !arguments.starts_with('{') {
            return Err(UpstreamError::malformed("a call whose arguments are no object"));
        }
        let fragment = arguments.to_owned();
        let steps = [
            ToolCallDelta::Begin { index, id, name: call.function.name },
            ToolCallDelta::Arguments { index, fragment },
            ToolCallDelta::End { index },
        ];
        out.extend(steps.map(TextDelta::Call));
        Ok(())
    }
}

//! Ollama's replies: a JSON object in each line.

use baton_schemas::FinishReason;
use baton_schemas::tools::ToolCallDelta;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::reply::delta::{DeltaReader, new_call_id};
use crate::reply::finish_word::FinishWord;
use crate::reply::foreign::{
    Count, ForeignArguments, ForeignCall, ForeignObject, List, MAX_CALLS, Needed, Said, SaidPart, is_present,
    without_mark,
};
use crate::reply::logprobs::{JsonText, TokenEntry};
use crate::reply::refusal;
use crate::{LeftOut, TextDelta, TextEnd, TextToken, TextUsage, UpstreamError};

#[derive(Default, Deserialize)]
struct IncomingLine<'a> {
    #[serde(borrow, default)]
    message: Needed<LineMessage<'a>>,
    /// The text, in replies of `/api/generate`.
    #[serde(borrow, default)]
    response: Said<'a>,
    #[serde(borrow, default)]
    thinking: Said<'a>,
    done: Option<bool>,
    #[serde(borrow)]
    done_reason: Option<JsonText<'a>>,
    #[serde(default)]
    prompt_eval_count: Count,
    #[serde(default)]
    eval_count: Count,
    /// The log-probabilities of this line's tokens, including those that are not text.
    #[serde(borrow)]
    logprobs: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
struct LineMessage<'a> {
    #[serde(borrow, default)]
    content: Said<'a>,
    #[serde(borrow, default)]
    thinking: Said<'a>,
    /// Not Ollama's own: of servers that translate OpenAI's replies.
    #[serde(borrow, default)]
    refusal: Said<'a>,
    #[serde(borrow, default)]
    tool_calls: List<Needed<ForeignCall<'a>>, MAX_CALLS>,
    #[serde(borrow)]
    images: Option<&'a RawValue>,
}

impl<'de: 'a, 'a> ForeignObject<'de> for IncomingLine<'a> {
    const ASIDE: &'static [&'static str] = &["prompt_eval_count", "eval_count", "logprobs", "error"];
}

impl<'de: 'a, 'a> ForeignObject<'de> for LineMessage<'a> {
    const ASIDE: &'static [&'static str] = &["images"];
}

/// The word for the log if a reply ends without a reason.
const NO_REASON: &str = "(none)";

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
    /// What was reported as left out.
    left_out: Vec<LeftOut>,
}

/// The texts of a line.
#[derive(Default)]
struct LineText {
    text: String,
    reasoning: String,
    refusal: String,
    left_out: Vec<LeftOut>,
}

impl LineText {
    fn of(content: Said<'_>, thinking: Said<'_>, refusal: Said<'_>) -> LineText {
        let [reasoning, refusal] = [thinking, refusal].map(|said| said.joined().unwrap_or_default());
        let mut said = LineText { reasoning, refusal, ..LineText::default() };
        let parts = match content {
            Said::Nothing => Vec::new(),
            Said::Text(text) => vec![SaidPart::Text(text.into_owned())],
            Said::Parts(parts) => parts,
        };
        for part in parts {
            match part {
                SaidPart::Text(text) => said.text.push_str(&text),
                SaidPart::Refusal(text) => said.refusal.push_str(&text),
                SaidPart::Reasoning(text) => said.reasoning.push_str(&text),
                SaidPart::LeftOut(left_out) => said.left_out.push(left_out),
            }
        }
        said
    }
}

impl DeltaReader for LineReader {
    fn read(&mut self, event: &[u8], out: &mut Vec<TextDelta>) -> Result<(), UpstreamError> {
        let line: Needed<IncomingLine<'_>> =
            serde_json::from_slice(without_mark(event)).map_err(UpstreamError::malformed)?;
        let line = line.0.unwrap_or_default();
        if is_present(line.error) {
            return Err(refusal::in_stream(event));
        }
        let message = line.message.0.unwrap_or_default();
        let said = LineText::of(message.content.or(line.response), message.thinking.or(line.thinking), message.refusal);
        let calls = message.tool_calls.0;
        if let Some(logprobs) = line.logprobs.filter(|_| self.wants_logprobs) {
            let tokens: List<TokenEntry<'_>, MAX_HELD> =
                serde_json::from_str(logprobs.get()).map_err(UpstreamError::malformed)?;
            self.hold(tokens.0)?;
        }
        let reasoning = Some(said.reasoning).filter(|reasoning| !reasoning.is_empty());
        if !said.text.is_empty() {
            if self.lacks_logprobs {
                // An older Ollama, or a model that reports none.
                return Err(UpstreamError::Unsupported { field: "logprobs" });
            }
            out.extend(reasoning.map(TextDelta::Reasoning));
            let tokens = self.take_tokens_of(&said.text);
            out.push(TextDelta::Text { text: said.text, tokens });
        } else if reasoning.is_some() || !said.refusal.is_empty() || !calls.is_empty() {
            // The tokens belong to these, which are passed on without log-probabilities.
            self.held.clear();
            out.extend(reasoning.map(TextDelta::Reasoning));
        }
        out.extend(Some(said.refusal).filter(|refusal| !refusal.is_empty()).map(TextDelta::Refusal));
        let images = is_present(message.images).then_some(LeftOut::Images);
        for left_out in said.left_out.into_iter().chain(images) {
            if !self.left_out.contains(&left_out) {
                self.left_out.push(left_out);
                out.push(TextDelta::LeftOut(left_out));
            }
        }
        for call in calls.into_iter().filter_map(|call| call.0) {
            self.call(call, out)?;
        }
        if line.done == Some(true) {
            let word = line.done_reason.unwrap_or_default().0;
            // Older versions give no reason, so a limit may have cut the reply.
            let FinishWord { reason, unknown } = FinishWord::read(if word.is_empty() { NO_REASON } else { &word })?;
            let has_called = self.n_calls > 0 && reason == FinishReason::Stop;
            let usage = TextUsage {
                n_prompt: line.prompt_eval_count.0,
                n_completion: line.eval_count.0,
                ..TextUsage::default()
            };
            let reason = if has_called { FinishReason::ToolCalls } else { reason };
            self.end = Some(TextEnd { reason, unknown, usage });
        }
        Ok(())
    }

    fn end(&mut self, _out: &mut Vec<TextDelta>) -> Option<TextEnd> {
        self.end.clone()
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
    fn call(&mut self, call: ForeignCall<'_>, out: &mut Vec<TextDelta>) -> Result<(), UpstreamError> {
        let index = self.n_calls;
        if index as usize >= MAX_CALLS {
            return Err(UpstreamError::malformed("too many calls in one reply"));
        }
        self.n_calls += 1;
        let id = Some(call.id.0).filter(|id| !id.is_empty()).unwrap_or_else(new_call_id);
        let function = call.function.0.unwrap_or_default();
        let fragment = match function.arguments()? {
            ForeignArguments::Text(text) if !text.trim().is_empty() => text,
            ForeignArguments::Text(_) | ForeignArguments::EmptyObject | ForeignArguments::Nothing => "{}".to_owned(),
        };
        let name = function.name.filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| UpstreamError::malformed("a call without a name"))?;
        let steps = [
            ToolCallDelta::Begin { index, id, name },
            ToolCallDelta::Arguments { index, fragment },
            ToolCallDelta::End { index },
        ];
        out.extend(steps.map(TextDelta::Call));
        Ok(())
    }
}

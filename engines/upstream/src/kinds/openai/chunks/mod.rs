//! Reads OpenAI's chunks, of chats and of plain completions. A whole reply is read as one chunk.

mod text_chunk;

use std::fmt;
use std::marker::PhantomData;

use baton_schemas::FinishReason;
use baton_schemas::tools::ToolCallDelta;
use serde::de::{IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use self::text_chunk::TextChunk;
use crate::reply::delta::{DeltaReader, new_call_id};
use crate::reply::logprobs::{self, JsonText};
use crate::reply::refusal;
use crate::{TextDelta, TextEnd, TextToken, TextUsage, UpstreamError, UpstreamFailure};

/// The most calls in one reply.
const MAX_CALLS: u32 = 128;

/// The fields that are read. All others are skipped, so nothing that a server adds reaches a client.
#[derive(Deserialize)]
struct StreamChunk<'a> {
    // One choice was requested.
    #[serde(borrow, default)]
    choices: FirstOf<IncomingChoice<'a>>,
    usage: Option<ChunkUsage>,
    error: Option<IgnoredAny>,
    /// vLLM's old form of an error: `{"object":"error","message":…,"code":400}`.
    #[serde(borrow)]
    object: Option<JsonText<'a>>,
}

#[derive(Deserialize)]
struct IncomingChoice<'a> {
    #[serde(borrow)]
    delta: Option<IncomingDelta<'a>>,
    /// A reply that is not a stream has this instead of `delta`. Some servers end a stream with it.
    #[serde(borrow)]
    message: Option<IncomingDelta<'a>>,
    /// The text, in plain completions.
    #[serde(borrow)]
    text: Option<JsonText<'a>>,
    #[serde(borrow)]
    finish_reason: Option<JsonText<'a>>,
    #[serde(borrow)]
    logprobs: Option<&'a RawValue>,
}

impl IncomingChoice<'_> {
    /// Its text, if it has nothing else that is read.
    fn only_text(&self) -> Option<&str> {
        let IncomingChoice { delta, message: None, text, finish_reason, logprobs: None } = self else { return None };
        if finish_reason.as_ref().is_some_and(|reason| !reason.0.is_empty()) {
            return None;
        }
        match (delta, text) {
            (None, Some(text)) => Some(&text.0),
            (
                Some(IncomingDelta {
                    content: Some(content),
                    reasoning_content: None,
                    reasoning: None,
                    tool_calls: None,
                }),
                None,
            ) => Some(&content.0),
            _ => None,
        }
    }
}

#[derive(Default, Deserialize)]
struct IncomingDelta<'a> {
    #[serde(borrow)]
    content: Option<JsonText<'a>>,
    #[serde(borrow)]
    reasoning_content: Option<JsonText<'a>>,
    /// The reasoning under the newer name of vLLM and OpenRouter.
    #[serde(borrow)]
    reasoning: Option<JsonText<'a>>,
    tool_calls: Option<Vec<CallDelta>>,
}

#[derive(Deserialize)]
struct CallDelta {
    index: Option<u32>,
    id: Option<String>,
    function: Option<FunctionDelta>,
}

#[derive(Default, Deserialize)]
struct FunctionDelta {
    name: Option<String>,
    arguments: Option<String>,
}

#[derive(Deserialize)]
struct ChunkUsage {
    prompt_tokens: Option<u32>,
    completion_tokens: Option<u32>,
    prompt_tokens_details: Option<PromptDetails>,
    completion_tokens_details: Option<CompletionDetails>,
}

#[derive(Deserialize)]
struct PromptDetails {
    cached_tokens: Option<u32>,
}

#[derive(Deserialize)]
struct CompletionDetails {
    reasoning_tokens: Option<u32>,
}

/// Reads one reply's chunks.
#[derive(Default)]
pub(crate) struct ChunkReader {
    reason: Option<FinishReason>,
    usage: TextUsage,
    /// The unfinished call: the upstream's number for it, and its id.
    open: Option<(Option<u32>, String)>,
    n_calls: u32,
    /// The reply is a stream, so a message would repeat it.
    has_deltas: bool,
    /// Log-probabilities were requested. Otherwise they are skipped: some servers write them always.
    wants_logprobs: bool,
    /// They were requested, and none have come yet.
    lacks_logprobs: bool,
    /// Text that came without them.
    held: String,
    text_chunk: TextChunk,
}

impl DeltaReader for ChunkReader {
    fn read(&mut self, event: &[u8], out: &mut Vec<TextDelta>) -> Result<(), UpstreamError> {
        if let Some(text) = self.text_chunk.text(event) {
            self.text(text.to_owned(), Vec::new(), out)?;
            return Ok(());
        }
        let chunk: StreamChunk<'_> = serde_json::from_slice(event).map_err(UpstreamError::malformed)?;
        if chunk.error.is_some() || chunk.object.as_ref().is_some_and(|object| object.0 == "error") {
            return Err(refusal::in_stream(event));
        }
        if let StreamChunk { choices: FirstOf(Some(choice)), usage: None, .. } = &chunk
            && let Some(text) = choice.only_text()
        {
            self.text_chunk.learn(event, text);
        }
        if let Some(usage) = chunk.usage {
            self.usage = TextUsage {
                n_prompt: usage.prompt_tokens.or(self.usage.n_prompt),
                n_cached: usage.prompt_tokens_details.and_then(|d| d.cached_tokens).or(self.usage.n_cached),
                n_completion: usage.completion_tokens.or(self.usage.n_completion),
                n_reasoning: usage
                    .completion_tokens_details
                    .and_then(|d| d.reasoning_tokens)
                    .or(self.usage.n_reasoning),
            };
        }
        chunk.choices.0.map_or(Ok(()), |choice| self.choice(choice, out))
    }

    fn end(&mut self, out: &mut Vec<TextDelta>) -> Option<TextEnd> {
        let reason = self.reason?;
        if reason != FinishReason::Length {
            self.close(out);
        }
        let has_called = self.n_calls > 0 && reason == FinishReason::Stop;
        Some(TextEnd { reason: if has_called { FinishReason::ToolCalls } else { reason }, usage: self.usage })
    }
}

impl ChunkReader {
    /// A reader of one reply, for which log-probabilities may have been requested.
    pub(crate) fn new(wants_logprobs: bool) -> ChunkReader {
        ChunkReader { wants_logprobs, lacks_logprobs: wants_logprobs, ..ChunkReader::default() }
    }

    fn choice(&mut self, choice: IncomingChoice<'_>, out: &mut Vec<TextDelta>) -> Result<(), UpstreamError> {
        self.has_deltas |= choice.delta.is_some();
        let message = choice.message.filter(|_| !self.has_deltas);
        let delta = choice.delta.or(message).unwrap_or_default();
        let filled =
            |text: Option<JsonText<'_>>| text.filter(|text| !text.0.is_empty()).map(|text| text.0.into_owned());
        out.extend(filled(delta.reasoning_content).or_else(|| filled(delta.reasoning)).map(TextDelta::Reasoning));
        let tokens = match choice.logprobs {
            Some(logprobs) if self.wants_logprobs => logprobs::of_chunk(logprobs.get())?,
            _ => Vec::new(),
        };
        self.lacks_logprobs &= tokens.is_empty();
        self.text(filled(delta.content.or(choice.text)).unwrap_or_default(), tokens, out)?;
        for call in delta.tool_calls.unwrap_or_default() {
            self.check_held()?;
            self.call(call, out)?;
        }
        // Some servers write an empty one into every piece.
        let reason = choice.finish_reason.unwrap_or_default().0;
        if !reason.is_empty() {
            if matches!(&*reason, "abort" | "error") {
                return Err(UpstreamError::failed(
                    UpstreamFailure::ServerError,
                    format_args!("the reply ended by {reason:?}"),
                ));
            }
            self.check_held()?;
            self.reason = Some(match &*reason {
                "length" => FinishReason::Length,
                "tool_calls" | "function_call" => FinishReason::ToolCalls,
                _ => FinishReason::Stop,
            });
        }
        Ok(())
    }

    fn text(&mut self, text: String, tokens: Vec<TextToken>, out: &mut Vec<TextDelta>) -> Result<(), UpstreamError> {
        if self.lacks_logprobs && !text.is_empty() {
            // The first text may come before its token is whole: one that ends in the middle of a character.
            self.check_held()?;
            self.held = text;
        } else if !text.is_empty() || !tokens.is_empty() {
            let text = if self.held.is_empty() { text } else { std::mem::take(&mut self.held) + &text };
            out.push(TextDelta::Text { text, tokens });
        }
        Ok(())
    }

    fn call(&mut self, call: CallDelta, out: &mut Vec<TextDelta>) -> Result<(), UpstreamError> {
        let FunctionDelta { name, arguments } = call.function.unwrap_or_default();
        let id = call.id.unwrap_or_default();
        let name = name.unwrap_or_default();
        // A call's first piece has its name. Some servers number all calls 0, some repeat the id in every piece.
        let continues = self.open.as_ref().is_some_and(|(index, open_id)| {
            *index == call.index && (id.is_empty() || id == *open_id) && (name.is_empty() || !id.is_empty())
        });
        if !continues {
            if name.is_empty() {
                return Err(UpstreamError::malformed("a piece of a call that has not begun"));
            }
            self.close(out);
            if self.n_calls >= MAX_CALLS {
                return Err(UpstreamError::malformed("too many calls in one reply"));
            }
            let id = if id.is_empty() { new_call_id() } else { id };
            self.open = Some((call.index, id.clone()));
            out.push(TextDelta::Call(ToolCallDelta::Begin { index: self.n_calls, id, name }));
        }
        if let Some(fragment) = arguments.filter(|fragment| !fragment.is_empty()) {
            out.push(TextDelta::Call(ToolCallDelta::Arguments { index: self.n_calls, fragment }));
        }
        Ok(())
    }

    /// Errors: text came without the requested log-probabilities, and what follows it has none either.
    fn check_held(&self) -> Result<(), UpstreamError> {
        match self.held.is_empty() {
            true => Ok(()),
            false => Err(UpstreamError::Unsupported { field: "logprobs" }),
        }
    }

    fn close(&mut self, out: &mut Vec<TextDelta>) {
        if self.open.take().is_some() {
            out.push(TextDelta::Call(ToolCallDelta::End { index: self.n_calls }));
            self.n_calls += 1;
        }
    }
}

/// The first element of a list, if it has one. The others are skipped.
struct FirstOf<T>(Option<T>);

impl<T> Default for FirstOf<T> {
    fn default() -> Self {
        FirstOf(None)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for FirstOf<T> {
    fn deserialize<D: Deserializer<'de>>(list: D) -> Result<Self, D::Error> {
        struct FirstVisitor<T>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>> Visitor<'de> for FirstVisitor<T> {
            type Value = FirstOf<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<FirstOf<T>, A::Error> {
                let first = list.next_element()?;
                while list.next_element::<IgnoredAny>()?.is_some() {}
                Ok(FirstOf(first))
            }
        }

        list.deserialize_seq(FirstVisitor(PhantomData))
    }
}

#[cfg(test)]
mod tests;

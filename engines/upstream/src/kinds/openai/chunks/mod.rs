//! Reads OpenAI's chunks, of chats and of plain completions. A whole reply is read as one chunk.

mod calls;
mod choice_numbers;
mod incoming;
mod text_chunk;

use baton_schemas::FinishReason;
use serde_json::value::RawValue;

use self::calls::StreamedCalls;
use self::choice_numbers::{Belongs, ChoiceNumbers, Settled};
use self::incoming::{IncomingChoice, IncomingDelta, StreamChunk};
use self::text_chunk::TextChunk;
use crate::reply::delta::DeltaReader;
use crate::reply::finish_word::FinishWord;
use crate::reply::foreign::{ForeignCall, Needed, Said, SaidPart, is_present, without_mark};
use crate::reply::logprobs;
use crate::reply::refusal;
use crate::{LeftOut, TextDelta, TextEnd, TextToken, TextUsage, UpstreamError};

/// Reads one reply's chunks.
#[derive(Default)]
pub(crate) struct ChunkReader {
    numbers: ChoiceNumbers,
    finish: Option<FinishWord>,
    usage: TextUsage,
    calls: StreamedCalls,
    /// The reply is a stream, so a message would repeat it.
    has_deltas: bool,
    /// Reasoning came as text, so lists would repeat it.
    has_reasoning: bool,
    /// What was reported as left out.
    left_out: Vec<LeftOut>,
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
            let had_other = self.numbers.repeat();
            self.leave_out(had_other.then_some(LeftOut::OtherChoices), out);
            self.text(text.to_owned(), Vec::new(), out)?;
            return Ok(());
        }
        let chunk: Needed<StreamChunk<'_>> =
            serde_json::from_slice(without_mark(event)).map_err(UpstreamError::malformed)?;
        let chunk = chunk.0.unwrap_or_default();
        if is_present(chunk.error) || chunk.object.0 == "error" {
            return Err(refusal::in_stream(event));
        }
        for (field, left_out) in [(chunk.citations, LeftOut::Citations), (chunk.search_results, LeftOut::SearchResults)]
        {
            self.leave_out(is_present(field).then_some(left_out), out);
        }
        let found: Vec<_> = chunk.choices.0.into_iter().filter_map(|choice| choice.0).collect();
        let (mut choice, mut has_others) = (None, false);
        if let Some(IncomingChoice { index, .. }) = found.first() {
            match self.numbers.settle(index.0) {
                Some(Settled::Here(held)) => self.read(&held, out)?,
                Some(Settled::Elsewhere) => has_others = true,
                None => {}
            }
        }
        let is_alone = found.len() == 1;
        for found in found {
            match self.numbers.belongs(found.index.0, is_alone) {
                Belongs::Here if choice.is_none() => choice = Some(found),
                Belongs::Here | Belongs::Elsewhere => has_others = true,
                Belongs::Unsure { number } => {
                    self.numbers.hold(number, event);
                    return Ok(());
                }
            }
        }
        self.leave_out(has_others.then_some(LeftOut::OtherChoices), out);
        if let (Some(choice), None, None, None) = (&choice, &chunk.usage.0, chunk.citations, chunk.search_results)
            && let Some(text) = choice.only_text()
        {
            self.text_chunk.learn(event, text);
        }
        if let Some(usage) = chunk.usage.0 {
            let details = (usage.prompt_tokens_details.0, usage.completion_tokens_details.0);
            self.usage = TextUsage {
                n_prompt: usage.prompt_tokens.0.or(self.usage.n_prompt),
                n_cached: details.0.and_then(|d| d.cached_tokens.0).or(self.usage.n_cached),
                n_completion: usage.completion_tokens.0.or(self.usage.n_completion),
                n_reasoning: details.1.and_then(|d| d.reasoning_tokens.0).or(self.usage.n_reasoning),
            };
        }
        choice.map_or(Ok(()), |choice| self.choice(choice, out))
    }

    fn end(&mut self, out: &mut Vec<TextDelta>) -> Option<TextEnd> {
        if let Some(held) = self.numbers.last_held().filter(|_| self.finish.is_none()) {
            self.read(&held, out).ok()?;
        }
        let FinishWord { reason, unknown } = self.finish.clone()?;
        let has_called = self.calls.end(is_cut(reason), out) && reason == FinishReason::Stop;
        let reason = if has_called { FinishReason::ToolCalls } else { reason };
        Some(TextEnd { reason, unknown, usage: self.usage })
    }
}

fn is_cut(reason: FinishReason) -> bool {
    match reason {
        FinishReason::Stop | FinishReason::ToolCalls | FinishReason::Refusal => false,
        FinishReason::Length | FinishReason::ContentFilter => true,
    }
}

/// The reasoning in a field that some servers use for something else. Errors: it is a text or a list, and cannot be read.
fn reasoning_of(field: Option<&RawValue>) -> Result<Option<String>, UpstreamError> {
    match field.map(RawValue::get) {
        Some(raw) if raw.starts_with(['"', '[']) => {
            serde_json::from_str(raw).map(Said::joined).map_err(UpstreamError::malformed)
        }
        _ => Ok(None),
    }
}

impl ChunkReader {
    /// A reader of one reply, for which log-probabilities may have been requested.
    pub(crate) fn new(wants_logprobs: bool) -> ChunkReader {
        ChunkReader { wants_logprobs, lacks_logprobs: wants_logprobs, ..ChunkReader::default() }
    }

    fn choice(&mut self, choice: IncomingChoice<'_>, out: &mut Vec<TextDelta>) -> Result<(), UpstreamError> {
        let is_whole = !self.has_deltas && choice.delta.0.is_none();
        self.has_deltas |= choice.delta.0.is_some();
        let message = choice.message.0.filter(|_| !self.has_deltas);
        let mut delta = choice.delta.0.or(message).unwrap_or_default();
        if let Some(error) = choice.error.filter(|error| is_present(Some(error))) {
            return Err(refusal::in_stream(format!(r#"{{"error":{error}}}"#).as_bytes()));
        }
        out.extend(self.reasoning(&mut delta)?.map(TextDelta::Reasoning));
        let tokens = match choice.logprobs {
            Some(logprobs) if self.wants_logprobs => logprobs::of_chunk(logprobs.get())?,
            _ => Vec::new(),
        };
        self.lacks_logprobs &= tokens.is_empty();
        self.leave_out(delta.audio.0.as_ref().map(|_| LeftOut::Audio), out);
        let heard = delta.audio.0.map(|audio| audio.transcript).unwrap_or_default();
        self.said(delta.content.or(choice.text).or(heard), tokens, out)?;
        out.extend(delta.refusal.joined().map(TextDelta::Refusal));
        for (field, left_out) in [
            (delta.annotations, LeftOut::Annotations),
            (delta.citations, LeftOut::Citations),
            (delta.context.0.and_then(|context| context.citations), LeftOut::Citations),
            (delta.images, LeftOut::Images),
        ] {
            self.leave_out(is_present(field).then_some(left_out), out);
        }
        // Some servers write both forms.
        let older = delta.function_call.0.filter(|_| delta.tool_calls.0.is_empty()).map(ForeignCall::of);
        let calls: Vec<_> = delta.tool_calls.0.into_iter().filter_map(|call| call.0).chain(older).collect();
        if !calls.is_empty() {
            self.check_held()?;
            self.calls.take_all(calls, is_whole, out)?;
        }
        // Some servers write an empty one, or the word null, into every piece.
        let word = choice.finish_reason.unwrap_or_default().0;
        if !word.is_empty() && !word.eq_ignore_ascii_case("null") {
            let finish = FinishWord::read(&word)?;
            self.check_held()?;
            self.calls.check()?;
            self.finish = Some(finish.after(self.finish.take()));
        }
        Ok(())
    }

    /// The reasoning in the first of its fields that holds some.
    fn reasoning(&mut self, delta: &mut IncomingDelta<'_>) -> Result<Option<String>, UpstreamError> {
        let named = std::mem::take(&mut delta.reasoning_content).or(std::mem::take(&mut delta.reasoning)).joined();
        let mut found = named;
        for field in [delta.reasoning_text, delta.thinking] {
            found = if found.is_some() { found } else { reasoning_of(field)? };
        }
        self.has_reasoning |= found.is_some();
        for field in [delta.thinking_blocks, delta.reasoning_details] {
            found = if found.is_some() || self.has_reasoning { found } else { reasoning_of(field)? };
        }
        Ok(found)
    }

    /// Takes a text, or its parts. The tokens are those of its last part.
    fn said(&mut self, said: Said<'_>, tokens: Vec<TextToken>, out: &mut Vec<TextDelta>) -> Result<(), UpstreamError> {
        let parts = match said {
            Said::Nothing => return self.text(String::new(), tokens, out),
            Said::Text(text) => return self.text(text.into_owned(), tokens, out),
            Said::Parts(parts) => parts,
        };
        let mut text = String::new();
        for part in parts {
            let delta = match part {
                SaidPart::Text(more) => {
                    text.push_str(&more);
                    continue;
                }
                SaidPart::Reasoning(thought) => TextDelta::Reasoning(thought),
                SaidPart::Refusal(refusal) => TextDelta::Refusal(refusal),
                SaidPart::LeftOut(left_out) => {
                    self.leave_out(Some(left_out), out);
                    continue;
                }
            };
            self.text(std::mem::take(&mut text), Vec::new(), out)?;
            out.push(delta);
        }
        self.text(text, tokens, out)
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

    /// Reports a kind of part that is left out, once.
    fn leave_out(&mut self, left_out: Option<LeftOut>, out: &mut Vec<TextDelta>) {
        if let Some(left_out) = left_out.filter(|left_out| !self.left_out.contains(left_out)) {
            self.left_out.push(left_out);
            out.push(TextDelta::LeftOut(left_out));
        }
    }

    /// Errors: text came without the requested log-probabilities, and what follows it has none either.
    fn check_held(&self) -> Result<(), UpstreamError> {
        match self.held.is_empty() {
            true => Ok(()),
            false => Err(UpstreamError::Unsupported { field: "logprobs" }),
        }
    }
}

#[cfg(test)]
mod tests;

//! The difference between a chat and a plain completion: the shape of their choices.

use baton_reply::TokenLogprobs;
use baton_schemas::FinishReason;
use baton_schemas::sequence::GeneratedToken;
use baton_schemas::tools::ToolCallDelta;
use serde::Serialize;

/// Writes the choices of one reply. It may keep state for each choice.
pub(super) trait Choices: Send + Unpin + 'static {
    /// A choice of a whole reply.
    type Whole: Serialize + Send;
    /// A chunk of a choice, in a stream.
    type Delta<'a>: Serialize;

    /// Creates a choice without text.
    fn unfinished(&self, index: u32) -> Self::Whole;

    /// Appends text, and its tokens if log-probabilities were requested.
    fn append(&mut self, whole: &mut Self::Whole, text: &str, tokens: &[TokenLogprobs]);

    /// Takes the prompt's tokens. Does nothing for dialects without them.
    fn append_prompt(&mut self, _whole: &mut Self::Whole, _tokens: &[GeneratedToken]) {}

    /// Appends reasoning. Does nothing for dialects without it.
    fn append_reasoning(&mut self, _whole: &mut Self::Whole, _text: &str) {}

    /// Appends to a refusal. Does nothing for plain completions, in which it is text already.
    fn append_refusal(&mut self, _whole: &mut Self::Whole, _text: &str) {}

    /// Appends a step of a tool call. Does nothing for dialects without them.
    fn append_call(&mut self, _whole: &mut Self::Whole, _call: &ToolCallDelta) {}

    fn end(&self, whole: &mut Self::Whole, reason: FinishReason);

    /// The first chunk of a choice's stream, if it has one.
    fn opening(&self, index: u32) -> Option<Self::Delta<'_>>;

    /// A chunk with the prompt, if the choice reports its tokens.
    fn prompt(&mut self, _index: u32, _tokens: &[GeneratedToken]) -> Option<Self::Delta<'_>> {
        None
    }

    /// A chunk with text, like [`Choices::append`].
    fn delta<'a>(&mut self, index: u32, text: &'a str, tokens: &[TokenLogprobs]) -> Self::Delta<'a>;

    /// A chunk with reasoning, like [`Choices::append_reasoning`].
    fn reasoning<'a>(&self, _index: u32, _text: &'a str) -> Option<Self::Delta<'a>> {
        None
    }

    /// A chunk with a part of a refusal, like [`Choices::append_refusal`].
    fn refusal<'a>(&self, _index: u32, _text: &'a str) -> Option<Self::Delta<'a>> {
        None
    }

    /// A chunk with a step of a tool call, like [`Choices::append_call`].
    fn call<'a>(&self, _index: u32, _call: &'a ToolCallDelta) -> Option<Self::Delta<'a>> {
        None
    }

    /// The last chunk of a choice.
    fn finish(&self, index: u32, reason: FinishReason) -> Self::Delta<'static>;
}

//! What a chat and a plain completion say differently: the shape of their choices.

use baton_reply::TokenLogprobs;
use baton_schemas::FinishReason;
use baton_schemas::tools::ToolCallDelta;
use serde::Serialize;

/// The choices of one reply. It may keep count of what it has said of each.
pub(super) trait Choices: Send + 'static {
    /// A choice of a whole reply.
    type Whole: Serialize + Send;
    /// A step of a choice, in a stream.
    type Delta: Serialize;

    /// A choice before its first text.
    fn unfinished(&self, index: u32) -> Self::Whole;

    /// Adds text, and the tokens that it was, if log-probabilities were asked for.
    fn append(&mut self, whole: &mut Self::Whole, text: &str, tokens: &[TokenLogprobs]);

    /// Adds reasoning. Where there is none, nothing.
    fn append_reasoning(&mut self, _whole: &mut Self::Whole, _text: &str) {}

    /// Adds a step of a call. Where there is none, nothing.
    fn append_call(&mut self, _whole: &mut Self::Whole, _call: &ToolCallDelta) {}

    /// Ends a choice.
    fn end(&self, whole: &mut Self::Whole, reason: FinishReason);

    /// What a choice's stream begins with, if anything.
    fn opening(&mut self, index: u32) -> Option<Self::Delta>;

    /// More text, as [`Choices::append`].
    fn delta(&mut self, index: u32, text: &str, tokens: &[TokenLogprobs]) -> Self::Delta;

    /// More reasoning, as [`Choices::append_reasoning`].
    fn reasoning(&mut self, _index: u32, _text: &str) -> Option<Self::Delta> {
        None
    }

    /// A step of a call, as [`Choices::append_call`].
    fn call(&mut self, _index: u32, _call: &ToolCallDelta) -> Option<Self::Delta> {
        None
    }

    /// A choice's last delta.
    fn finish(&self, index: u32, reason: FinishReason) -> Self::Delta;
}

//! What a chat and a plain completion say differently: the shape of their choices.

use baton_schemas::FinishReason;
use serde::Serialize;

use crate::generate::TokenLogprobs;

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

    /// Ends a choice.
    fn end(&self, whole: &mut Self::Whole, reason: FinishReason);

    /// What a choice's stream begins with, if anything.
    fn opening(&mut self, index: u32) -> Option<Self::Delta>;

    /// More text, as [`Choices::append`].
    fn delta(&mut self, index: u32, text: &str, tokens: &[TokenLogprobs]) -> Self::Delta;

    /// A choice's last delta.
    fn finish(&self, index: u32, reason: FinishReason) -> Self::Delta;
}

//! A reply in pieces of text, and the trait that reads them from an upstream's events.

use baton_schemas::FinishReason;
use baton_schemas::sequence::Logprobs;
use baton_schemas::tools::ToolCallDelta;
use futures::stream::BoxStream;

use crate::UpstreamError;

/// One choice's reply. It ends after [`TextDelta::Finished`]; a stream that ends without it has failed.
pub type TextStream = BoxStream<'static, Result<TextDelta, UpstreamError>>;

/// One step of a reply.
#[derive(Debug, Clone, PartialEq)]
pub enum TextDelta {
    /// More text for the user.
    Text {
        /// Whole characters.
        text: String,
        /// The text's tokens, if log-probabilities were requested. May be empty.
        tokens: Vec<TextToken>,
    },
    /// More reasoning.
    Reasoning(String),
    /// More of the words with which the model refuses to answer.
    Refusal(String),
    /// The reply holds something that is not passed on. Once for each kind.
    LeftOut(LeftOut),
    /// A step of a tool call.
    Call(ToolCallDelta),
    /// The end of the reply.
    Finished(TextEnd),
}

/// A token of an upstream's reply: its text without an id.
#[derive(Debug, Clone, PartialEq)]
pub struct TextToken {
    pub bytes: Vec<u8>,
    /// Its log-probability and the alternatives, whose ids are 0.
    pub logprobs: Logprobs,
}

/// A part of a reply that no dialect here can show.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum LeftOut {
    /// Sources of passages of the text, by their places in it.
    Annotations,
    /// Sources of the whole text.
    Citations,
    SearchResults,
    Images,
    /// Sound. Its transcript is passed on as text.
    Audio,
    /// A part of the text of another type.
    UnknownParts,
    /// Choices beside the requested one.
    OtherChoices,
}

impl LeftOut {
    /// The word for headers, logs and metrics.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// What a part of a text is that has no text itself, by the type that the server gives it.
    pub(super) fn of_part(kind: &str) -> LeftOut {
        match kind {
            "reference" | "citation" => LeftOut::Citations,
            "image" | "image_url" | "output_image" => LeftOut::Images,
            "audio" | "input_audio" | "output_audio" => LeftOut::Audio,
            _ => LeftOut::UnknownParts,
        }
    }
}

/// How a reply ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextEnd {
    pub reason: FinishReason,
    /// The upstream's word for the reason if it is not known. Then the reason is [`FinishReason::Length`].
    pub unknown: Option<String>,
    /// The upstream's token counts.
    pub usage: TextUsage,
}

/// Token counts as the upstream reports them. A count that it does not report is `None`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TextUsage {
    /// Tokens of the prompt.
    pub n_prompt: Option<u32>,
    /// Prompt tokens that were cached.
    pub n_cached: Option<u32>,
    /// Generated tokens.
    pub n_completion: Option<u32>,
    /// Generated tokens that were reasoning.
    pub n_reasoning: Option<u32>,
}

/// Reads one reply, event by event.
pub(crate) trait DeltaReader: Send {
    /// Reads one event's JSON and appends its deltas to `out`.
    fn read(&mut self, event: &[u8], out: &mut Vec<TextDelta>) -> Result<(), UpstreamError>;

    /// Ends the reply after its last event. Returns `None` if the upstream has not said that the reply is complete.
    fn end(&mut self, out: &mut Vec<TextDelta>) -> Option<TextEnd>;
}

/// A random id for a tool call that came without one. Random, so that the calls of one conversation differ.
pub(crate) fn new_call_id() -> String {
    format!("call_{:016x}", rand::random::<u64>())
}

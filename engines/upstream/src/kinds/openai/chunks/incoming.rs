//! The form of a chunk, and of a whole reply.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::reply::foreign::{
    Aside, Count, ForeignCall, ForeignFunction, ForeignObject, ForeignWord, List, MAX_CALLS, Needed, Object, Said,
};
use crate::reply::logprobs::JsonText;

/// The most choices in one chunk. One is requested, and OpenAI makes as many.
const MAX_CHOICES: usize = 128;

/// The fields that are read. All others are skipped, so nothing that a server adds reaches a client.
#[derive(Default, Deserialize)]
pub(super) struct StreamChunk<'a> {
    #[serde(borrow, default)]
    pub(super) choices: List<Needed<IncomingChoice<'a>>, MAX_CHOICES>,
    #[serde(default)]
    pub(super) usage: Aside<ChunkUsage>,
    #[serde(borrow)]
    pub(super) error: Option<&'a RawValue>,
    /// vLLM's old form of an error: `{"object":"error","message":…,"code":400}`.
    #[serde(default)]
    pub(super) object: ForeignWord,
    /// The sources that a server which searches the web names.
    #[serde(borrow)]
    pub(super) citations: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) search_results: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
pub(super) struct IncomingChoice<'a> {
    /// Its number among the choices. Without one, it is the choice that is read.
    #[serde(default)]
    pub(super) index: Count,
    #[serde(borrow, default)]
    pub(super) delta: Needed<IncomingDelta<'a>>,
    /// A reply that is not a stream has this instead of `delta`. Some servers end a stream with it.
    #[serde(borrow, default)]
    pub(super) message: Needed<IncomingDelta<'a>>,
    /// The text, in plain completions.
    #[serde(borrow, default)]
    pub(super) text: Said<'a>,
    #[serde(borrow)]
    pub(super) finish_reason: Option<JsonText<'a>>,
    #[serde(borrow)]
    pub(super) logprobs: Option<&'a RawValue>,
    /// OpenRouter's place for an error after text.
    #[serde(borrow)]
    pub(super) error: Option<&'a RawValue>,
}

impl IncomingChoice<'_> {
    /// Its text, if it has nothing else that is read.
    pub(super) fn only_text(&self) -> Option<&str> {
        let IncomingChoice { index: _, delta, message: Object(None), text, finish_reason, logprobs: None, error: None } =
            self
        else {
            return None;
        };
        if finish_reason.as_ref().is_some_and(|reason| !reason.0.is_empty()) {
            return None;
        }
        match (&delta.0, text) {
            (None, Said::Text(text)) => Some(text),
            (
                Some(IncomingDelta {
                    content: Said::Text(content),
                    reasoning_content: Said::Nothing,
                    reasoning: Said::Nothing,
                    reasoning_text: None,
                    thinking: None,
                    thinking_blocks: None,
                    reasoning_details: None,
                    refusal: Said::Nothing,
                    tool_calls: List(calls),
                    function_call: Object(None),
                    annotations: None,
                    citations: None,
                    images: None,
                    context: Object(None),
                    audio: Object(None),
                }),
                Said::Nothing,
            ) if calls.is_empty() => Some(content),
            _ => None,
        }
    }
}

#[derive(Default, Deserialize)]
pub(super) struct IncomingDelta<'a> {
    #[serde(borrow, default)]
    pub(super) content: Said<'a>,
    #[serde(borrow, default)]
    pub(super) reasoning_content: Said<'a>,
    /// The reasoning under the newer name of vLLM and OpenRouter.
    #[serde(borrow, default)]
    pub(super) reasoning: Said<'a>,
    /// The reasoning under other names, of which these two are texts, and the others lists.
    #[serde(borrow)]
    pub(super) reasoning_text: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) thinking: Option<&'a RawValue>,
    /// LiteLLM's, and OpenRouter's: mostly beside the same reasoning as text.
    #[serde(borrow)]
    pub(super) thinking_blocks: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) reasoning_details: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) refusal: Said<'a>,
    #[serde(borrow, default)]
    pub(super) tool_calls: List<Needed<ForeignCall<'a>>, MAX_CALLS>,
    /// The older form of a call.
    #[serde(borrow, default)]
    pub(super) function_call: Needed<ForeignFunction<'a>>,
    #[serde(borrow)]
    pub(super) annotations: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) citations: Option<&'a RawValue>,
    #[serde(borrow)]
    pub(super) images: Option<&'a RawValue>,
    #[serde(borrow, default)]
    pub(super) context: Aside<IncomingContext<'a>>,
    #[serde(borrow, default)]
    pub(super) audio: Aside<IncomingAudio<'a>>,
}

#[derive(Default, Deserialize)]
pub(super) struct IncomingAudio<'a> {
    #[serde(borrow, default)]
    pub(super) transcript: Said<'a>,
}

/// The passages that Azure found in its customer's own data.
#[derive(Default, Deserialize)]
pub(super) struct IncomingContext<'a> {
    #[serde(borrow)]
    pub(super) citations: Option<&'a RawValue>,
}

#[derive(Deserialize)]
pub(super) struct ChunkUsage {
    #[serde(default)]
    pub(super) prompt_tokens: Count,
    #[serde(default)]
    pub(super) completion_tokens: Count,
    #[serde(default)]
    pub(super) prompt_tokens_details: Aside<PromptDetails>,
    #[serde(default)]
    pub(super) completion_tokens_details: Aside<CompletionDetails>,
}

#[derive(Deserialize)]
pub(super) struct PromptDetails {
    #[serde(default)]
    pub(super) cached_tokens: Count,
}

#[derive(Deserialize)]
pub(super) struct CompletionDetails {
    #[serde(default)]
    pub(super) reasoning_tokens: Count,
}

impl<'de: 'a, 'a> ForeignObject<'de> for StreamChunk<'a> {
    const ASIDE: &'static [&'static str] = &["usage", "error", "object", "citations", "search_results"];
}

impl<'de: 'a, 'a> ForeignObject<'de> for IncomingChoice<'a> {
    const ASIDE: &'static [&'static str] = &["index", "logprobs", "error"];
}

impl<'de: 'a, 'a> ForeignObject<'de> for IncomingDelta<'a> {
    const ASIDE: &'static [&'static str] = &["annotations", "citations", "images", "context"];
}

impl<'de: 'a, 'a> ForeignObject<'de> for IncomingContext<'a> {
    const ASIDE: &'static [&'static str] = &["citations"];
}

impl<'de: 'a, 'a> ForeignObject<'de> for IncomingAudio<'a> {
    const ASIDE: &'static [&'static str] = &[];
}

impl ForeignObject<'_> for ChunkUsage {
    const ASIDE: &'static [&'static str] =
        &["prompt_tokens", "completion_tokens", "prompt_tokens_details", "completion_tokens_details"];
}

impl ForeignObject<'_> for PromptDetails {
    const ASIDE: &'static [&'static str] = &["cached_tokens"];
}

impl ForeignObject<'_> for CompletionDetails {
    const ASIDE: &'static [&'static str] = &["reasoning_tokens"];
}

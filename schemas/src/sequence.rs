//! Requests to continue one sequence of tokens, and the engine's events.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub use crate::cache_scope::CacheScope;
use crate::constraint::Constraint;
pub use crate::draft::{DraftCounts, DraftTotals};
use crate::draft::{DraftReport, DrafterLoss};
use crate::handoff::{HandoffReport, KvSource};
use crate::image::PromptImages;
use crate::key_tag::KeyTag;
use crate::sampling::Sampling;
pub use crate::token::Token;

/// A sequence to continue. A client's `n` choices are `n` such requests; the engine computes their common prompt once.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SequenceRequest {
    /// The prompt, at least one token.
    pub prompt: Vec<Token>,
    /// The resume point: tokens that this or another engine already generated after the prompt. They count towards
    /// `max_tokens` and are not sent again. The sampler's state is rebuilt from them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub generated: Vec<Token>,
    /// How tokens are sampled.
    pub sampling: Sampling,
    /// The most tokens after the prompt, including `generated`. `None`: until the context ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u32>,
    /// `Some(k)`: report log-probabilities and the k most likely tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_logprobs: Option<u32>,
    /// `Some(k)`: generate nothing and report the prompt's tokens, each after the first with its log-probability and the
    /// k most likely tokens at its position. The whole prompt is computed, cached or not. Needs `max_tokens` 0, and
    /// neither `generated` nor images. Engines from before this field report no token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<u32>,
    /// Also report the token that ends the text.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reports_end: bool,
    /// Report with the first token of each step what was verified of its draft. The endpoint ends a reply at a stop string before the
    /// engine sends its last event. Engines from before this field report nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reports_drafts: bool,
    /// Continue after the model's end-of-turn tokens, for benchmarks that need a fixed length.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ignore_eos: bool,
    /// The group of the choices of one request. They start in the same step, so that their tokens do not depend on when
    /// each choice arrived.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<Group>,
    /// The caller's scope. KV is reused only between sequences of the same scope: otherwise the speed of a reply would
    /// reveal to one caller what another caller's prompts contain.
    #[serde(default, skip_serializing_if = "CacheScope::is_shared")]
    pub cache_scope: CacheScope,
    /// The API key for which it is generated. Keys take turns where constraints are compiled.
    #[serde(default, skip_serializing_if = "KeyTag::is_none")]
    pub key: KeyTag,
    /// The form that the text must have, shared by the choices of a request. `generated` was sampled under it.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "crate::shared::optional")]
    pub constraint: Option<Arc<Constraint>>,
    /// Do not cache the sequence: its prompt was generated for a measurement.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ephemeral: bool,
    /// A measurement of an idle engine: it ends with [`EngineError::GaveWay`](crate::EngineError::GaveWay) as soon as
    /// the engine has a request.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gives_way: bool,
    /// Compute nothing: bring here what `kv_source` has of the prompt, beyond what is here. Needs `max_tokens` 0. Whatever ends it,
    /// what has come stays.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub held_only: bool,
    /// What the client expects the reply to be. Engines that verify guesses try its tokens first; the reply is the same.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub predicted: Vec<Token>,
    /// Nothing that went through a lossy codec may be used: the KV travels and comes back losslessly, or is computed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lossless_kv: bool,
    /// The images of the placeholders in the prompt, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub images: Option<PromptImages>,
    /// A prefill node that computes the prompt's KV. Without one, or if it fails, the engine computes the KV itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_source: Option<KvSource>,
    /// A draft node that may follow the sequence. The reply is the same without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft_source: Option<KvSource>,
}

impl SequenceRequest {
    /// The projector that the images were encoded with; `None` without images.
    pub fn projector(&self) -> Option<&str> {
        self.images.as_ref().map(|images| images.projector.as_str())
    }

    /// Returns true if the endpoint wants to know when its prompt waits in no queue any more.
    pub fn reports_begin(&self) -> bool {
        self.kv_source.as_ref().is_some_and(|source| source.reports_begin)
    }

    /// Returns how many tokens of prompt and resume point are computed in large batches, as a prompt is. The last token
    /// is always decoded.
    ///
    /// If sampling is greedy, the tokens of the resume point are decoded one by one, which takes as long as it did the
    /// first time. A decode step sums in another order than a large batch, so only decoding reproduces the bits of the
    /// KV, and only the same bits guarantee the same continuation. With a temperature above 0, another continuation is
    /// as good.
    pub fn n_prefill(&self) -> usize {
        let n_replayed = if self.sampling.temperature > 0.0 { 0 } else { self.generated.len() };
        (self.prompt.len() + self.generated.len()).saturating_sub(n_replayed + 1)
    }
}

/// A group of sequences that start in the same step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// The group's unique number.
    pub id: u64,
    /// The number of sequences in the group.
    pub size: u32,
}

/// One step of an engine's answer. A stream is `Started`, then `PrefillBegun` if the request asks for it, `Handoff` if there was one,
/// `Token`s, and exactly one `Finished`. A stream that ends without `Finished` has failed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SequenceEvent {
    /// The sequence has a slot and its prefill begins.
    Started(CachedTokens),
    /// The prompt waits in no queue any more: the node that it is pulled from has given it a slot, or nothing is pulled.
    PrefillBegun,
    /// A pull of the prompt's KV from another node succeeded or failed. Comes before the first token.
    Handoff(HandoffReport),
    /// A new token, or one of the prompt if the request has `prompt_logprobs`. Tokens travel in frames of their own ([`streams`](crate::streams)), and have no JSON.
    #[serde(skip)]
    Token(GeneratedToken),
    /// The end of the sequence.
    Finished {
        /// Why the generation ended.
        reason: FinishReason,
        /// Where the time went.
        timings: Timings,
    },
}

/// The tokens of prompt and resume point whose KV was there when the sequence started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CachedTokens {
    /// All of them.
    pub n_cached: u32,
    /// Those that came back from the host's memory.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub memory: u32,
    /// Those that came back from a disk.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub disk: u32,
}

impl CachedTokens {
    /// Tokens that are all in slots.
    pub fn in_slot(n_cached: u32) -> CachedTokens {
        CachedTokens { n_cached, memory: 0, disk: 0 }
    }

    /// Those that came back from the store.
    pub fn stored(self) -> u32 {
        self.memory.saturating_add(self.disk)
    }

    /// Those that were in a slot.
    pub fn slot(self) -> u32 {
        self.n_cached.saturating_sub(self.memory).saturating_sub(self.disk)
    }
}

fn is_zero(n: &u32) -> bool {
    *n == 0
}

/// A generated token, or one of the prompt.
#[derive(Debug, Clone, PartialEq)]
pub struct GeneratedToken {
    /// The token.
    pub id: Token,
    /// Its bytes. They may not be UTF-8, because a character may span tokens.
    pub bytes: Vec<u8>,
    /// True for a control token, which is not part of the text.
    pub special: bool,
    /// Log-probabilities, if requested.
    pub logprobs: Option<Logprobs>,
    /// The fate of the guesses for it and the tokens after it, if the request has [`SequenceRequest::reports_drafts`].
    pub drafts: Option<DraftReport>,
}

/// Log-probabilities at one position, as natural logarithms. They are of the model's own distribution: before
/// penalties, temperature and truncation.
#[derive(Debug, Clone, PartialEq)]
pub struct Logprobs {
    /// The log-probability of the chosen token.
    pub chosen: f32,
    /// Its place among all tokens by likelihood, from 1. Only engines here say it, and only of a prompt's tokens.
    pub rank: Option<u32>,
    /// The most likely tokens, best first.
    pub top: Vec<Alternative>,
}

/// One of the most likely tokens at a position.
#[derive(Debug, Clone, PartialEq)]
pub struct Alternative {
    /// The token.
    pub id: Token,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Its log-probability.
    pub logprob: f32,
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended its turn, or a stop string was reached.
    Stop,
    /// `max_tokens` or the end of the context was reached.
    Length,
    /// The reply ends with calls of tools. Set by the endpoint, which parses the calls; engines never use it.
    ToolCalls,
    /// The model refused to answer, in words of its own. Only upstreams report it.
    Refusal,
    /// A filter cut the reply, or kept it back. Only upstreams report it.
    ContentFilter,
}

/// Where an engine's time for one sequence went. Times are in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Timings {
    /// Wait for a slot.
    pub queue_ms: f64,
    /// Prompt tokens that this engine computed: those that were not cached.
    pub prompt_n: u32,
    /// From getting the slot to the first token.
    pub prompt_ms: f64,
    /// The part of `prompt_ms` in which KV came back from the store, before `Started`.
    pub restore_ms: f64,
    /// The part of `prompt_ms` that these tokens would have taken alone, without other sequences. 0 if unknown.
    pub compute_ms: f64,
    /// Tokens that this engine generated.
    pub predicted_n: u32,
    /// From the first token to the last.
    pub predicted_ms: f64,
    /// The average number of sequences in its steps, including itself. 0 if unknown.
    pub n_sharing: f64,
    /// Tokens that were guessed and verified.
    pub drafts: DraftTotals,
    /// Why the engine gave up the sequence's draft node, if it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drafter_lost: Option<DrafterLoss>,
}

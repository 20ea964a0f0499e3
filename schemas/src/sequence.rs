//! Requests to an engine and its events: the continuation of one sequence of tokens.

use serde::{Deserialize, Serialize};

pub use crate::cache_scope::CacheScope;
use crate::constraint::Constraint;
use crate::handoff::{HandoffReport, KvSource};
use crate::image::PromptImages;
use crate::sampling::Sampling;
pub use crate::token::Token;

/// One sequence to continue. A client's `n` choices are `n` of these; an engine computes their common prompt once.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SequenceRequest {
    /// The prompt, at least one token.
    pub prompt: Vec<Token>,
    /// Resume point: tokens that were already generated after the prompt, here or on another engine. They count
    /// against `max_tokens`, are never sent again, and sampler state is rebuilt from them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub generated: Vec<Token>,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Tokens after the prompt at most, `generated` included. `None`: until the context ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u32>,
    /// `Some(k)`: report log-probabilities, with the k best alternatives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_logprobs: Option<u32>,
    /// Go on past the model's end-of-turn tokens, for benchmarks that need a fixed length.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ignore_eos: bool,
    /// The other choices of the same request, which start in the same step: then what they say does not depend on
    /// when each of them arrived.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<Group>,
    /// Whose prompt this is. KV is reused only between sequences of equal scope, because what is cached, and so how
    /// fast a reply starts, would tell one caller about another's prompts.
    #[serde(default, skip_serializing_if = "CacheScope::is_shared")]
    pub cache_scope: CacheScope,
    /// The form that the text must have. `generated` was drawn under the same constraint.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub constraint: Option<Constraint>,
    /// Keep nothing of it: for made-up prompts that nobody will continue.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ephemeral: bool,
    /// The images behind the placeholders in the prompt, if it has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub images: Option<PromptImages>,
    /// A prefill node that computes the prompt's KV. Without one, or where it fails, the engine computes it itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_source: Option<KvSource>,
}

impl SequenceRequest {
    /// How many tokens of prompt and resume point are computed as a prompt is, in large batches. The last of them is
    /// decoded, and so is each one after it of a greedy sequence: a step adds up in another order than a batch of many
    /// tokens does, and only with the same bits in the KV is what follows sure to be what would have followed. That takes
    /// as long as it took. Where tokens are drawn nobody can tell one draw from another, and all are computed together.
    pub fn n_prefill(&self) -> usize {
        let n_replayed = if self.sampling.temperature > 0.0 { 0 } else { self.generated.len() };
        (self.prompt.len() + self.generated.len()).saturating_sub(n_replayed + 1)
    }
}

/// Sequences that belong together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// The same for all of them, and for no other.
    pub id: u64,
    /// How many they are.
    pub size: u32,
}

/// One step of an engine's answer. A stream is `Started`, a `Handoff` if there was one, then `Token`s, then exactly one `Finished`; a stream that
/// ends without `Finished` has failed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SequenceEvent {
    /// The sequence has a slot and its prefill begins.
    Started {
        /// Tokens of prompt and resume point whose KV was already here.
        n_cached: u32,
    },
    /// The prompt's KV was pulled from another node, or that was tried. Comes before the first token.
    Handoff(HandoffReport),
    /// A new token.
    Token(GeneratedToken),
    /// The last delta.
    Finished {
        /// Why generation ended.
        reason: FinishReason,
        /// Where the time went.
        timings: Timings,
    },
}

/// A generated token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GeneratedToken {
    /// The token.
    pub id: Token,
    /// Its bytes; not UTF-8 by itself, since a character may span tokens.
    #[serde(with = "piece")]
    pub bytes: Vec<u8>,
    /// A control token: part of a format, not of the text.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub special: bool,
    /// Present if log-probabilities were asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Logprobs>,
}

/// Log-probabilities at one position, natural logarithm, of the model's own distribution (before penalties,
/// temperature and truncation).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Logprobs {
    /// Log-probability of the chosen token.
    pub chosen: f32,
    /// The most likely tokens, best first.
    pub top: Vec<Alternative>,
}

/// A token that could have been chosen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Alternative {
    /// The token.
    pub id: Token,
    /// Its bytes.
    #[serde(with = "piece")]
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
    /// The reply ends with calls of tools. Engines never say so: the endpoint does, which reads the calls.
    ToolCalls,
}

/// Where an engine's time for one sequence went. Times in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Timings {
    /// Waiting for a slot.
    pub queue_ms: f64,
    /// Prompt tokens computed here (not cached).
    pub prompt_n: u32,
    /// From the slot to the first token.
    pub prompt_ms: f64,
    /// Of that, these tokens' share of the engine's work: what they would have taken alone. 0 if it is not known.
    pub compute_ms: f64,
    /// Tokens generated here.
    pub predicted_n: u32,
    /// From the first token to the last.
    pub predicted_ms: f64,
    /// Sequences that shared its steps, itself included, on average. 0 if it is not known.
    pub n_sharing: f64,
}

/// Token bytes in JSON: a string where they are UTF-8, else base64 in an object, so that no byte is lost.
mod piece {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

    #[derive(Serialize, Deserialize)]
    #[serde(untagged)]
    enum TokenPiece<S> {
        Text(S),
        Bytes { base64: String },
    }

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        match std::str::from_utf8(bytes) {
            Ok(text) => TokenPiece::Text(text).serialize(serializer),
            Err(_) => TokenPiece::<&str>::Bytes { base64: STANDARD.encode(bytes) }.serialize(serializer),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        match TokenPiece::<String>::deserialize(deserializer)? {
            TokenPiece::Text(text) => Ok(text.into_bytes()),
            TokenPiece::Bytes { base64 } => STANDARD.decode(base64).map_err(D::Error::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_bytes_survive_json_whether_or_not_they_are_utf8() {
        for bytes in [b"plain".to_vec(), vec![0xF0, 0x9F], Vec::new(), "\u{0}\"\\\n".as_bytes().to_vec()] {
            let delta = SequenceEvent::Token(GeneratedToken { id: 7, bytes, special: false, logprobs: None });
            let json = serde_json::to_string(&delta).unwrap();
            assert_eq!(serde_json::from_str::<SequenceEvent>(&json).unwrap(), delta, "{json}");
        }
    }
}

//! Texts as vectors: what a client asks, what an engine is asked, and what it answers.

use serde::{Deserialize, Serialize};

use crate::keep_alive::KeepAlive;
use crate::token::Token;

/// Texts of one request. OpenAI's limit.
pub const MAX_INPUTS: usize = 2_048;

/// Tokens of all texts of one request: OpenAI's limit.
pub const MAX_TOTAL_TOKENS: usize = 300_000;

/// A client's request, free of any dialect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmbedRequest {
    /// The model's public name, as the client wrote it.
    pub model: String,
    /// At most [`MAX_INPUTS`].
    pub inputs: Vec<EmbedInput>,
    /// Cut a text that is too long, instead of refusing it.
    pub truncate: bool,
    /// Values a vector is to have, if the client says so.
    pub dimensions: Option<u32>,
    /// How long the model is to stay in memory afterwards, if the client says so.
    pub keep_alive: Option<KeepAlive>,
}

/// What becomes one vector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EmbedInput {
    /// Plain text: what it spells is never a control token.
    Text(String),
    /// Exact tokens, those that begin and end a text included.
    Tokens(Vec<Token>),
}

/// What an engine is asked: one vector for each of these, in this order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmbedSequences {
    /// None is empty; at most [`MAX_INPUTS`].
    pub inputs: Vec<Vec<Token>>,
}

/// One step of an engine's answer: as many `Vector`s as there were inputs, in their order, then one `Finished`. A stream
/// that ends without it has failed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EmbedEvent {
    /// Of length 1, every value finite.
    #[serde(with = "packed")]
    Vector(Vec<f32>),
    /// The last delta.
    Finished {
        /// Where the time went.
        timings: EmbedTimings,
    },
}

/// Where an engine's time for some texts went, in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EmbedTimings {
    /// Before the first of them was begun with.
    pub queue_ms: f64,
    /// From then to the last vector.
    pub compute_ms: f64,
}

/// How a model's vectors come about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmbeddingFacts {
    /// Values of a vector.
    pub n_embd: u32,
    /// Tokens of one text at most.
    pub n_ctx: u32,
    /// Which tokens' states become the text's vector.
    pub pooling: Pooling,
    /// The model's file names that pooling: it was trained for this. Other models' vectors are what they are.
    pub is_trained: bool,
}

/// From one state per token to one vector per text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooling {
    /// The mean of all.
    Mean,
    /// The first token's.
    Cls,
    /// The last token's.
    Last,
}

/// The values as bytes: 32-bit floats, the least significant byte first. OpenAI's base64 form has the same.
pub fn le_bytes(vector: &[f32]) -> Vec<u8> {
    vector.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// A vector in JSON: base64 of [`le_bytes`], which is exact and half as long as digits.
mod packed {
    use base64::Engine as _;
    use base64::engine::general_purpose::STANDARD;
    use serde::{Deserialize, Deserializer, Serializer, de::Error as _};

    pub(super) fn serialize<S: Serializer>(vector: &[f32], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&STANDARD.encode(super::le_bytes(vector)))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<f32>, D::Error> {
        let bytes = STANDARD.decode(String::deserialize(deserializer)?).map_err(D::Error::custom)?;
        let (values, rest) = bytes.as_chunks::<4>();
        let vector: Vec<f32> = values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        if !rest.is_empty() || vector.iter().any(|value| !value.is_finite()) {
            return Err(D::Error::custom("a vector is cut short or not finite"));
        }
        Ok(vector)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_survive_json_to_the_bit_and_nonsense_does_not() {
        let delta = EmbedEvent::Vector(vec![0.1, -f32::MIN_POSITIVE, 1.0 / 3.0, f32::MAX]);
        let json = serde_json::to_string(&delta).unwrap();
        assert_eq!(serde_json::from_str::<EmbedEvent>(&json).unwrap(), delta, "{json}");
        assert_eq!(le_bytes(&[1.0]), [0, 0, 0x80, 0x3F]);
        for wrong in ["AAAA", "AADAfw==", "not base64", "AACAfw=="] {
            let json = format!(r#"{{"vector":"{wrong}"}}"#);
            assert!(serde_json::from_str::<EmbedEvent>(&json).is_err(), "{json}");
        }
    }
}

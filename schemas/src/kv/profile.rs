//! What `kvq` and `kvq_fast` know of a model: how exactly each channel of K and each layer has to be kept.
//!
//! `baton-bench calibrate-codec` measures it. Only the writer of a stream needs it: the steps that follow from it travel with the
//! rows. Without a profile every channel of a tensor has the same step.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use super::chunk::Chunk;
use super::codec::knowledge::{self, ProfileError, TensorProfile};
use super::codec::{self, Codec};
use super::layout::KvLayout;
use super::rotation::KeyRotation;

/// Positions from the start of a sequence that `kvq` and `kvq_fast` send as they are.
pub const EXACT_POSITIONS: u32 = codec::EXACT_POSITIONS;

/// The most bytes of a profile's file.
pub const MAX_PROFILE_BYTES: u64 = 1 << 20;

/// How `kvq` quantizes a model's KV, and how much that changes its predictions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CodecProfile {
    /// The hash of the model's weights, as in its [`Fingerprint`](super::Fingerprint).
    #[serde(with = "hex")]
    pub weights: [u8; 32],
    /// One for each tensor of the layout, in canonical order.
    pub tensors: Vec<TensorProfile>,
    /// The losses of the lossy codecs with this profile.
    pub losses: Vec<CodecLoss>,
}

/// How much a codec changes a model's predictions.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CodecLoss {
    /// The codec.
    pub codec: Codec,
    /// Mean KL divergence of the predictions for given tokens, nats.
    pub mean_kl: f64,
    /// Plain bytes divided by bytes on the wire.
    pub ratio: f64,
}

impl CodecLoss {
    /// Reads a list and leaves out what is not known here, such as codecs of later versions.
    pub(crate) fn known<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<CodecLoss>, D::Error> {
        let all = Vec::<serde_json::Value>::deserialize(deserializer)?;
        Ok(all.into_iter().filter_map(|loss| serde_json::from_value(loss).ok()).collect())
    }

    /// The first possible loss of each codec. A peer may send anything.
    pub fn usable(losses: &[CodecLoss]) -> Vec<CodecLoss> {
        let is_possible = |loss: &&CodecLoss| loss.mean_kl >= 0.0 && loss.mean_kl.is_finite() && loss.ratio > 0.0;
        let first = |codec: Codec| losses.iter().filter(is_possible).find(|loss| loss.codec == codec).copied();
        Codec::ALL.into_iter().filter_map(first).collect()
    }
}

/// The variance of every channel of every tensor of a chunk, in canonical order, in the form that `kvq` quantizes: K without
/// its rotation, and without the first positions. The chunk fits the layout.
pub fn channel_variances(layout: &KvLayout, rotation: Option<&KeyRotation>, chunk: &Chunk) -> Vec<Vec<f32>> {
    codec::channel_variances(layout, rotation, chunk)
}

impl CodecProfile {
    /// Checks it against the layout of the model's KV.
    pub fn check(&self, layout: &KvLayout) -> Result<(), ProfileError> {
        knowledge::check(&self.tensors, layout)?;
        match CodecLoss::usable(&self.losses).len() == self.losses.len() {
            true => Ok(()),
            false => Err(ProfileError("impossible losses".to_owned())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_and_unknown_losses_of_a_peer_are_left_out() {
        let loss = |codec, mean_kl| CodecLoss { codec, mean_kl, ratio: 4.0 };
        let good = loss(Codec::Kvq, 0.01);
        let all = [loss(Codec::Q8_0, -1.0), loss(Codec::KvqFast, f64::INFINITY), good, loss(Codec::Kvq, 0.001)];
        assert_eq!(CodecLoss::usable(&all), [good]);
        let mut json = serde_json::Deserializer::from_str(
            r#"[{"codec":"of_next_year","mean_kl":0.1,"ratio":9},{"codec":"kvq","mean_kl":0.01,"ratio":4.0}]"#,
        );
        assert_eq!(CodecLoss::known(&mut json).unwrap(), [good]);
    }
}

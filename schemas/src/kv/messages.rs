//! The JSON payloads of records. Unknown fields are ignored, so that newer peers can add some.

use serde::{Deserialize, Serialize};

use super::codec::Codec;
use super::handoff::{Fingerprint, Handoff, HandoffId};
use super::layout::KvLayout;
use super::mac::Mac;
use super::rotation::KeyRotation;

/// Returns the version of the format of payloads: 1 for rows of floats. Readers of version 1 would ignore the states of a
/// layout, and would not know its quantized types or rows of several tokens: streams with any of these have version 2, which
/// those readers refuse.
pub fn format_version(layout: &KvLayout) -> u32 {
    let is_known_to_all = layout.states.is_empty() && layout.sections.iter().all(|section| section.n_rot == [0; 2]);
    if is_known_to_all && !layout.is_quantized() && !layout.is_compressed() { 1 } else { 2 }
}

/// The most bytes in a head. Layouts with [`MAX_LAYERS`](super::layout::MAX_LAYERS) layers fit.
pub const MAX_HEAD_BYTES: u64 = 1 << 20;

/// The most bytes in any other JSON payload.
pub const MAX_MESSAGE_BYTES: u64 = 64 << 10;

/// Longer times are refused as impossible: about 12 days in milliseconds.
const MAX_MS: f64 = 1e9;

/// Describes the stream. The reader refuses values that differ from its request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HandoffHead {
    /// [`format_version`] of the layout.
    pub version: u32,
    /// The pull that this stream answers.
    pub handoff: HandoffId,
    /// The model that computes the KV.
    pub fingerprint: Fingerprint,
    /// The shape of the model's KV.
    pub layout: KvLayout,
    /// The first position of the first frame.
    pub start: u32,
    /// One past the last position of the last frame.
    pub end: u32,
    /// The encoding of the rows of every frame.
    pub codec: Codec,
    /// The MAC of every record after this one.
    #[serde(default, skip_serializing_if = "Mac::is_default")]
    pub mac: Mac,
    /// How K was rotated, if the codec undid it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rotation: Option<KeyRotation>,
    /// The positions for which the stream has states, ascending. The last one is `end` if the layout has states; none if it
    /// has none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub states_at: Vec<u32>,
    /// The encoding of all states.
    #[serde(default, skip_serializing_if = "Codec::is_default")]
    pub state_codec: Codec,
}

impl HandoffHead {
    /// Creates the head of a handoff's stream.
    pub fn of(handoff: &Handoff, codec: Codec, mac: Mac) -> HandoffHead {
        HandoffHead {
            version: format_version(&handoff.layout),
            handoff: handoff.id,
            fingerprint: handoff.fingerprint,
            layout: handoff.layout.clone(),
            start: handoff.start,
            end: handoff.end(),
            codec,
            mac,
            rotation: None,
            states_at: handoff.states_at(&[]),
            state_codec: Codec::None,
        }
    }
}

/// A sign of life: with it, a reader can distinguish a slow node from a dead one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Wait {
    /// The number of requests that are served before this one.
    pub queued_ahead: u32,
    /// The number of this handoff's positions that are computed.
    pub n_done: u32,
    /// This handoff waits for no other: it has its slot. The writer says so once it has.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub has_begun: bool,
}

/// The last record of a complete handoff.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct HandoffEnd {
    /// The number of frames.
    pub n_frames: u32,
    /// The first position of the first frame.
    pub start: u32,
    /// One past the last position of the last frame.
    pub end: u32,
    /// Where the prefill node's time went.
    #[serde(default)]
    pub timings: PrefillTimings,
}

/// Where the prefill node's time went. Times are in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PrefillTimings {
    /// Wait for a slot.
    pub queue_ms: f64,
    /// From getting the slot to the last computed token.
    pub prefill_ms: f64,
    /// The part of `prefill_ms` spent waiting for the reader to take frames.
    pub stalled_ms: f64,
    /// An estimate of the part of `prefill_ms` that this prompt would have taken alone, without other sequences. 0 if
    /// the node does not report it.
    #[serde(skip_serializing_if = "is_unknown")]
    pub compute_ms: f64,
    /// Time to copy KV out of the engine.
    pub export_ms: f64,
    /// Time to encode and hash frames.
    pub encode_ms: f64,
    /// Tokens that were computed for this handoff.
    pub n_computed: u32,
    /// Tokens whose KV was cached.
    pub n_cached: u32,
}

fn is_unknown(ms: &f64) -> bool {
    *ms == 0.0
}

impl PrefillTimings {
    /// Returns true if the numbers are possible for a prompt of `n_tokens` tokens.
    pub fn are_possible(&self, n_tokens: u32) -> bool {
        let PrefillTimings { queue_ms, prefill_ms, stalled_ms, compute_ms, export_ms, encode_ms, .. } = *self;
        let times = [queue_ms, prefill_ms, stalled_ms, compute_ms, export_ms, encode_ms];
        times.iter().all(|ms| (0.0..=MAX_MS).contains(ms)) && self.n_computed <= n_tokens && self.n_cached <= n_tokens
    }
}

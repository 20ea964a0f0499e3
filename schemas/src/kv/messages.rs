//! The records whose payload is JSON. Unknown fields are ignored, so that a newer peer may say more.

use serde::{Deserialize, Serialize};

use super::codec::Codec;
use super::handoff::{Fingerprint, Handoff, HandoffId};
use super::layout::KvLayout;

/// The version of everything that a handoff stream says after its record headers.
pub const FORMAT_VERSION: u32 = 1;

/// Bytes of a head; layouts of [`MAX_LAYERS`](super::layout::MAX_LAYERS) layers fit.
pub const MAX_HEAD_BYTES: u64 = 1 << 20;

/// Bytes of any other JSON payload.
pub const MAX_MESSAGE_BYTES: u64 = 64 << 10;

/// Times beyond this are refused as nonsense (about 12 days).
const MAX_MS: f64 = 1e9;

/// Describes the stream. The reader knows every value beforehand and refuses a stream that differs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HandoffHead {
    /// [`FORMAT_VERSION`].
    pub version: u32,
    /// The pull that this answers.
    pub handoff: HandoffId,
    /// The model that computes the KV.
    pub fingerprint: Fingerprint,
    /// The shape of its KV.
    pub layout: KvLayout,
    /// First position of the first frame.
    pub start: u32,
    /// One past the last position of the last frame.
    pub end: u32,
    /// How the rows of every frame are encoded.
    pub codec: Codec,
}

impl HandoffHead {
    /// The head of `handoff`.
    pub fn of(handoff: &Handoff, codec: Codec) -> HandoffHead {
        HandoffHead {
            version: FORMAT_VERSION,
            handoff: handoff.id,
            fingerprint: handoff.fingerprint,
            layout: handoff.layout.clone(),
            start: handoff.start,
            end: handoff.end(),
            codec,
        }
    }
}

/// A sign of life, so that a reader can tell a slow node from a dead one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Wait {
    /// Requests that are served before this one.
    pub queued_ahead: u32,
    /// Positions computed so far, of this handoff's.
    pub n_done: u32,
}

/// The last record of a whole handoff.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct HandoffEnd {
    /// Frames that were sent.
    pub n_frames: u32,
    /// First position of the first.
    pub start: u32,
    /// One past the last position of the last.
    pub end: u32,
    /// Where the prefill node's time went.
    #[serde(default)]
    pub timings: PrefillTimings,
}

/// Where the prefill node's time went. Times in milliseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PrefillTimings {
    /// Waiting for a slot.
    pub queue_ms: f64,
    /// From the slot to the last token computed.
    pub prefill_ms: f64,
    /// The part of `prefill_ms` spent waiting for the reader to take frames.
    pub stalled_ms: f64,
    /// Of that, this prompt's share of the engine's work: what it would have taken alone, as far as can be told. 0 from a
    /// node that does not tell.
    #[serde(skip_serializing_if = "is_unknown")]
    pub compute_ms: f64,
    /// Copying KV out of the engine.
    pub export_ms: f64,
    /// Encoding and hashing frames.
    pub encode_ms: f64,
    /// Tokens computed for this handoff.
    pub n_computed: u32,
    /// Tokens whose KV the node had already.
    pub n_cached: u32,
}

fn is_unknown(ms: &f64) -> bool {
    *ms == 0.0
}

impl PrefillTimings {
    /// Returns true if the numbers are possible for a prompt of `n_tokens`.
    pub fn are_possible(&self, n_tokens: u32) -> bool {
        let PrefillTimings { queue_ms, prefill_ms, stalled_ms, compute_ms, export_ms, encode_ms, .. } = *self;
        let times = [queue_ms, prefill_ms, stalled_ms, compute_ms, export_ms, encode_ms];
        times.iter().all(|ms| (0.0..=MAX_MS).contains(ms)) && self.n_computed <= n_tokens && self.n_cached <= n_tokens
    }
}

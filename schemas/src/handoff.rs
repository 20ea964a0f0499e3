//! Handing a prompt's KV cache from one node to another: the requests and their reports.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cache_scope::CacheScope;
use crate::kv::{Fingerprint, HandoffId, PrefillTimings};
use crate::token::Token;

/// Where a decode node may pull a prompt's KV from. What it does not get there it computes itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvSource {
    /// Base address of the prefill node, `http://host:port` or `https://host:port`.
    pub url: String,
    /// The pull is given up after this long without a new position, milliseconds, even if the prefill node shows signs of
    /// life. `None`: nothing was predicted, and the decode node's own limit applies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub patience_ms: Option<u32>,
    /// The trace that the pull belongs to, as a W3C `traceparent`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
}

impl KvSource {
    /// A node of which only the address is known, for a pull that belongs to no trace.
    pub fn at(url: impl Into<String>) -> KvSource {
        KvSource { url: url.into(), patience_ms: None, traceparent: None }
    }
}

/// What a decode node asks of a prefill node: the KV of positions `[start, tokens.len())`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PrefillRequest {
    /// Drawn at random for this request. Every record of the reply is keyed with it, so none can be replayed.
    pub handoff: HandoffId,
    /// The tokens from position 0 on, at least one.
    pub tokens: Vec<Token>,
    /// First position wanted; the decode node has those before it. Less than the number of tokens.
    pub start: u32,
    /// Numbers of the codecs the reader understands, best first.
    pub codecs: Vec<u8>,
    /// What the decode node runs. The prefill node refuses early what the decode node would refuse late.
    pub fingerprint: Fingerprint,
    /// Whose prompt this is; see [`CacheScope`].
    #[serde(default, skip_serializing_if = "CacheScope::is_shared")]
    pub cache_scope: CacheScope,
    /// Do not cache the prompt: it was made up for a measurement.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ephemeral: bool,
}

/// A link from a prefill node to a decode node, measured by the latter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct LinkMeasurement {
    /// Round trip of a small request, milliseconds.
    pub rtt_ms: f64,
    /// Bytes received after the first ones.
    pub n_bytes: u64,
    /// Seconds they took.
    pub seconds: f64,
}

/// Why a pull ended before all of the prompt's KV was there. The decode node computed the rest itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum HandoffFailure {
    /// No connection, or it broke before the first record.
    PrefillDown,
    /// The prefill node's queue is full.
    PrefillBusy,
    /// Nothing came for too long.
    PrefillStalled,
    /// Less came than the plan had predicted, of a node that shows that it lives: it, or the way to it, is slow.
    PrefillLate,
    /// The stream ended or broke after it had begun.
    PrefillLost,
    /// The prefill node refused the cluster key or the request, or failed on it.
    PrefillRefused,
    /// A record was not what it has to be: digest, order, length, position, value.
    FrameRejected,
    /// The two nodes do not run the same model, or not one that can be handed over.
    FingerprintMismatch,
    /// The canary's KV differs too much between the two nodes.
    CanaryFailed,
    /// The engine could not take a verified chunk.
    ImportFailed,
    /// The cluster key must not be sent to the prefill node's address: no URL, or plain HTTP to another machine.
    AddressRefused,
}

impl HandoffFailure {
    /// The nodes that should be avoided for a while.
    pub fn blame(self) -> Blame {
        match self {
            HandoffFailure::PrefillLate => Blame::Nobody,
            HandoffFailure::PrefillDown
            | HandoffFailure::PrefillBusy
            | HandoffFailure::PrefillStalled
            | HandoffFailure::PrefillLost
            | HandoffFailure::PrefillRefused
            | HandoffFailure::FrameRejected => Blame::Prefill,
            HandoffFailure::FingerprintMismatch
            | HandoffFailure::CanaryFailed
            | HandoffFailure::ImportFailed
            | HandoffFailure::AddressRefused => Blame::Pair,
        }
    }

    /// As it is counted and shown.
    pub fn as_str(self) -> &'static str {
        match self {
            HandoffFailure::PrefillDown => "prefill_down",
            HandoffFailure::PrefillBusy => "prefill_busy",
            HandoffFailure::PrefillStalled => "prefill_stalled",
            HandoffFailure::PrefillLate => "prefill_late",
            HandoffFailure::PrefillLost => "prefill_lost",
            HandoffFailure::PrefillRefused => "prefill_refused",
            HandoffFailure::FrameRejected => "frame_rejected",
            HandoffFailure::FingerprintMismatch => "fingerprint_mismatch",
            HandoffFailure::CanaryFailed => "canary_failed",
            HandoffFailure::ImportFailed => "import_failed",
            HandoffFailure::AddressRefused => "address_refused",
        }
    }
}

/// The nodes to avoid for a while after a failed handoff.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// Neither: a node that is slower than predicted may serve others well, and predictions learn its speed.
    Nobody,
    /// The prefill node, for every decode node.
    Prefill,
    /// Only this pair: other decode nodes may still use the prefill node.
    Pair,
}

/// How a handoff went, as the decode node tells and as clients see it in `timings.handoff`. Times in milliseconds, on
/// the decode node's clock unless said otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct HandoffReport {
    /// Positions imported.
    pub n_tokens: u32,
    /// Positions the prefill node had cached, those before the first one imported included.
    pub n_cached: u32,
    /// Positions the prefill node computed for this request.
    pub n_computed: u32,
    /// Bytes received, headers and digests included.
    pub n_bytes: u64,
    /// Waiting for a slot on the prefill node, by its own clock.
    pub queue_ms: f64,
    /// From its slot to the last token computed, by the prefill node's clock.
    pub prefill_ms: f64,
    /// Of that, waiting because the decode node or the link to it took chunks no faster.
    pub stalled_ms: f64,
    /// Of `prefill_ms`, this prompt's share of the engine's work: what it would have taken alone. 0 if it is not known.
    pub compute_ms: f64,
    /// From the first byte of the first chunk to the last byte of the last one.
    pub transfer_ms: f64,
    /// Time the engine's own thread spent taking the chunks in.
    pub import_ms: f64,
    /// From the last token computed there to the last chunk imported here: what the transfer cost the client.
    pub unhidden_ms: f64,
    /// From asking to the last chunk imported, or to the failure.
    pub total_ms: f64,
    /// Why the rest was computed here; `None` if everything came.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<HandoffFailure>,
    /// Transfer time that ran beside the prefill and so cost the client nothing.
    pub hidden_ms: f64,
}

impl HandoffReport {
    /// The prefill node's part.
    pub fn of_prefill(timings: &PrefillTimings) -> HandoffReport {
        HandoffReport {
            n_cached: timings.n_cached,
            n_computed: timings.n_computed,
            queue_ms: timings.queue_ms,
            prefill_ms: timings.prefill_ms,
            stalled_ms: timings.stalled_ms,
            compute_ms: timings.compute_ms,
            ..HandoffReport::default()
        }
    }

    /// A handoff of which nothing but its failure is known.
    pub fn failed(failure: HandoffFailure) -> HandoffReport {
        HandoffReport { failure: Some(failure), ..HandoffReport::default() }
    }

    /// Sets what of the transfer the client had to wait for; the rest of `transfer_ms` was hidden.
    pub fn with_unhidden(self, unhidden_ms: f64) -> HandoffReport {
        HandoffReport { unhidden_ms, hidden_ms: (self.transfer_ms - unhidden_ms).max(0.0), ..self }
    }
}

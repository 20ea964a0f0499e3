//! Handoff of a prompt's KV cache from one node to another: requests and reports.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cache_scope::CacheScope;
use crate::image::PromptImages;
use crate::kv::{Fingerprint, HandoffId, PrefillTimings};
use crate::token::Token;

/// The prefill node from which a decode node pulls a prompt's KV. The decode node computes what it does not get.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvSource {
    /// Base address of the prefill node, `http://host:port` or `https://host:port`.
    pub url: String,
    /// The Unix socket that stands for the address, if both nodes are engines of one endpoint on this machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub socket: Option<PathBuf>,
    /// The addresses that a node which was found in the network announces; the host in `url` stands for them. Each must
    /// prove the cluster key first. Empty for a node that the operator has configured.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<SocketAddr>,
    /// The process that must answer at `paths`.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub process: u64,
    /// Milliseconds without a new position after which the decode node gives up the pull, even if the prefill node
    /// still answers. `None`: there is no prediction, and the decode node's own limit applies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub patience_ms: Option<u32>,
    /// The endpoint wants [`SequenceEvent::PrefillBegun`](crate::sequence::SequenceEvent::PrefillBegun). Nodes of earlier
    /// versions do not send it, and endpoints of earlier versions cannot read it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reports_begin: bool,
    /// The pull's trace, as a W3C `traceparent`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
}

impl KvSource {
    /// A prefill node at an address, without a prediction or a trace.
    pub fn at(url: impl Into<String>) -> KvSource {
        KvSource {
            url: url.into(),
            socket: None,
            paths: Vec::new(),
            process: 0,
            patience_ms: None,
            reports_begin: false,
            traceparent: None,
        }
    }

    /// The same at a socket of this machine.
    pub fn at_socket(socket: PathBuf) -> KvSource {
        KvSource { socket: Some(socket), ..KvSource::at("http://node") }
    }

    /// Base address, without a slash at its end.
    pub fn base(&self) -> &str {
        self.url.trim_end_matches('/')
    }

    /// What tells this node from every other one. Found nodes of a paired cluster share a certificate's name, and with it their URL.
    pub fn node(&self) -> String {
        match (&self.socket, self.paths.is_empty()) {
            (Some(socket), _) => socket.display().to_string(),
            (None, true) => self.base().to_owned(),
            (None, false) => format!("{} process {:016x}", self.base(), self.process),
        }
    }
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A decode node's request to a prefill node: the KV of positions `[start, tokens.len())`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PrefillRequest {
    /// Drawn at random for this request. It is part of the key of every record's MAC, so records cannot be replayed.
    pub handoff: HandoffId,
    /// The tokens from position 0, at least one.
    pub tokens: Vec<Token>,
    /// The first requested position, less than the number of tokens. The decode node has the KV before it.
    pub start: u32,
    /// The wire numbers of the codecs that the decode node can read, best first.
    pub codecs: Vec<u8>,
    /// The wire numbers of the codecs of states that the decode node can read, best first. Empty: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub state_codecs: Vec<u8>,
    /// The bytes of states, before a codec, that the link carries in a second, if the decode node has measured it. The prefill
    /// node makes its last chunk so long that they travel meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_bps: Option<u64>,
    /// The wire numbers of the MACs that the decode node can check, best first. Empty: only BLAKE3.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub macs: Vec<u8>,
    /// The decode node's model. The prefill node refuses another vocabulary at once; about other weights the decode node
    /// decides.
    pub fingerprint: Fingerprint,
    /// The images of the placeholders among the tokens, if there are any. The prefill node encodes them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub images: Option<PromptImages>,
    /// Positions between `start` and the end at which the decode node wants the states, too, ascending. It keeps them as
    /// checkpoints. A node that sends none, as nodes of earlier versions, is accepted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checkpoints: Vec<u32>,
    /// The caller's scope in the prefix cache.
    #[serde(default, skip_serializing_if = "CacheScope::is_shared")]
    pub cache_scope: CacheScope,
    /// Do not cache the prompt: it was generated for a measurement.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ephemeral: bool,
    /// A measurement, or a return of KV: it ends as soon as the prefill node has a request.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gives_way: bool,
    /// Compute nothing: send what is held, and end with an error if that is not all. Nodes of every role do so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub held_only: bool,
}

/// The possible values of [`PrefillRequest::state_bps`]: from a modem to beyond any network.
pub const STATE_BPS: std::ops::RangeInclusive<u64> = 1_000..=1_000_000_000_000;

/// The most bytes of KV, as an engine holds it, that a node pulls back after a reply: 8,192 tokens of a model of 8 billion parameters.
pub const MAX_RETURN_BYTES: u64 = 1 << 30;

/// How long before the predicted end of a restore a decode node begins to pull what follows. What comes before the restore has
/// ended is read ahead, as far as that has room; a prefill node ends a stream that is not read for 7 s.
pub const PULL_AHEAD: Duration = Duration::from_secs(3);

/// A measurement of the link from a prefill node, made by a decode node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct LinkMeasurement {
    /// Round trip of a small request, milliseconds.
    pub rtt_ms: f64,
    /// Bytes received after the first piece.
    pub n_bytes: u64,
    /// Seconds to receive them.
    pub seconds: f64,
}

/// Why a pull ended before all of the prompt's KV had arrived. The decode node computed the rest itself.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema, strum::IntoStaticStr,
)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum HandoffFailure {
    /// No connection, or it broke before the first record.
    PrefillDown,
    /// The prefill node's queue is full.
    PrefillBusy,
    /// Nothing arrived for too long.
    PrefillStalled,
    /// Both nodes are alive, but one of them or the link is slower than predicted.
    PrefillLate,
    /// The pull belonged to a measurement, and the prefill node got a request.
    GaveWay,
    /// The stream broke after it had begun.
    PrefillLost,
    /// The prefill node refused the decode node's cluster key.
    KeyRefused,
    /// The prefill node refused the request, or failed on it.
    PrefillRefused,
    /// A record failed a check: MAC, order, length or position.
    FrameRejected,
    /// The prompt's KV has NaN or infinity. The same weights compute the same everywhere, so the prefill node is the cause
    /// only if the decode node then computes the prompt.
    NotFinite,
    /// The nodes do not run the same model, or its KV cannot be handed over.
    FingerprintMismatch,
    /// The KV of the canary text, rows or states, differs too much between the nodes.
    CanaryFailed,
    /// The engine could not import a verified chunk.
    ImportFailed,
    /// The cluster key must not be sent to the prefill node's address: no URL, or plain HTTP to another machine.
    AddressRefused,
}

impl HandoffFailure {
    /// Returns the nodes to avoid for a while.
    pub fn blame(self) -> Blame {
        match self {
            HandoffFailure::PrefillLate | HandoffFailure::GaveWay | HandoffFailure::NotFinite => Blame::Nobody,
            HandoffFailure::PrefillDown
            | HandoffFailure::PrefillBusy
            | HandoffFailure::PrefillStalled
            | HandoffFailure::PrefillLost
            | HandoffFailure::PrefillRefused
            | HandoffFailure::FrameRejected => Blame::Prefill,
            HandoffFailure::KeyRefused
            | HandoffFailure::FingerprintMismatch
            | HandoffFailure::CanaryFailed
            | HandoffFailure::ImportFailed
            | HandoffFailure::AddressRefused => Blame::Pair,
        }
    }

    /// The word in metrics and reports.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// The nodes to avoid for a while after a failed handoff.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// Neither. A slow node may still serve others well, and predictions learn its speed; a prompt that computes NaN on
    /// both nodes says nothing about other prompts.
    Nobody,
    /// The prefill node, for every decode node.
    Prefill,
    /// Only this pair: other decode nodes may still use the prefill node.
    Pair,
}

/// How a handoff went: the decode node's report, which clients see in `timings.handoff`. Times are in milliseconds, on
/// the decode node's clock unless stated otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct HandoffReport {
    /// Imported positions.
    pub n_tokens: u32,
    /// Positions that the prefill node had cached, including those before the first imported one.
    pub n_cached: u32,
    /// Positions that the prefill node computed for this request.
    pub n_computed: u32,
    /// Received bytes, including headers and MACs.
    pub n_bytes: u64,
    /// The part of `n_bytes` that is states of recurrent layers. They have the same size whatever the prompt's length.
    #[serde(skip_serializing_if = "is_zero")]
    pub state_bytes: u64,
    /// The part of `state_bytes` that is of checkpoints before the end. They travel while the prompt is computed.
    #[serde(skip_serializing_if = "is_zero")]
    pub checkpoint_bytes: u64,
    /// Wait for a slot on the prefill node, by its clock.
    pub queue_ms: f64,
    /// From getting the slot to the last computed token, by the prefill node's clock.
    pub prefill_ms: f64,
    /// The part of `prefill_ms` spent waiting for the decode node, or the link, to take chunks.
    pub stalled_ms: f64,
    /// The part of `prefill_ms` that this prompt would have taken alone, without other sequences. 0 if unknown.
    pub compute_ms: f64,
    /// Time to copy KV out of the prefill node's engine. 0 if that node does not report it.
    pub export_ms: f64,
    /// From the first byte of the first chunk to the last byte of the last one.
    pub transfer_ms: f64,
    /// Time that the engine's thread spent importing chunks.
    pub import_ms: f64,
    /// From the last token computed on the prefill node to the last imported chunk: the delay that the client notices.
    #[serde(alias = "unhidden_ms")]
    pub after_prefill_ms: f64,
    /// From the request to the last imported chunk, or to the failure.
    pub total_ms: f64,
    /// Why the decode node computed the rest; missing if everything arrived.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<HandoffFailure>,
    /// The distance of the two nodes' KV of a fixed text, rows and states (relative L2 of the worst tensor), if they run other
    /// weights of the same base model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_distance: Option<f64>,
    /// What came is not exactly what the prefill node has: it went through a lossy codec.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_lossy: bool,
    /// The part of `transfer_ms` that overlapped with the prefill, so that the client did not notice it.
    #[serde(alias = "hidden_ms")]
    pub during_prefill_ms: f64,
}

impl HandoffReport {
    /// Creates a report with the prefill node's timings.
    pub fn of_prefill(timings: &PrefillTimings) -> HandoffReport {
        HandoffReport {
            n_cached: timings.n_cached,
            n_computed: timings.n_computed,
            queue_ms: timings.queue_ms,
            prefill_ms: timings.prefill_ms,
            stalled_ms: timings.stalled_ms,
            compute_ms: timings.compute_ms,
            export_ms: timings.export_ms,
            ..HandoffReport::default()
        }
    }

    /// Creates a report of a failed handoff.
    pub fn failed(failure: HandoffFailure) -> HandoffReport {
        HandoffReport { failure: Some(failure), ..HandoffReport::default() }
    }

    /// Imported positions that the prefill node had cached. 0 if it failed before it said so.
    pub fn n_reused(&self) -> u32 {
        if self.failure.is_some() { 0 } else { self.n_tokens.saturating_sub(self.n_computed) }
    }

    /// Sets the delay that the client noticed. The rest of `transfer_ms` passed during the prefill.
    pub fn with_after_prefill(self, after_prefill_ms: f64) -> HandoffReport {
        HandoffReport { after_prefill_ms, during_prefill_ms: (self.transfer_ms - after_prefill_ms).max(0.0), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_of_an_older_node_has_other_names_for_the_parts_of_the_transfer() {
        let json = r#"{"transfer_ms":9,"unhidden_ms":2,"hidden_ms":7}"#;
        let report = HandoffReport { transfer_ms: 9.0, ..HandoffReport::default() }.with_after_prefill(2.0);
        assert_eq!(serde_json::from_str::<HandoffReport>(json).unwrap(), report);
    }

    #[test]
    fn a_report_of_an_older_node_has_no_export_time() {
        let timings = PrefillTimings { export_ms: 2.5, ..PrefillTimings::default() };
        let report = HandoffReport::of_prefill(&timings);
        assert_eq!(report.export_ms, 2.5);
        let mut json = serde_json::to_value(report).unwrap();
        json.as_object_mut().unwrap().remove("export_ms");
        assert_eq!(serde_json::from_value::<HandoffReport>(json).unwrap(), HandoffReport { export_ms: 0.0, ..report });
    }
}

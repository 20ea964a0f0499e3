//! Remembers which prefill nodes were examined, and compares their identity with this engine's.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_schemas::handoff::HandoffFailure;
use baton_schemas::kv::{CodecLoss, Fingerprint};
use baton_schemas::model_difference::ModelDifference;
use baton_schemas::node::KvIdentity;

/// How long an admitted peer is remembered. Each reply's head is still compared with its fingerprint, so that a peer
/// that was restarted with another model is noticed at once.
const ADMITTED_FOR: Duration = Duration::from_secs(300);

/// How long a refused peer is remembered.
const REFUSED_FOR: Duration = Duration::from_secs(4);

/// The most peers that are remembered; more than a cluster has.
const MAX_PEERS: usize = 256;

/// A peer whose KV may be used.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct AdmittedPeer {
    pub(super) fingerprint: Fingerprint,
    /// The distance of its KV from this engine's, if it runs other weights; see [`canary`](super::canary).
    pub(super) kv_distance: Option<f64>,
    /// What its lossy codecs do to predictions, as far as it has measured it.
    pub(super) losses: Vec<CodecLoss>,
}

/// The outcomes of examining peers, by their addresses.
#[derive(Default)]
pub(super) struct Peers(Mutex<HashMap<String, Finding>>);

struct Finding {
    outcome: Result<AdmittedPeer, HandoffFailure>,
    at: Instant,
}

impl Peers {
    /// The remembered outcome for a peer, if it is recent.
    pub(super) fn known(&self, node: &str) -> Option<Result<AdmittedPeer, HandoffFailure>> {
        let peers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let finding = peers.get(node)?;
        let lasts = if finding.outcome.is_ok() { ADMITTED_FOR } else { REFUSED_FOR };
        (finding.at.elapsed() < lasts).then(|| finding.outcome.clone())
    }

    pub(super) fn remember(&self, node: &str, outcome: Result<AdmittedPeer, HandoffFailure>) {
        let mut peers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if peers.len() >= MAX_PEERS && !peers.contains_key(node) {
            peers.clear();
        }
        peers.insert(node.to_owned(), Finding { outcome, at: Instant::now() });
    }

    /// Forgets a peer whose model has changed.
    pub(super) fn forget(&self, node: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(node);
    }
}

/// How a peer's model compares with the engine's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Match {
    /// The same weights.
    Exact,
    /// KV of the same shape from other weights: the canary decides.
    OtherWeights,
    /// The KV does not fit.
    Impossible(ModelDifference),
}

/// Compares the identities of two nodes' models.
pub(super) fn compare(local: &KvIdentity, peer: &KvIdentity) -> Match {
    let (ours, theirs) = (&local.fingerprint, &peer.fingerprint);
    match ModelDifference::of_kv((ours, &local.layout), (theirs, &peer.layout)) {
        Some(difference) => Match::Impossible(difference),
        None if ours.weights == theirs.weights => Match::Exact,
        None => Match::OtherWeights,
    }
}

#[cfg(test)]
mod tests {
    use baton_schemas::kv::{Dtype, KvLayout, LayerShape, RopePairing, Rows, Section};

    use super::*;

    fn identity(vocabulary: u8, weights: u8, n_layers: usize, rope: RopePairing) -> KvIdentity {
        let rows = Rows { dtype: Dtype::F16, n_values: 64 };
        let layers = vec![LayerShape { k: rows, v: Some(rows) }; n_layers];
        let fingerprint = Fingerprint { vocabulary: [vocabulary; 32], weights: [weights; 32] };
        let layout = KvLayout {
            rope,
            sections: vec![Section { window: None, n_rot: [0; 2], tokens_per_row: 1, layers }],
            states: Vec::new(),
        };
        KvIdentity::new(fingerprint, layout, vec![1], None, None)
    }

    #[test]
    fn only_the_same_shape_in_the_same_order_can_be_handed_over() {
        let ours = identity(1, 1, 2, RopePairing::Interleaved);
        assert_eq!(compare(&ours, &ours), Match::Exact);
        assert_eq!(compare(&ours, &identity(1, 2, 2, RopePairing::Interleaved)), Match::OtherWeights);
        for theirs in [
            identity(2, 1, 2, RopePairing::Interleaved),
            identity(1, 1, 3, RopePairing::Interleaved),
            identity(1, 1, 2, RopePairing::HalfSplit),
        ] {
            assert!(matches!(compare(&ours, &theirs), Match::Impossible(_)), "{theirs:?}");
        }
    }

    #[test]
    fn outcomes_are_remembered_and_forgotten() {
        let peers = Peers::default();
        let fingerprint = Fingerprint { vocabulary: [1; 32], weights: [2; 32] };
        let peer = AdmittedPeer { fingerprint, kv_distance: Some(0.01), losses: Vec::new() };
        assert_eq!(peers.known("a"), None);
        peers.remember("a", Ok(peer.clone()));
        peers.remember("b", Err(HandoffFailure::CanaryFailed));
        assert_eq!(peers.known("a"), Some(Ok(peer)));
        assert_eq!(peers.known("b"), Some(Err(HandoffFailure::CanaryFailed)));
        peers.forget("a");
        assert_eq!(peers.known("a"), None);
    }
}

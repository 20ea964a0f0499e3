//! Chooses the codec for each link from measured rates.
//!
//! KV moves at the slower of two rates: the prefill node's encoding rate, and the link's rate times the codec's ratio
//! of compression. A codec saves time on a link that is slower than the codec, and costs time on a faster one.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use baton_schemas::handoff::{LinkMeasurement, STATE_BPS};
use baton_schemas::kv::{Codec, CodecEffect};

/// The most links that are remembered; more than a cluster has.
const MAX_LINKS: usize = 256;

/// Weight of the newest measurement in a moving average.
const WEIGHT: f64 = 0.3;

/// A codec must be this much faster than no codec, because it also takes processor time on both nodes.
const MIN_GAIN: f64 = 1.03;

/// The least plain KV for a measurement, bytes. Less of it measures the encoder's start and not its rate.
const ENOUGH_BYTES: u64 = 1 << 20;

/// The measurement of one transfer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    /// Bytes of KV before encoding.
    pub(super) n_plain: u64,
    /// Bytes received.
    pub(super) n_wire: u64,
    /// Time that encoding took, as reported by the prefill node, milliseconds.
    pub(super) encode_ms: f64,
}

/// The measured rate of a link and the measured effects of codecs on it.
#[derive(Default)]
struct CodecRates {
    /// The link's rate in bytes per second, if it was measured.
    bps: Option<f64>,
    effects: HashMap<Codec, CodecEffect>,
}

/// The rates of the links to prefill nodes, by the nodes' addresses.
#[derive(Default)]
pub(super) struct LinkCodecs(Mutex<HashMap<String, CodecRates>>);

impl LinkCodecs {
    /// The allowed codecs for a pull from `node`, fastest first. Without a measurement of the link, no codec is the
    /// fastest.
    pub(super) fn choose(&self, node: &str, allowed: &[Codec]) -> Vec<Codec> {
        let links = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let link = links.get(node);
        let rate = |codec: Codec| {
            let bps = link.and_then(|l| l.bps).unwrap_or(f64::INFINITY);
            let effect = link.and_then(|l| l.effects.get(&codec)).copied().unwrap_or_else(|| codec.typical_effect());
            let rate = effect.encode_bps.min(bps * effect.ratio);
            if codec == Codec::None { rate * MIN_GAIN } else { rate }
        };
        let mut best_first = allowed.to_vec();
        best_first.sort_by(|a, b| rate(*b).total_cmp(&rate(*a)));
        best_first
    }

    /// The bytes of states, before `codec`, that the link from `node` carries in a second, if it was measured.
    pub(super) fn state_bps(&self, node: &str, codec: Codec) -> Option<u64> {
        let links = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let bps = links.get(node)?.bps? * codec.typical_effect().ratio;
        Some((bps as u64).clamp(*STATE_BPS.start(), *STATE_BPS.end()))
    }

    /// Records a measurement of the link's rate.
    pub(super) fn measured(&self, node: &str, link: &LinkMeasurement) {
        let bps = link.n_bytes as f64 / link.seconds;
        if bps.is_finite() && bps > 0.0 {
            self.update(node, |link| link.bps = Some(link.bps.map_or(bps, |old| old + WEIGHT * (bps - old))));
        }
    }

    /// Records the effect of a codec in a transfer. Transfers of little KV are ignored.
    pub(super) fn used(&self, node: &str, codec: Codec, sample: Sample) {
        let encode_bps = sample.n_plain as f64 / (sample.encode_ms / 1e3);
        let ratio = sample.n_plain as f64 / sample.n_wire as f64;
        if sample.n_plain < ENOUGH_BYTES || !(encode_bps.is_finite() && encode_bps > 0.0 && ratio.is_finite()) {
            return;
        }
        self.update(node, |link| {
            let effect = link.effects.entry(codec).or_insert(CodecEffect { encode_bps, ratio });
            effect.encode_bps += WEIGHT * (encode_bps - effect.encode_bps);
            effect.ratio += WEIGHT * (ratio - effect.ratio);
        });
    }

    fn update(&self, node: &str, change: impl FnOnce(&mut CodecRates)) {
        let mut links = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if links.len() >= MAX_LINKS && !links.contains_key(node) {
            links.clear();
        }
        change(links.entry(node.to_owned()).or_default());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOSSLESS: [Codec; 2] = [Codec::None, Codec::PlanesZstd];

    fn link(bytes_per_second: u64) -> LinkMeasurement {
        LinkMeasurement { rtt_ms: 0.2, n_bytes: bytes_per_second, seconds: 1.0 }
    }

    #[test]
    fn a_codec_is_used_on_links_that_are_slower_than_it() {
        let codecs = LinkCodecs::default();
        assert_eq!(codecs.choose("a", &LOSSLESS)[0], Codec::None, "the link was not measured");
        codecs.measured("a", &link(1_250_000_000));
        codecs.measured("b", &link(125_000_000));
        assert_eq!(codecs.choose("a", &LOSSLESS)[0], Codec::None);
        assert_eq!(codecs.choose("b", &LOSSLESS)[0], Codec::PlanesZstd);
        assert_eq!(codecs.choose("b", &[Codec::None, Codec::PlanesZstd, Codec::Q8_0])[0], Codec::Q8_0);
        assert_eq!(codecs.choose("b", &Codec::OF_ROWS)[0], Codec::KvqFast);
        assert_eq!(codecs.choose("b", &[Codec::None]), [Codec::None], "only allowed codecs are used");
        assert_eq!(codecs.choose("b", &LOSSLESS).len(), 2, "the others follow, for a node that lacks the first");
    }

    #[test]
    fn the_rate_for_states_is_that_of_a_measured_link_times_what_their_codec_saves() {
        let codecs = LinkCodecs::default();
        assert_eq!(codecs.state_bps("a", Codec::None), None);
        codecs.measured("a", &link(125_000_000));
        assert_eq!(codecs.state_bps("a", Codec::None), Some(125_000_000));
        assert_eq!(codecs.state_bps("a", Codec::StateInt8), Some(445_000_000));
        codecs.measured("b", &link(10));
        assert_eq!(codecs.state_bps("b", Codec::None), Some(*STATE_BPS.start()), "within what a node accepts");
    }

    #[test]
    fn measurements_replace_assumptions() {
        let codecs = LinkCodecs::default();
        codecs.measured("a", &link(300_000_000));
        assert_eq!(codecs.choose("a", &LOSSLESS)[0], Codec::PlanesZstd);
        // KV that does not compress.
        codecs.used("a", Codec::PlanesZstd, Sample { n_plain: 10 << 20, n_wire: 10 << 20, encode_ms: 25.0 });
        assert_eq!(codecs.choose("a", &LOSSLESS)[0], Codec::None);
        codecs.measured("b", &link(300_000_000));
        // A busy processor: 100 MB/s.
        codecs.used("b", Codec::PlanesZstd, Sample { n_plain: 10_000_000, n_wire: 8_000_000, encode_ms: 100.0 });
        assert_eq!(codecs.choose("b", &LOSSLESS)[0], Codec::None);
    }

    #[test]
    fn a_codec_for_several_cores_is_tried_and_then_judged_by_what_it_did() {
        let codecs = LinkCodecs::default();
        codecs.measured("a", &link(1_250_000_000));
        assert_eq!(codecs.choose("a", &Codec::OF_ROWS)[0], Codec::Kvq, "as fast as kvq_fast, and better");
        // A prefill node with one core.
        let on_one_core = |ratio: u64| Sample { n_plain: 60_000_000, n_wire: 60_000_000 / ratio, encode_ms: 100.0 };
        codecs.used("a", Codec::Kvq, on_one_core(3));
        assert_eq!(codecs.choose("a", &Codec::OF_ROWS)[0], Codec::KvqFast);
        codecs.used("a", Codec::KvqFast, on_one_core(4));
        assert_eq!(codecs.choose("a", &Codec::OF_ROWS)[0], Codec::None);
    }

    #[test]
    fn impossible_and_tiny_measurements_change_nothing() {
        let codecs = LinkCodecs::default();
        codecs.measured("a", &LinkMeasurement::default());
        codecs.measured("a", &LinkMeasurement { rtt_ms: 0.1, n_bytes: 10, seconds: 0.0 });
        codecs.used("a", Codec::PlanesZstd, Sample { n_plain: 0, n_wire: 0, encode_ms: 0.0 });
        codecs.used("a", Codec::PlanesZstd, Sample { n_plain: 2 << 20, n_wire: 1, encode_ms: 0.0 });
        codecs.used("a", Codec::PlanesZstd, Sample { n_plain: 1_000, n_wire: 1, encode_ms: 0.001 });
        assert_eq!(codecs.choose("a", &LOSSLESS)[0], Codec::None);
    }
}

//! Which codec a link's KV travels in, from measured rates.
//!
//! KV moves at the slower of two rates: what the prefill node encodes, and what the link carries times what the codec
//! saves. Where the link is faster than a codec, that codec costs time; where it is slower, it saves some.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use baton_schemas::handoff::LinkMeasurement;
use baton_schemas::kv::{Codec, CodecEffect};

/// Links remembered; more than any cluster this is for.
const MAX_LINKS: usize = 256;

/// Weight of the newest measurement in a rate.
const WEIGHT: f64 = 0.3;

/// A codec has to be this much faster than rows as they are: it also costs both nodes' processors.
const MIN_GAIN: f64 = 1.03;

/// Less plain KV than this times the start of an encoder and not its rate, bytes.
const ENOUGH_BYTES: u64 = 1 << 20;

/// One transfer, as it was measured.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    /// Plain KV.
    pub(super) n_plain: u64,
    /// What of it was received.
    pub(super) n_wire: u64,
    /// The prefill node's time for encoding it, milliseconds, by its own account.
    pub(super) encode_ms: f64,
}

#[derive(Default)]
struct LinkRates {
    /// Bytes per second, if measured.
    bps: Option<f64>,
    effects: HashMap<Codec, CodecEffect>,
}

/// Rates of the links to prefill nodes, by their addresses.
#[derive(Default)]
pub(super) struct LinkCodecs(Mutex<HashMap<String, LinkRates>>);

impl LinkCodecs {
    /// The allowed codecs for a pull from `url`, best first. Rows as they are while nothing is known of the link; the
    /// operator's order stands where only one is allowed.
    pub(super) fn choose(&self, url: &str, allowed: &[Codec]) -> Vec<Codec> {
        let links = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let link = links.get(url);
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

    /// Takes in what the link carried.
    pub(super) fn measured(&self, url: &str, link: &LinkMeasurement) {
        let bps = link.n_bytes as f64 / link.seconds;
        if bps.is_finite() && bps > 0.0 {
            self.update(url, |link| link.bps = Some(link.bps.map_or(bps, |old| old + WEIGHT * (bps - old))));
        }
    }

    /// Takes in what a codec did.
    pub(super) fn used(&self, url: &str, codec: Codec, sample: Sample) {
        let encode_bps = sample.n_plain as f64 / (sample.encode_ms / 1e3);
        let ratio = sample.n_plain as f64 / sample.n_wire as f64;
        if sample.n_plain < ENOUGH_BYTES || !(encode_bps.is_finite() && encode_bps > 0.0 && ratio.is_finite()) {
            return;
        }
        self.update(url, |link| {
            let effect = link.effects.entry(codec).or_insert(CodecEffect { encode_bps, ratio });
            effect.encode_bps += WEIGHT * (encode_bps - effect.encode_bps);
            effect.ratio += WEIGHT * (ratio - effect.ratio);
        });
    }

    fn update(&self, url: &str, change: impl FnOnce(&mut LinkRates)) {
        let mut links = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if links.len() >= MAX_LINKS && !links.contains_key(url) {
            links.clear();
        }
        change(links.entry(url.to_owned()).or_default());
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
    fn a_codec_is_used_where_the_link_is_slower_than_it() {
        let codecs = LinkCodecs::default();
        assert_eq!(codecs.choose("a", &LOSSLESS)[0], Codec::None, "nothing is known of the link");
        codecs.measured("a", &link(1_250_000_000));
        codecs.measured("b", &link(125_000_000));
        assert_eq!(codecs.choose("a", &LOSSLESS)[0], Codec::None);
        assert_eq!(codecs.choose("b", &LOSSLESS)[0], Codec::PlanesZstd);
        assert_eq!(codecs.choose("b", &Codec::ALL)[0], Codec::Q8_0);
        assert_eq!(codecs.choose("b", &[Codec::None]), [Codec::None], "what is not allowed is not used");
        assert_eq!(codecs.choose("b", &LOSSLESS).len(), 2, "a node that knows only the others is understood too");
    }

    #[test]
    fn what_a_peer_shows_outweighs_what_was_assumed() {
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

//! What has been measured of a node and of the links between nodes.
//!
//! Every figure is an exponentially weighted mean that follows the running system; nothing is configured. A prefill
//! rate depends on the prompt's length and a decode rate on how many streams share a step, so both are curves with a
//! mean for each power of two.

use baton_schemas::handoff::HandoffTimings;

/// Weight of the newest measurement.
const WEIGHT: f64 = 0.3;

/// Powers of two a curve has room for: up to a million tokens.
const N_BUCKETS: usize = 21;

/// A rate as a function of a size, learned.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Curve {
    /// At sizes of about 2^i; 0 where nothing was measured.
    buckets: [f64; N_BUCKETS],
}

impl Default for Curve {
    fn default() -> Self {
        Curve { buckets: [0.0; N_BUCKETS] }
    }
}

impl Curve {
    /// A curve that has the same rate everywhere.
    pub fn constant(rate: f64) -> Curve {
        let mut curve = Curve::default();
        curve.learn(1.0, rate);
        curve
    }

    /// Takes a measurement into account. Nonsense is left out.
    pub fn learn(&mut self, size: f64, rate: f64) {
        if !(size >= 1.0 && rate.is_finite() && rate > 0.0) {
            return;
        }
        let bucket = &mut self.buckets[bucket_of(size)];
        *bucket = ewma(*bucket, rate);
    }

    /// The rate at a size: between measured neighbours by linear interpolation over the logarithm, beyond them the
    /// nearest one. `None` if nothing was measured.
    pub fn at(&self, size: f64) -> Option<f64> {
        let position = size.max(1.0).log2().min((N_BUCKETS - 1) as f64);
        let known = |i: &usize| self.buckets[*i] > 0.0;
        let below = (0..=position.round() as usize).rev().find(known);
        let above = (position.round() as usize..N_BUCKETS).find(known);
        match (below, above) {
            (Some(a), Some(b)) if a < b => {
                let share = ((position - a as f64) / (b - a) as f64).clamp(0.0, 1.0);
                Some(self.buckets[a] + share * (self.buckets[b] - self.buckets[a]))
            }
            (Some(i), _) | (None, Some(i)) => Some(self.buckets[i]),
            (None, None) => None,
        }
    }

    /// What was measured: sizes, which are powers of two, and the rates at about these.
    pub fn points(&self) -> Vec<(u32, f64)> {
        (0..).zip(self.buckets).filter(|(_, rate)| *rate > 0.0).map(|(i, rate)| (1 << i, rate)).collect()
    }

    /// Whether anything was measured.
    pub fn is_known(&self) -> bool {
        self.buckets.iter().any(|rate| *rate > 0.0)
    }
}

fn bucket_of(size: f64) -> usize {
    (size.max(1.0).log2().round() as usize).min(N_BUCKETS - 1)
}

/// An exponentially weighted mean; 0 means that nothing was measured yet.
pub fn ewma(mean: f64, new: f64) -> f64 {
    if mean > 0.0 { mean + WEIGHT * (new - mean) } else { new }
}

/// What was measured of a node.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct NodeRates {
    /// Prompt tokens per second, by prompt length.
    pub prefill: Curve,
    /// Tokens per second of one stream, by streams that share a step.
    pub decode: Curve,
}

/// What was measured of the way from a prefill node to a decode node.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LinkRates {
    /// Bytes per second; 0 until measured.
    pub bytes_per_second: f64,
    /// Round trip, milliseconds; 0 until measured.
    pub rtt_ms: f64,
    /// What a handoff's end takes beyond its last chunk's wire time: export, verification, import. Milliseconds.
    pub tail_ms: f64,
}

impl LinkRates {
    /// Learns from a handoff what it shows. Where the transfer waited for the prefill it says nothing of the link.
    pub fn learn_transfer(&mut self, handoff: &HandoffTimings) {
        let transfer_bound = handoff.transfer_ms > 1.2 * handoff.prefill_ms && handoff.n_bytes >= MIN_MEASURED_BYTES;
        if transfer_bound {
            let rate = handoff.n_bytes as f64 / (handoff.transfer_ms / 1e3);
            self.bytes_per_second = ewma(self.bytes_per_second, rate);
        } else if handoff.unhidden_ms > 0.0 && self.bytes_per_second > 0.0 {
            let per_token = handoff.n_bytes as f64 / f64::from(handoff.n_tokens.max(1));
            let wire_ms = LAST_CHUNK_TOKENS.min(f64::from(handoff.n_tokens)) * per_token / self.bytes_per_second * 1e3;
            self.tail_ms = ewma(self.tail_ms, (handoff.unhidden_ms - wire_ms).max(1e-3));
        }
    }

    /// Takes a measurement of the bare link into account: that many bytes in that many seconds after the first one.
    pub fn learn_probe(&mut self, rtt_ms: f64, n_bytes: u64, seconds: f64) {
        if rtt_ms >= 0.0 && seconds > 0.0 {
            self.rtt_ms = ewma(self.rtt_ms, rtt_ms.max(1e-3));
            self.bytes_per_second = ewma(self.bytes_per_second, n_bytes as f64 / seconds);
        }
    }
}

/// Fewer measure latency and not the rate.
const MIN_MEASURED_BYTES: u64 = 1 << 20;

/// The last chunk of a handoff, in tokens; see the engine's taper.
pub const LAST_CHUNK_TOKENS: f64 = 64.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_is_what_was_measured_and_between_that_a_line() {
        let mut curve = Curve::default();
        assert_eq!(curve.at(100.0), None);
        curve.learn(256.0, 1_000.0);
        assert_eq!(curve.at(1.0), Some(1_000.0));
        assert_eq!(curve.at(1e9), Some(1_000.0));
        curve.learn(4_096.0, 2_000.0);
        assert_eq!(curve.at(1_024.0), Some(1_500.0));
        assert_eq!(curve.at(4_096.0), Some(2_000.0));
        for nonsense in [(0.0, 1.0), (f64::NAN, 1.0), (8.0, 0.0), (8.0, f64::INFINITY), (8.0, -1.0)] {
            curve.learn(nonsense.0, nonsense.1);
        }
        assert_eq!(curve.at(8.0), Some(1_000.0));
    }

    #[test]
    fn a_changed_rate_is_learned_within_twenty_measurements() {
        let mut curve = Curve::constant(1_000.0);
        for _ in 0..20 {
            curve.learn(1.0, 100.0);
        }
        assert!((curve.at(1.0).unwrap() / 100.0 - 1.0).abs() < 0.01);
    }
}

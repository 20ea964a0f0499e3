//! Measured rates of nodes and of transfers between them.
//!
//! Every figure is an exponentially weighted mean of measurements; nothing is configured. A prefill rate depends on the
//! prompt's length, a decode rate on the number of streams in a step. So both are curves with a mean for each power of
//! two. Prompts that share steps are as fast as one prompt of so many tokens; see [`batch_size`].

use baton_schemas::handoff::HandoffReport;
use baton_schemas::held::RestoreRates;

/// Weight of the newest measurement.
const WEIGHT: f64 = 0.3;

/// The number of powers of two in a curve: up to a million tokens.
const N_BUCKETS: usize = 21;

/// A measured rate as a function of a size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Curve {
    /// The mean at sizes of about 2^i; 0 if nothing was measured.
    buckets: [f64; N_BUCKETS],
}

impl Default for Curve {
    fn default() -> Self {
        Curve { buckets: [0.0; N_BUCKETS] }
    }
}

impl Curve {
    /// A curve with the same rate at every size.
    pub fn constant(rate: f64) -> Curve {
        let mut curve = Curve::default();
        curve.learn(1.0, rate);
        curve
    }

    /// Adds a measurement. Ignores sizes below 1 and rates that are not positive and finite.
    pub fn learn(&mut self, size: f64, rate: f64) {
        if !(size >= 1.0 && rate.is_finite() && rate > 0.0) {
            return;
        }
        let bucket = &mut self.buckets[bucket_of(size)];
        // The mean is one of times, since times are predicted: the mean of a slow and a fast rate would be too fast.
        let seconds = if *bucket > 0.0 { 1.0 / *bucket } else { 0.0 };
        *bucket = 1.0 / ewma(seconds, 1.0 / rate);
    }

    /// Adds a measurement of a machine whose speed may have changed as a whole. The other sizes may not be measured for long, so
    /// they follow this one with `share` of its change, from 0 to 1.
    pub fn learn_with_others(&mut self, size: f64, rate: f64, share: f64) {
        let index = bucket_of(size);
        let before = self.buckets[index];
        self.learn(size, rate);
        if before > 0.0 {
            let factor = (self.buckets[index] / before).powf(share);
            let others = self.buckets.iter_mut().enumerate().filter(|(i, rate)| *i != index && **rate > 0.0);
            others.for_each(|(_, rate)| *rate *= factor);
        }
    }

    /// The rates of all sizes come nearer to that of this one, by a share from 0 to 1: an old rate of a size that is never measured
    /// again, because it looks slow, must not last.
    pub fn approach(&mut self, size: f64, share: f64) {
        let measured = self.buckets[bucket_of(size)];
        if measured > 0.0 {
            let others = self.buckets.iter_mut().filter(|rate| **rate > 0.0);
            others.for_each(|rate| *rate = 1.0 / (1.0 / *rate + share * (1.0 / measured - 1.0 / *rate)));
        }
    }

    /// The rate at a size: the mean at the nearest power of two; without one, a linear interpolation over the logarithm
    /// between measured neighbours, or the nearest mean beyond them. `None` if nothing was measured.
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

    /// The measured points: sizes, which are powers of two, and their rates.
    pub fn points(&self) -> Vec<(u32, f64)> {
        (0..).zip(self.buckets).filter(|(_, rate)| *rate > 0.0).map(|(i, rate)| (1 << i, rate)).collect()
    }

    /// Returns true if anything was measured.
    pub fn is_known(&self) -> bool {
        self.buckets.iter().any(|rate| *rate > 0.0)
    }
}

/// The size at which a prompt of `n_tokens` has its rate if `n_together` tokens, of it and of others, share the same steps. A step
/// costs something beside its tokens, which short prompts share. A long prompt fills its steps alone, and its rate falls with its
/// own length.
pub fn batch_size(n_tokens: f64, n_together: f64) -> f64 {
    n_together.clamp(n_tokens, n_tokens.max(FIRST_CHUNK_TOKENS))
}

/// A factor for each class of prompt lengths: what one length is mispredicted by says little about another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LengthFactors(pub [f64; LengthFactors::N_CLASSES]);

impl LengthFactors {
    /// Below 64 tokens, and four times as many for each further class; the last has no end.
    pub const N_CLASSES: usize = 6;

    /// The same factor for every length.
    pub const fn constant(factor: f64) -> LengthFactors {
        LengthFactors([factor; LengthFactors::N_CLASSES])
    }

    /// The class of a prompt with so many tokens to compute.
    pub fn class(n_tokens: f64) -> usize {
        ((n_tokens.max(1.0).log2() as usize) / 2).saturating_sub(2).min(LengthFactors::N_CLASSES - 1)
    }

    /// The factor for a prompt with so many tokens to compute.
    pub fn at(&self, n_tokens: f64) -> f64 {
        self.0[LengthFactors::class(n_tokens)]
    }
}

fn bucket_of(size: f64) -> usize {
    (size.max(1.0).log2().round() as usize).min(N_BUCKETS - 1)
}

/// Updates an exponentially weighted mean. A mean of 0 means that nothing was measured yet.
pub fn ewma(mean: f64, new: f64) -> f64 {
    if mean > 0.0 { mean + WEIGHT * (new - mean) } else { new }
}

/// Measured rates of a node.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct NodeRates {
    /// Prompt tokens per second, by prompt length.
    pub prefill: Curve,
    /// Tokens per second of one stream, by the number of streams in a step.
    pub decode: Curve,
    /// Tokens per second that the store gives back.
    pub restore: RestoreRates,
}

/// Measured figures of transfers from a prefill node to a decode node.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct TransferRates {
    /// Bytes per second; 0 until measured.
    pub bytes_per_second: f64,
    /// Round trip, milliseconds; 0 until measured.
    pub rtt_ms: f64,
    /// Bytes on the wire of lossless pulls.
    pub lossless: WireBytes,
    /// Bytes on the wire of lossy pulls.
    pub lossy: WireBytes,
    /// Export, verification and import of the last chunk, milliseconds.
    pub tail_ms: f64,
    /// The share of a state's time on the wire that the prefill does not hide; 0 until measured. Engines that send a layer's
    /// state as soon as it is computed hide nearly all of it.
    pub after_prefill_state_share: f64,
    /// Pulls go through a lossy codec, but for requests that want lossless KV.
    pub is_lossy: bool,
}

/// The measured bytes of KV on the wire, after a codec.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct WireBytes {
    /// Bytes of one position's rows; 0 until measured.
    pub per_token: f64,
    /// Bytes of a sequence's states; 0 until measured.
    pub states: f64,
}

impl TransferRates {
    /// The same for a request that wants lossless KV, or not.
    pub fn for_kv(self, lossless_kv: bool) -> TransferRates {
        TransferRates { is_lossy: self.is_lossy && !lossless_kv, ..self }
    }

    /// The bytes that the next pull has on the wire.
    pub fn wire_bytes(&self) -> WireBytes {
        if self.is_lossy { self.lossy } else { self.lossless }
    }

    /// Learns from a handoff. If the link was clearly slower than the prefill, it learns the link's rate; if the prefill was
    /// clearly slower than the link, it learns the tail, and how much of the states' time shows; in between, neither. A request
    /// that wants lossless KV does not show which codecs the next one gets.
    pub fn learn_transfer(&mut self, handoff: &HandoffReport, lossless_kv: bool) {
        if !lossless_kv {
            self.is_lossy = handoff.is_lossy;
        }
        let n_tokens = f64::from(handoff.n_tokens.max(1));
        let state_bytes = handoff.state_bytes.min(handoff.n_bytes);
        let row_bytes = handoff.n_bytes - state_bytes;
        // Those of checkpoints travel among the rows.
        let end_bytes = state_bytes.saturating_sub(handoff.checkpoint_bytes);
        let compute_ms = handoff.prefill_ms - handoff.stalled_ms;
        let wire = if handoff.is_lossy { &mut self.lossy } else { &mut self.lossless };
        if row_bytes >= MIN_MEASURED_BYTES {
            wire.per_token = ewma(wire.per_token, row_bytes as f64 / n_tokens);
        }
        if end_bytes > 0 {
            wire.states = ewma(wire.states, end_bytes as f64);
        }
        // States come when all is computed: their time does not show which of the two was slower.
        let is_known = end_bytes > 0 && self.bytes_per_second > 0.0;
        let state_ms = if is_known { self.wire_ms(end_bytes) } else { 0.0 };
        if handoff.transfer_ms - state_ms > BOUND * compute_ms && handoff.n_bytes >= MIN_MEASURED_BYTES {
            let n_bytes = handoff.n_bytes as f64;
            self.bytes_per_second = ewma(self.bytes_per_second, n_bytes / (handoff.transfer_ms / 1e3));
            return;
        }
        if handoff.after_prefill_ms > 0.0 && BOUND * self.wire_ms(handoff.n_bytes - end_bytes) < compute_ms {
            let last_chunk_ms = self.wire_ms(row_bytes) * (LAST_CHUNK_TOKENS / n_tokens).min(1.0);
            let rest_ms = handoff.after_prefill_ms - last_chunk_ms;
            if state_ms > 0.0 {
                let share = (rest_ms / state_ms).clamp(1e-3, 1.0);
                self.after_prefill_state_share = ewma(self.after_prefill_state_share, share);
            }
            self.tail_ms = ewma(self.tail_ms, (rest_ms - state_ms).max(1e-3));
        }
    }

    /// The time of so many bytes on the wire, in milliseconds; infinite until the rate is measured.
    fn wire_ms(&self, n_bytes: u64) -> f64 {
        n_bytes as f64 / self.bytes_per_second * 1e3
    }

    /// The seconds on the wire of states with so many bytes before a codec, if the rate is measured.
    pub fn state_seconds(&self, state_bytes: u64) -> f64 {
        let WireBytes { states, .. } = self.wire_bytes();
        let n_bytes = if states > 0.0 { states.min(state_bytes as f64) } else { state_bytes as f64 };
        n_bytes / self.bytes_per_second
    }

    /// The part of them that comes after the last position.
    pub fn after_prefill_state_seconds(&self, state_bytes: u64) -> f64 {
        let share = if self.after_prefill_state_share > 0.0 { self.after_prefill_state_share } else { 1.0 };
        self.state_seconds(state_bytes) * share
    }

    /// Learns from a probe of the link: `n_bytes` in `seconds` after the first byte.
    pub fn learn_probe(&mut self, rtt_ms: f64, n_bytes: u64, seconds: f64) {
        if rtt_ms >= 0.0 && seconds > 0.0 {
            self.rtt_ms = ewma(self.rtt_ms, rtt_ms.max(1e-3));
            self.bytes_per_second = ewma(self.bytes_per_second, n_bytes as f64 / seconds);
        }
    }
}

/// The factor by which prefill or transfer must be slower than the other to count as the clearly slower one.
const BOUND: f64 = 1.2;

/// A smaller transfer measures latency and not the rate.
const MIN_MEASURED_BYTES: u64 = 1 << 20;

/// Tokens of a handoff's last chunk; see the engine's taper.
pub const LAST_CHUNK_TOKENS: f64 = 64.0;

/// Tokens of a model with states that the decode node computes itself: the head of the reply, which a template adds to every
/// prompt. States before it serve the next turn, too. Templates have 4 to 32.
pub const REPLY_HEAD_TOKENS: f64 = 12.0;

/// Tokens of the first chunk of a long prompt: an engine's physical batch.
pub const FIRST_CHUNK_TOKENS: f64 = 512.0;

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
        assert_eq!(curve.at(3_000.0), Some(2_000.0), "about 4,096");
        assert_eq!(curve.at(300.0), Some(1_000.0), "about 256");
        for nonsense in [(0.0, 1.0), (f64::NAN, 1.0), (8.0, 0.0), (8.0, f64::INFINITY), (8.0, -1.0)] {
            curve.learn(nonsense.0, nonsense.1);
        }
        assert_eq!(curve.at(8.0), Some(1_000.0));
    }

    #[test]
    fn other_sizes_follow_a_machine_that_has_become_slower() {
        let mut curve = Curve::default();
        curve.learn_with_others(256.0, 1_000.0, 0.5);
        curve.learn_with_others(4_096.0, 2_000.0, 0.5);
        (0..40).for_each(|_| curve.learn_with_others(256.0, 250.0, 0.5));
        let [here, there] = [256.0, 4_096.0].map(|size| curve.at(size).unwrap());
        assert!((here - 250.0).abs() < 1.0 && (there - 1_000.0).abs() < 5.0, "{here} {there}");
        let before = curve;
        curve.learn_with_others(256.0, f64::NAN, 0.5);
        assert_eq!(curve, before);
    }

    #[test]
    fn a_mean_of_rates_predicts_the_mean_of_the_times() {
        let mut curve = Curve::constant(100.0);
        curve.learn(1.0, 50.0);
        assert!((1.0 / curve.at(1.0).unwrap() - (0.7 * 0.01 + 0.3 * 0.02)).abs() < 1e-9);
    }

    #[test]
    fn short_prompts_in_one_step_have_the_rate_of_a_longer_one() {
        let sizes = [(100.0, 100.0), (100.0, 400.0), (100.0, 8_000.0), (100.0, 0.0), (2_000.0, 9_000.0)];
        let batches = sizes.map(|(n_tokens, n_together)| batch_size(n_tokens, n_together));
        assert_eq!(batches, [100.0, 400.0, FIRST_CHUNK_TOKENS, 100.0, 2_000.0]);
    }

    #[test]
    fn lengths_of_a_kind_share_a_factor() {
        let classes =
            [0.0, 63.0, 64.0, 255.0, 256.0, 1_023.0, 1_024.0, 8_000.0, 16_384.0, 1e9].map(LengthFactors::class);
        assert_eq!(classes, [0, 0, 1, 1, 2, 2, 3, 4, 5, 5]);
    }

    #[test]
    fn a_handoff_teaches_what_it_waited_for() {
        let known = TransferRates { bytes_per_second: 1e9, rtt_ms: 0.3, tail_ms: 2.0, ..TransferRates::default() };
        let learned = |compute_ms, transfer_ms, after_prefill_ms| {
            let mut link = known;
            let report = HandoffReport {
                n_tokens: 1_000,
                n_bytes: 100_000_000,
                prefill_ms: compute_ms + 70.0,
                stalled_ms: 70.0,
                transfer_ms,
                after_prefill_ms,
                ..HandoffReport::default()
            };
            link.learn_transfer(&report, false);
            assert_eq!(link.lossless.per_token, 100_000.0);
            (link.bytes_per_second, link.tail_ms)
        };
        let (rate, tail) = learned(100.0, 200.0, 150.0);
        assert!(rate < 1e9 && tail == 2.0, "the link was slower than the prefill");
        let (rate, tail) = learned(500.0, 490.0, 16.4);
        assert!(rate == 1e9 && (tail - 4.4).abs() < 0.1, "{tail}: 6.4 ms are the last chunk's way");
        assert_eq!(learned(105.0, 110.0, 50.0), (1e9, 2.0), "neither clearly waited");
        let mut unknown = TransferRates::default();
        let short = HandoffReport { n_tokens: 10, after_prefill_ms: 5.0, ..HandoffReport::default() };
        unknown.learn_transfer(&short, false);
        assert_eq!(unknown, TransferRates::default());
    }

    #[test]
    fn states_are_no_bytes_of_a_token_and_teach_how_much_of_them_is_hidden() {
        let known = TransferRates { bytes_per_second: 1e9, tail_ms: 2.0, ..TransferRates::default() };
        let report = |compute_ms: f64, transfer_ms: f64, after_prefill_ms: f64| HandoffReport {
            n_tokens: 1_000,
            n_bytes: 250_000_000,
            state_bytes: 150_000_000,
            prefill_ms: compute_ms,
            transfer_ms,
            after_prefill_ms,
            ..HandoffReport::default()
        };
        let learned = |report: HandoffReport| {
            let mut link = known;
            link.learn_transfer(&report, false);
            assert_eq!(link.lossless.per_token, 100_000.0, "the rows' alone");
            link
        };
        // After the last chunk: 150 ms of the state, 6.4 of the last chunk, and a tail.
        let after = learned(report(500.0, 640.0, 160.4));
        assert!((after.tail_ms - 2.0 - 0.3 * 2.0).abs() < 0.01 && after.bytes_per_second == 1e9, "{after:?}");
        assert_eq!(after.after_prefill_state_share, 1.0);
        // While the last chunk is computed.
        let hidden = learned(report(500.0, 500.0, 13.4));
        assert!((hidden.after_prefill_state_share - 7.0 / 150.0).abs() < 1e-3, "{hidden:?}");
        assert!(hidden.tail_ms < 2.0);
        // So it is with a checkpoint, whose states have come before.
        let more = report(500.0, 500.0, 13.4);
        let more =
            HandoffReport { n_bytes: 400_000_000, state_bytes: 300_000_000, checkpoint_bytes: 150_000_000, ..more };
        assert_eq!(learned(more), hidden);
        // A codec of states: what it leaves counts, and never more than the states have.
        assert_eq!(hidden.lossless.states, 150_000_000.0);
        assert_eq!([hidden.state_seconds(600_000_000), hidden.state_seconds(100_000_000)], [0.15, 0.1]);
        assert_eq!(known.state_seconds(600_000_000), 0.6);
        // A link slower than the prefill: all bytes follow one another.
        let slow = learned(report(100.0, 1_000.0, 900.0));
        assert!((slow.bytes_per_second - 0.775e9).abs() < 1e3, "{slow:?}");
        assert_eq!(slow.after_prefill_state_share, 0.0);
        // A short prompt, whose state takes longer than its prefill, says nothing of the rate.
        let short = HandoffReport { n_tokens: 1_000, ..report(120.0, 260.0, 156.4) };
        assert_eq!(learned(short).bytes_per_second, 1e9);
    }

    #[test]
    fn lossless_and_lossy_pulls_have_their_own_bytes() {
        let pull = |n_bytes: u64, is_lossy: bool| HandoffReport {
            n_tokens: 1_000,
            n_bytes,
            state_bytes: n_bytes / 2,
            is_lossy,
            ..HandoffReport::default()
        };
        let mut link = TransferRates { bytes_per_second: 1e9, ..TransferRates::default() };
        link.learn_transfer(&pull(60_000_000, true), false);
        assert_eq!(link.for_kv(true).wire_bytes(), WireBytes::default(), "nothing is known of lossless ones");
        link.learn_transfer(&pull(200_000_000, false), true);
        let bytes = |lossless_kv| link.for_kv(lossless_kv).wire_bytes();
        assert_eq!(bytes(false), WireBytes { per_token: 30_000.0, states: 30_000_000.0 });
        assert_eq!(bytes(true), WireBytes { per_token: 100_000.0, states: 100_000_000.0 });
        assert!(link.is_lossy && link.for_kv(true).state_seconds(u64::MAX) > link.state_seconds(u64::MAX));
        link.learn_transfer(&pull(200_000_000, false), false);
        assert!(!link.is_lossy, "the operator has taken the codec out");
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

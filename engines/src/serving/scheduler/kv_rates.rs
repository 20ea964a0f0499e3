//! How fast KV goes into the store, and comes back from each of its tiers.

use std::time::{Duration, Instant};

use baton_schemas::held::RestoreRates;
use baton_schemas::sequence::CachedTokens;

use super::rates::learn;

/// Fewer tokens measure how long a turn of the scheduler takes.
const MIN_TOKENS: u32 = 64;

/// A rate that nothing confirms doubles in this time. Otherwise one that a busy disk made too low would never be measured again,
/// because everything would be computed.
const DOUBLES_IN: Duration = Duration::from_secs(600);

/// The most that a rate grows without being confirmed.
const MAX_GROWTH: f64 = 1024.0;

/// The rate of a disk that gave nothing in time.
const LEAST_TPS: f64 = 1.0;

/// A measured rate.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct KvRate {
    /// Tokens per second; 0 until measured.
    tps: f64,
    measured_at: Option<Instant>,
}

/// The rates at which both tiers give KV back.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct MeasuredRestores {
    memory: KvRate,
    disk: KvRate,
}

impl KvRate {
    pub(super) fn learn(&mut self, tps: f64, now: Instant) {
        let is_old = |at: Instant| now.saturating_duration_since(at) >= DOUBLES_IN;
        if self.measured_at.is_none_or(is_old) {
            self.tps = tps;
        } else {
            learn(&mut self.tps, tps);
        }
        self.measured_at = Some(now);
    }

    /// Takes note of a rate that other work may have lowered: the true one is not lower, and is not believed to have risen since it
    /// was measured.
    fn bound(&mut self, tps: f64, now: Instant) {
        if self.measured_at.is_some() && tps < self.at(now) {
            (self.tps, self.measured_at) = (self.tps.max(tps), Some(now));
        }
    }

    /// Tokens per second, as far as the measurement is believed at this time; 0 until measured.
    pub(super) fn at(&self, now: Instant) -> f64 {
        let Some(measured_at) = self.measured_at else { return 0.0 };
        let age = now.saturating_duration_since(measured_at).as_secs_f64();
        self.tps * (age / DOUBLES_IN.as_secs_f64()).exp2().min(MAX_GROWTH)
    }
}

impl MeasuredRestores {
    /// Rates of both tiers that were measured now.
    #[cfg(test)]
    pub(super) fn of(tps: f64) -> MeasuredRestores {
        let rate = KvRate { tps, measured_at: Some(Instant::now()) };
        MeasuredRestores { memory: rate, disk: rate }
    }

    /// Learns from a restore that has ended, during which no other sequence ran.
    pub(super) fn learn(&mut self, given: CachedTokens, took: Duration, now: Instant) {
        let seconds = took.as_secs_f64().max(1e-6);
        if given.disk == 0 {
            if given.memory >= MIN_TOKENS {
                self.memory.learn(f64::from(given.memory) / seconds, now);
            }
            return;
        }
        let memory_tps = self.memory.at(now);
        let in_memory_s = if memory_tps > 0.0 { f64::from(given.memory) / memory_tps } else { 0.0 };
        let is_told_apart = memory_tps > 0.0 || given.memory <= given.disk;
        let on_disk_s = seconds - in_memory_s;
        if given.disk >= MIN_TOKENS && is_told_apart && on_disk_s > seconds / 2.0 {
            self.disk.learn(f64::from(given.disk) / on_disk_s, now);
        }
    }

    /// Learns from a restore beside other sequences, or one that ended early.
    pub(super) fn learn_disturbed(&mut self, given: CachedTokens, took: Duration, now: Instant) {
        let rate = if given.disk > 0 { &mut self.disk } else { &mut self.memory };
        let n = given.memory + given.disk;
        if n >= MIN_TOKENS {
            rate.bound(f64::from(n) / took.as_secs_f64().max(1e-6), now);
        }
    }

    /// The disk was too slow: it is tried again once its rate, which nothing confirms, has risen.
    pub(super) fn give_up_disk(&mut self, given: CachedTokens, took: Duration, now: Instant) {
        let tps = (f64::from(given.disk) / took.as_secs_f64().max(1e-6)).max(LEAST_TPS);
        self.disk = KvRate { tps, measured_at: Some(now) };
    }

    /// The rates at this time.
    pub(super) fn at(&self, now: Instant) -> RestoreRates {
        RestoreRates { memory: self.memory.at(now), disk: self.disk.at(now) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(memory: u32, disk: u32) -> CachedTokens {
        CachedTokens { n_cached: memory + disk, memory, disk }
    }

    #[test]
    fn a_tiers_rate_follows_from_its_own_part_of_a_restore() {
        let now = Instant::now();
        let mut rates = MeasuredRestores::default();
        rates.learn(given(63, 0), Duration::from_secs(1), now);
        rates.learn(given(4_000, 63), Duration::from_secs(1), now);
        rates.learn(given(4_000, 100), Duration::from_secs(1), now);
        assert_eq!(rates.at(now), RestoreRates::default(), "neither tier's time is known");
        rates.learn(given(4_000, 0), Duration::from_millis(40), now);
        // 40 ms of it are memory's.
        rates.learn(given(4_000, 1_000), Duration::from_millis(140), now);
        // No more than memory alone needs.
        rates.learn(given(4_000, 100), Duration::from_millis(41), now);
        let RestoreRates { memory, disk } = rates.at(now);
        assert!((memory - 1e5).abs() < 1.0 && (disk - 1e4).abs() < 1.0, "{memory}, {disk}");
    }

    #[test]
    fn a_restore_beside_other_sequences_stops_the_rise_and_a_disk_that_was_given_up_has_a_low_rate() {
        let mut now = Instant::now();
        let mut rates = MeasuredRestores::default();
        rates.learn_disturbed(given(0, 100), Duration::from_secs(1), now);
        assert_eq!(rates.at(now).disk, 0.0, "nothing was measured");
        rates.learn(given(0, 100), Duration::from_secs(1), now);
        now += DOUBLES_IN * 3;
        rates.learn_disturbed(given(0, 300), Duration::from_secs(1), now);
        assert!((rates.at(now).disk - 300.0).abs() < 0.01, "believed to be 800 before");
        rates.learn_disturbed(given(0, 100), Duration::from_secs(1), now);
        assert!((rates.at(now).disk - 300.0).abs() < 0.01, "other work slowed this one");
        rates.give_up_disk(given(4_000, 20), Duration::from_secs(2), now);
        assert!((rates.at(now).disk - 10.0).abs() < 0.01);
        rates.give_up_disk(given(0, 0), Duration::from_secs(2), now);
        assert!((rates.at(now).disk - LEAST_TPS).abs() < 0.01);
    }

    #[test]
    fn a_rate_that_nothing_confirms_rises_until_it_is_tried_again() {
        let mut now = Instant::now();
        let mut rates = MeasuredRestores::default();
        rates.learn(given(0, 100), Duration::from_secs(1), now);
        now += DOUBLES_IN;
        let disk = rates.at(now).disk;
        assert!((disk - 200.0).abs() < 0.01, "{disk}");
        rates.learn(given(0, 200), Duration::from_secs(1), now);
        now += DOUBLES_IN * 10_000;
        let disk = rates.at(now).disk;
        assert!((disk - 200.0 * MAX_GROWTH).abs() < 1.0, "it stays a number: {disk}");
    }
}

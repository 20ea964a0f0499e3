//! Durations of one interval in bounded memory, for percentiles. Adding one takes no lock, because each token adds one.

use std::sync::atomic::{AtomicU32, Ordering};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Buckets for each doubling: a percentile is off by at most 4.5 %.
const BUCKETS_PER_DOUBLING: f64 = 8.0;

/// The upper end of the first bucket, milliseconds.
const FIRST_MS: f64 = 0.05;

/// Reaches 14 minutes.
const N_BUCKETS: usize = 192;

/// Counts durations by their logarithm.
#[derive(Debug)]
pub(crate) struct LatencyBuckets([AtomicU32; N_BUCKETS]);

/// Percentiles of the durations in an interval, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Percentiles {
    /// Half are shorter.
    pub p50: f64,
    /// 95 % are shorter.
    pub p95: f64,
    /// 99 % are shorter.
    pub p99: f64,
}

impl Default for LatencyBuckets {
    fn default() -> LatencyBuckets {
        LatencyBuckets(std::array::from_fn(|_| AtomicU32::new(0)))
    }
}

impl LatencyBuckets {
    pub(crate) fn observe(&self, ms: f64) {
        let doublings = (ms / FIRST_MS).max(1.0).log2();
        let bucket = ((doublings * BUCKETS_PER_DOUBLING) as usize).min(N_BUCKETS - 1);
        self.0[bucket].fetch_add(1, Ordering::Relaxed);
    }

    /// Empties the buckets. `None`: they were empty.
    pub(crate) fn drain(&self) -> Option<Percentiles> {
        let counts: Vec<u32> = self.0.iter().map(|bucket| bucket.swap(0, Ordering::Relaxed)).collect();
        let n_all: u64 = counts.iter().copied().map(u64::from).sum();
        let at = |share: f64| {
            let wanted = ((n_all as f64 * share).ceil() as u64).max(1);
            let mut n_seen = 0;
            let bucket = counts.iter().position(|n| {
                n_seen += u64::from(*n);
                n_seen >= wanted
            });
            // The middle of the bucket, by its logarithm.
            FIRST_MS * ((bucket.unwrap_or_default() as f64 + 0.5) / BUCKETS_PER_DOUBLING).exp2()
        };
        (n_all > 0).then(|| Percentiles { p50: at(0.5), p95: at(0.95), p99: at(0.99) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(actual: f64, expected: f64) {
        assert!((actual / expected - 1.0).abs() < 0.05, "{actual} instead of {expected}");
    }

    #[test]
    fn percentiles_are_close_and_each_interval_starts_empty() {
        let buckets = LatencyBuckets::default();
        assert_eq!(buckets.drain(), None);
        (1..=1_000).for_each(|ms| buckets.observe(f64::from(ms)));
        let Percentiles { p50, p95, p99 } = buckets.drain().unwrap();
        check(p50, 500.0);
        check(p95, 950.0);
        check(p99, 990.0);
        assert_eq!(buckets.drain(), None);
    }

    #[test]
    fn what_is_out_of_range_counts_in_the_outer_buckets() {
        let buckets = LatencyBuckets::default();
        [0.0, -1.0, f64::NAN].into_iter().for_each(|ms| buckets.observe(ms));
        assert!(buckets.drain().unwrap().p99 < 0.06);
        buckets.observe(f64::INFINITY);
        assert!(buckets.drain().unwrap().p50 > 600_000.0);
    }
}

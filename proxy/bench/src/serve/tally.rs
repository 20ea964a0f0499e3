//! Counts and latencies of one round of one server.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton_proxy::serve::CommandFailure;
use hdrhistogram::Histogram;
use serde::Serialize;

use super::fault::{ReplyFault, ReplyFaults, RequestFailure};

/// Latencies are counted in nanoseconds, with three digits.
const LEAST_NS: u64 = 1_000;
const MOST_NS: u64 = 3_600_000_000_000;
const DIGITS: u8 = 3;

/// Examples of faults and failures that are kept.
const MAX_EXAMPLES: usize = 10;

/// The percentiles of a latency, and their names.
pub(super) const PERCENTILES: [Percentile; 7] = [
    Percentile { of: 0.1, name: "p10" },
    Percentile { of: 0.5, name: "p50" },
    Percentile { of: 0.9, name: "p90" },
    Percentile { of: 0.95, name: "p95" },
    Percentile { of: 0.99, name: "p99" },
    Percentile { of: 0.999, name: "p99.9" },
    Percentile { of: 1.0, name: "max" },
];

/// Indexes into [`PERCENTILES`].
pub(super) const P50: usize = 1;
pub(super) const P95: usize = 3;
pub(super) const P99: usize = 4;

pub(super) struct Percentile {
    of: f64,
    pub(super) name: &'static str,
}

/// A kind of latency.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum LatencyKind {
    /// Request to first text.
    Ttft,
    /// Between two chunks with text.
    Itl,
    /// (Last text − first text) / (tokens − 1), of each reply.
    Tpot,
    /// Request to the reply's end.
    EndToEnd,
    /// From the mock's write to this client's read of a token.
    Delay,
}

impl LatencyKind {
    pub(super) const ALL: [LatencyKind; 5] =
        [LatencyKind::Ttft, LatencyKind::Itl, LatencyKind::Tpot, LatencyKind::EndToEnd, LatencyKind::Delay];

    /// The name in tables.
    pub(super) fn name(self) -> &'static str {
        match self {
            LatencyKind::Ttft => "TTFT",
            LatencyKind::Itl => "ITL",
            LatencyKind::Tpot => "TPOT",
            LatencyKind::EndToEnd => "end to end",
            LatencyKind::Delay => "delay",
        }
    }
}

/// A latency's distribution.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Latency {
    pub(super) n: u64,
    /// By [`PERCENTILES`], milliseconds.
    pub(super) percentiles_ms: Vec<f64>,
}

/// The measured time of a round.
#[derive(Debug, Clone, Copy)]
pub(super) struct MeasuredTime {
    pub(super) from: Instant,
    /// `None` until it has ended.
    pub(super) until: Option<Instant>,
}

impl MeasuredTime {
    pub(super) fn contains(&self, at: Instant) -> bool {
        at >= self.from && self.until.is_none_or(|until| at < until)
    }
}

/// The counts of a round.
pub(super) struct Tally {
    pub(super) time: MeasuredTime,
    latencies: BTreeMap<LatencyKind, Histogram<u64>>,
    /// Complete replies that ended in the measured time.
    pub(super) n_replies: u64,
    /// Tokens of complete replies that arrived in the measured time.
    pub(super) n_tokens: f64,
    /// Chunks with text that arrived in it, of replies that failed later.
    pub(super) n_failed_chunks: u64,
    /// Replies that were checked, in the warm-up too.
    pub(super) n_checked: u64,
    n_with_usage: u64,
    n_prompt_tokens: u64,
    n_output_tokens: u64,
    pub(super) failures: BTreeMap<RequestFailure, u64>,
    pub(super) faults: BTreeMap<ReplyFault, u64>,
    pub(super) examples: Vec<String>,
}

impl Tally {
    /// Begins to measure at `from`.
    pub(super) fn new(from: Instant) -> Result<Tally, CommandFailure> {
        let histogram = |kind| Ok((kind, Histogram::new_with_bounds(LEAST_NS, MOST_NS, DIGITS)?));
        let latencies: Result<_, hdrhistogram::CreationError> = LatencyKind::ALL.into_iter().map(histogram).collect();
        Ok(Tally {
            time: MeasuredTime { from, until: None },
            latencies: latencies?,
            n_replies: 0,
            n_tokens: 0.0,
            n_failed_chunks: 0,
            n_checked: 0,
            n_with_usage: 0,
            n_prompt_tokens: 0,
            n_output_tokens: 0,
            failures: BTreeMap::new(),
            faults: BTreeMap::new(),
            examples: Vec::new(),
        })
    }

    pub(super) fn latency(&mut self, kind: LatencyKind, value: Duration) {
        self.latency_ns(kind, value.as_nanos() as u64);
    }

    pub(super) fn latency_ns(&mut self, kind: LatencyKind, ns: u64) {
        if let Some(histogram) = self.latencies.get_mut(&kind) {
            histogram.saturating_record(ns);
        }
    }

    pub(super) fn usage(&mut self, n_prompt: u64, n_output: u64) {
        self.n_with_usage += 1;
        self.n_prompt_tokens = self.n_prompt_tokens.saturating_add(n_prompt);
        self.n_output_tokens = self.n_output_tokens.saturating_add(n_output);
    }

    /// Counts a request without a complete reply. `detail` quotes what the server said, if it did.
    pub(super) fn failure(&mut self, failure: RequestFailure, detail: &str) {
        let n = self.failures.entry(failure).or_default();
        *n += 1;
        if *n == 1 {
            self.example(format!("{}{}{detail}", failure.name(), if detail.is_empty() { "" } else { ": " }));
        }
    }

    /// Counts the faults of a reply.
    pub(super) fn faults(&mut self, faults: ReplyFaults) {
        let is_new = faults.kinds.iter().any(|fault| !self.faults.contains_key(fault));
        for fault in faults.kinds {
            *self.faults.entry(fault).or_default() += 1;
        }
        if let Some(example) = faults.example.filter(|_| is_new) {
            self.example(example);
        }
    }

    fn example(&mut self, example: String) {
        if self.examples.len() < MAX_EXAMPLES {
            self.examples.push(example);
        }
    }

    /// The mean number of tokens of a prompt and of a reply, by the server's own count.
    pub(super) fn mean_tokens(&self) -> Option<MeanTokens> {
        let mean = |sum: u64| sum as f64 / self.n_with_usage as f64;
        let tokens = MeanTokens { prompt: mean(self.n_prompt_tokens), output: mean(self.n_output_tokens) };
        (self.n_with_usage > 0).then_some(tokens)
    }

    /// The distributions that have values.
    pub(super) fn latencies(&self) -> BTreeMap<LatencyKind, Latency> {
        let measured = self.latencies.iter().filter(|(_, histogram)| !histogram.is_empty());
        let latency = |histogram: &Histogram<u64>| Latency {
            n: histogram.len(),
            percentiles_ms: PERCENTILES.iter().map(|p| histogram.value_at_quantile(p.of) as f64 / 1e6).collect(),
        };
        measured.map(|(kind, histogram)| (*kind, latency(histogram))).collect()
    }
}

/// Mean numbers of tokens.
pub(super) struct MeanTokens {
    pub(super) prompt: f64,
    pub(super) output: f64,
}

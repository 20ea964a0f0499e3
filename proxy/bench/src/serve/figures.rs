//! The figures of one round of one server.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::processes::ProcessUse;
use super::tally::{Latency, LatencyKind, Tally};

/// What was used up to an edge of the measured time.
pub(super) struct RoundUse {
    pub(super) server: Option<ProcessUse>,
    pub(super) client: Option<ProcessUse>,
    pub(super) n_connections: u64,
}

/// All figures of a round.
#[derive(Debug, Clone, Serialize)]
pub(super) struct RoundFigures {
    /// The measured time.
    pub(super) seconds: f64,
    /// Complete replies that ended in it.
    pub(super) n_replies: u64,
    /// Tokens of complete replies that arrived in it.
    pub(super) n_tokens: f64,
    /// Chunks with text that arrived in it, of replies that failed later.
    pub(super) n_failed_chunks: u64,
    /// Replies that were checked, those of the warm-up too.
    pub(super) n_checked: u64,
    /// Of requests that began in the measured time.
    pub(super) latencies: BTreeMap<LatencyKind, Latency>,
    /// By the server's own count.
    pub(super) mean_prompt_tokens: Option<f64>,
    pub(super) mean_output_tokens: Option<f64>,
    /// User and system time of the server's processes in the measured time.
    pub(super) cpu_seconds: Option<f64>,
    /// Resident memory of the server's processes at its end.
    pub(super) resident_mib: Option<f64>,
    /// Connections that this client opened in the measured time.
    pub(super) n_connections: u64,
    /// Cores that this client used.
    pub(super) client_cores: Option<f64>,
    /// Requests without a complete reply, by reason.
    pub(super) failures: BTreeMap<String, u64>,
    /// Replies by fault.
    pub(super) faults: BTreeMap<&'static str, u64>,
    /// Failures other than refusals of a full server.
    pub(super) n_unexpected_failures: u64,
    pub(super) examples: Vec<String>,
}

impl RoundFigures {
    pub(super) fn new(tally: &Tally, measured: Duration, before: &RoundUse, after: &RoundUse) -> RoundFigures {
        let seconds = measured.as_secs_f64();
        let cpu = |before: Option<ProcessUse>, after: Option<ProcessUse>| {
            Some(after?.cpu.saturating_sub(before?.cpu).as_secs_f64())
        };
        let tokens = tally.mean_tokens();
        let unexpected = tally.failures.iter().filter(|(failure, _)| !failure.is_refusal());
        RoundFigures {
            seconds,
            n_replies: tally.n_replies,
            n_tokens: tally.n_tokens,
            n_failed_chunks: tally.n_failed_chunks,
            n_checked: tally.n_checked,
            latencies: tally.latencies(),
            mean_prompt_tokens: tokens.as_ref().map(|tokens| tokens.prompt),
            mean_output_tokens: tokens.as_ref().map(|tokens| tokens.output),
            cpu_seconds: cpu(before.server, after.server),
            resident_mib: after.server.map(|used| used.resident_bytes as f64 / f64::from(1 << 20)),
            n_connections: after.n_connections - before.n_connections,
            client_cores: cpu(before.client, after.client).map(|cpu| cpu / seconds),
            failures: tally.failures.iter().map(|(failure, n)| (failure.name().into_owned(), *n)).collect(),
            faults: tally.faults.iter().map(|(fault, n)| (fault.name(), *n)).collect(),
            n_unexpected_failures: unexpected.map(|(_, n)| n).sum(),
            examples: tally.examples.clone(),
        }
    }

    pub(super) fn requests_per_second(&self) -> f64 {
        self.n_replies as f64 / self.seconds
    }

    pub(super) fn tokens_per_second(&self) -> f64 {
        self.n_tokens / self.seconds
    }

    /// Processor seconds of the server for 1,000 replies.
    pub(super) fn cpu_per_1000_requests(&self) -> Option<f64> {
        self.cpu_seconds.filter(|_| self.n_replies > 0).map(|cpu| 1e3 * cpu / self.n_replies as f64)
    }

    /// Processor seconds of the server for a million tokens.
    pub(super) fn cpu_per_million_tokens(&self) -> Option<f64> {
        self.cpu_seconds.filter(|_| self.n_tokens > 0.0).map(|cpu| 1e6 * cpu / self.n_tokens)
    }
}

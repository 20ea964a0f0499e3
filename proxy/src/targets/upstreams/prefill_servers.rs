//! The servers that compute prompts for an upstream: which one computes the next prompt, and what became of the last ones.
//!
//! They take turns. Each has a breaker, which opens if the server fails or if the upstream cannot use its KV. Meanwhile the
//! upstream computes prompts itself, so a server that hangs costs the requests that wait for it their time, until the first
//! gives up, and no later one.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use baton_upstream::{PrefillFailure, PrefilledPrompt, PreparedChoice, Upstream};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::prompt_estimate::most_tokens;
use crate::reply_event::EventKind;
use crate::targets::nodes::{Breaker, Fallbacks};

/// The longest pause of a breaker. A trial that fails costs its request up to half of `first_seconds`.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// Why an upstream computed a prompt itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PrefillFallback {
    /// Every prefill server had failed shortly before.
    KeptAway,
    /// A prefill server was asked, and its KV could not be used.
    Failed(PrefillFailure),
}

impl PrefillFallback {
    /// The word for metrics, logs and JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            PrefillFallback::KeptAway => "prefill_kept_away",
            PrefillFallback::Failed(failure) => failure.as_str(),
        }
    }
}

/// The prefill servers of one upstream.
pub struct PrefillServers {
    /// In the order of the configuration.
    pub servers: Vec<Arc<PrefillServer>>,
    /// Prompts that the upstream computed itself, by reason.
    pub fallbacks: Fallbacks<PrefillFallback>,
    turn: AtomicUsize,
}

/// A server that computes prompts for an upstream.
pub struct PrefillServer {
    /// Its name in the state, logs and metrics: `prefill-1` is the first one in the configuration.
    pub name: String,
    /// Keeps prompts away from it while it fails, or while the upstream cannot use its KV.
    pub breaker: Breaker<PrefillFailure>,
    index: usize,
    totals: Mutex<PrefillTotals>,
    /// A prompt has missed this server since its last probe. Without prompts a server is not probed.
    is_missed: AtomicBool,
    /// Notified when a prompt has waited in vain: the others that wait for this server leave with it.
    hangs: Notify,
}

/// What a prefill server has done since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PrefillTotals {
    /// Prompts that it computed.
    pub n_prompts: u64,
    /// The time that it took for these.
    pub time: Duration,
    /// Tokens of prompts that came by transfer, at most, of complete replies.
    pub n_transferred: u64,
}

/// A prompt whose KV a prefill server keeps for the upstream.
pub struct Transfer {
    pub(super) server: Arc<PrefillServer>,
    /// When the server was asked.
    asked: Instant,
    /// The time that the server took.
    prefill_time: Duration,
    /// The prompt's tokens; 0 if the server does not report them.
    n_tokens: u32,
}

impl PrefillServers {
    /// The servers of this client, with closed breakers.
    pub(super) fn new(client: &Upstream) -> PrefillServers {
        PrefillServers::of(client.settings().prefill.len())
    }

    fn of(n_servers: usize) -> PrefillServers {
        let servers = (0..n_servers).map(|index| Arc::new(PrefillServer::new(index))).collect();
        PrefillServers { servers, fallbacks: Fallbacks::default(), turn: AtomicUsize::new(0) }
    }

    /// Has the next server compute the choice's prompt until `due`, if there is one that can.
    pub(super) async fn compute(
        &self,
        client: &Upstream,
        choice: &mut PreparedChoice,
        request_id: &str,
        due: Instant,
    ) -> Option<Transfer> {
        if self.servers.is_empty() {
            return None;
        }
        let Some(server) = self.next() else {
            self.fallbacks.count(PrefillFallback::KeptAway);
            return None;
        };
        let asked = Instant::now();
        let outcome = tokio::select! {
            biased;
            outcome = client.prefill(server.index, choice, request_id, due) => outcome,
            () = server.hangs.notified() => Err(PrefillFailure::TimedOut),
        };
        let time = asked.elapsed();
        let ms = time.as_millis() as u64;
        let upstream = &client.settings().name;
        let prefill = &server.name;
        match outcome {
            Ok(PrefilledPrompt { n_tokens }) => {
                let n_tokens = n_tokens.unwrap_or(0);
                tracing::debug!(upstream, prefill, request_id, ms, n_tokens, "a prefill server computed a prompt");
                server.add(PrefillTotals { n_prompts: 1, time, ..PrefillTotals::default() });
                Some(Transfer { server, asked, prefill_time: time, n_tokens })
            }
            Err(failure) => {
                let reason = failure.as_str();
                tracing::info!(
                    upstream,
                    prefill,
                    request_id,
                    reason,
                    ms,
                    "a prefill server did not compute a prompt; the upstream does"
                );
                self.fallbacks.count(PrefillFallback::Failed(failure));
                server.failed(failure, asked);
                None
            }
        }
    }

    /// The server whose turn it is, or the next one whose breaker lets a prompt pass.
    fn next(&self) -> Option<Arc<PrefillServer>> {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let n = self.servers.len();
        let mut in_turn = (0..n).map(|i| &self.servers[(turn % n + i) % n]);
        let passes = |server: &&Arc<PrefillServer>| {
            let passes = server.breaker.try_pass();
            server.is_missed.fetch_or(!passes, Ordering::Relaxed);
            passes
        };
        in_turn.find(passes).map(Arc::clone)
    }
}

impl PrefillServer {
    fn new(index: usize) -> PrefillServer {
        PrefillServer {
            name: format!("prefill-{}", index + 1),
            breaker: Breaker::pausing_up_to(MAX_PAUSE),
            index,
            totals: Mutex::default(),
            is_missed: AtomicBool::new(false),
            hangs: Notify::new(),
        }
    }

    /// Asks the server for a token of this model, if a prompt has missed it and its breaker waits for an answer.
    pub(super) async fn probe(&self, client: &Upstream, model: &str) {
        if !self.take_miss() {
            return;
        }
        let asked = Instant::now();
        if client.prefill_server_computes(self.index, model).await {
            self.breaker.answered(asked);
        }
    }

    /// Returns true once for the prompts that have missed the server since the last call, if its breaker waits for an answer.
    fn take_miss(&self) -> bool {
        self.is_missed.swap(false, Ordering::Relaxed) && self.breaker.awaits_answer()
    }

    /// Notes why a prompt that went to the server at `asked` did not reach the upstream as KV.
    fn failed(&self, failure: PrefillFailure, asked: Instant) {
        match failure {
            // It answers, and other prompts may suit it.
            PrefillFailure::Refused => self.breaker.succeeded(asked),
            PrefillFailure::ServerError => self.breaker.suspected(failure),
            // A proxy may have answered for the server.
            PrefillFailure::Busy | PrefillFailure::GatewayError => {}
            PrefillFailure::TimedOut => {
                self.breaker.failed(failure);
                self.hangs.notify_waiters();
            }
            PrefillFailure::Failed
            | PrefillFailure::NoKvTransferParams
            | PrefillFailure::KvLost
            | PrefillFailure::KvTimedOut => self.breaker.failed(failure),
        }
        self.is_missed.store(true, Ordering::Relaxed);
    }

    /// Its totals since the start.
    pub fn totals(&self) -> PrefillTotals {
        *self.totals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, more: PrefillTotals) {
        let mut totals = self.totals.lock().unwrap_or_else(PoisonError::into_inner);
        totals.n_prompts += more.n_prompts;
        totals.time += more.time;
        totals.n_transferred += more.n_transferred;
    }
}

impl Transfer {
    /// The upstream has begun to answer with the KV.
    pub(super) fn arrived(&self) {
        self.server.breaker.succeeded(self.asked);
    }

    /// The upstream failed, and this KV is the likely cause.
    pub(super) fn lost(&self, failure: PrefillFailure) {
        self.server.failed(failure, self.asked);
    }

    /// The reply is complete. `n_cached`: the prompt's tokens that the upstream did not compute, if it reports them. They came
    /// by transfer or from its own cache, which vLLM does not tell apart. `n_estimated`: the prompt's tokens.
    pub(super) fn ended(&self, n_cached: Option<u32>, n_estimated: u32) -> EventKind {
        let n_transferred = self.n_tokens.min(most_tokens(n_estimated)).min(n_cached.unwrap_or(u32::MAX));
        self.server.add(PrefillTotals { n_transferred: n_transferred.into(), ..PrefillTotals::default() });
        self.event(n_transferred)
    }

    /// The choice has begun with this KV.
    pub(super) fn started(&self) -> EventKind {
        self.event(0)
    }

    fn event(&self, n_transferred: u32) -> EventKind {
        let prefill_ms = self.prefill_time.as_secs_f64() * 1e3;
        EventKind::Prefilled { server: self.server.name.clone(), prefill_ms, n_transferred }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_barred_prefill_server_is_probed_only_for_prompts() {
        let servers = PrefillServers::of(1);
        let server = servers.next().unwrap();
        assert!(!server.take_miss(), "it has not failed");
        server.failed(PrefillFailure::Failed, Instant::now());
        assert_eq!([(); 3].map(|()| server.take_miss()), [true, false, false], "one prompt, one probe");
        assert!(servers.next().is_none(), "it is barred");
        assert_eq!([(); 3].map(|()| server.take_miss()), [true, false, false], "the next prompt");
    }
}

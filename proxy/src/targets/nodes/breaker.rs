//! Keeps requests away from a node that fails, and lets one through now and then to see whether it is back.
//!
//! Closed: requests pass. A failure opens it for a while that doubles with each failure in a row. When the while is
//! over, one request passes (half-open); its success closes the breaker, its failure opens it for longer. A node that
//! has not answered a question since its failure is not tried: a request to a frozen node would wait for seconds, and
//! the pool hears of every node's load anyway. Where no request comes to try a node that is well, it closes by itself.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// How long the first failure keeps requests away.
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// A node that is back is used again within this.
const MAX_PAUSE: Duration = Duration::from_secs(4);

/// How long the outcome of the one request that was let through is waited for. Short, because a request can pass without
/// any: its client left, or everything was cached.
const TRIAL_TIME: Duration = MAX_PAUSE;

/// How long a node that could be tried is waited for to be tried.
const QUIET_TIME: Duration = Duration::from_secs(2);

/// A breaker: of one of a node's tasks, of a pair of nodes, or of an upstream.
#[derive(Debug, Default)]
pub struct Breaker(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    n_in_a_row: u32,
    closed_until: Option<Instant>,
    /// The one request that was let through has not come to anything yet.
    is_on_trial: bool,
    failed_at: Option<Instant>,
    /// Whether the node has answered since the last failure.
    was_heard: bool,
    counts: BTreeMap<&'static str, u64>,
    last_reason: Option<&'static str>,
}

/// A breaker at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BreakerView {
    /// Requests are kept away, but for one now and then.
    pub is_open: bool,
    /// Failures since the last success.
    pub n_in_a_row: u32,
    /// Why it failed last.
    pub last_reason: Option<&'static str>,
    /// Failures by reason since the start.
    pub counts: BTreeMap<&'static str, u64>,
}

impl Breaker {
    /// Whether a request may be sent now. Asking takes the half-open state's one place: ask only to send.
    pub fn try_pass(&self) -> bool {
        let mut state = self.lock();
        match state.closed_until {
            None => true,
            Some(until) if Instant::now() < until || !state.was_heard => false,
            Some(_) => {
                (state.closed_until, state.is_on_trial) = (Some(Instant::now() + TRIAL_TIME), true);
                true
            }
        }
    }

    /// Whether [`Breaker::try_pass`] would say yes.
    pub fn would_pass(&self) -> bool {
        let state = self.lock();
        state.closed_until.is_none_or(|until| state.was_heard && Instant::now() >= until)
    }

    /// Whether it keeps requests away, but for one now and then.
    pub fn is_open(&self) -> bool {
        self.lock().closed_until.is_some()
    }

    /// Why [`Breaker::try_pass`] would say no, if it would.
    pub fn bars(&self) -> Option<&'static str> {
        if self.would_pass() { None } else { self.last_reason() }
    }

    /// The node has answered a question that was asked after `since`.
    pub fn heard(&self, since: Instant) {
        let mut state = self.lock();
        state.was_heard |= state.failed_at.is_none_or(|failed_at| since >= failed_at);
    }

    /// Closes it, and says so, if a node has been well for a while and no request has come to try it: a node that
    /// nobody needs is not under suspicion for ever.
    pub fn settle(&self) -> bool {
        let mut state = self.lock();
        let is_well = state.was_heard && state.closed_until.is_some_and(|until| Instant::now() >= until + QUIET_TIME);
        if is_well {
            (state.n_in_a_row, state.closed_until, state.is_on_trial) = (0, None, false);
        }
        is_well
    }

    /// A request went well.
    pub fn succeeded(&self) {
        let mut state = self.lock();
        (state.n_in_a_row, state.closed_until, state.is_on_trial) = (0, None, false);
    }

    /// A request failed for a reason that is the node's.
    pub fn failed(&self, reason: &'static str) {
        let mut state = self.lock();
        let now = Instant::now();
        // What was under way when the breaker opened fails for the same cause, and makes the pause no longer.
        let is_another = state.closed_until.is_none_or(|until| until <= now) || state.is_on_trial;
        state.n_in_a_row = state.n_in_a_row.saturating_add(u32::from(is_another));
        state.is_on_trial = false;
        let doublings = state.n_in_a_row.saturating_sub(1).min(8);
        let pause = FIRST_PAUSE.saturating_mul(1 << doublings).min(MAX_PAUSE);
        (state.closed_until, state.failed_at, state.was_heard) = (Some(now + pause), Some(now), false);
        state.last_reason = Some(reason);
        *state.counts.entry(reason).or_default() += 1;
    }

    /// Everything an operator is shown of it.
    pub fn view(&self) -> BreakerView {
        let state = self.lock();
        BreakerView {
            is_open: state.closed_until.is_some(),
            n_in_a_row: state.n_in_a_row,
            last_reason: state.last_reason,
            counts: state.counts.clone(),
        }
    }

    /// Failures by reason since the start.
    pub fn counts(&self) -> BTreeMap<&'static str, u64> {
        self.lock().counts.clone()
    }

    /// Why it failed last.
    pub fn last_reason(&self) -> Option<&'static str> {
        self.lock().last_reason
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Breaker {
        fn was_heard(&self) -> bool {
            self.lock().was_heard
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_keeps_requests_away_and_one_is_let_through_later() {
        let breaker = Breaker::default();
        assert!(breaker.try_pass());
        breaker.failed("prefill_down");
        assert!(!breaker.try_pass());
        // A second request that was under way.
        breaker.failed("prefill_down");
        tokio::time::advance(FIRST_PAUSE).await;
        assert!(!breaker.try_pass(), "nothing was heard of it");
        breaker.heard(Instant::now());
        assert!(breaker.would_pass());
        assert!(breaker.try_pass(), "half-open: one request");
        assert!(!breaker.try_pass(), "and no second one");
        let asked_before = Instant::now();
        tokio::time::advance(Duration::from_millis(1)).await;
        breaker.failed("prefill_down");
        breaker.heard(asked_before);
        assert!(!breaker.was_heard(), "an answer from before the failure");
        breaker.heard(Instant::now());
        tokio::time::advance(FIRST_PAUSE).await;
        assert!(!breaker.try_pass(), "the second pause is longer");
        tokio::time::advance(FIRST_PAUSE).await;
        assert!(breaker.try_pass());
        breaker.succeeded();
        assert!(breaker.try_pass() && breaker.try_pass());
        assert_eq!(breaker.counts(), BTreeMap::from([("prefill_down", 3)]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_answers_and_that_nobody_tries_is_trusted_again() {
        let breaker = Breaker::default();
        assert!(!breaker.settle(), "it is closed");
        breaker.failed("decode_lost");
        tokio::time::advance(FIRST_PAUSE + QUIET_TIME).await;
        assert!(!breaker.settle(), "nothing was heard of it");
        breaker.heard(Instant::now());
        assert!(breaker.settle() && !breaker.view().is_open);
        breaker.failed("decode_lost");
        breaker.heard(Instant::now());
        tokio::time::advance(FIRST_PAUSE).await;
        assert!(breaker.try_pass() && !breaker.settle(), "a request tries it");
        breaker.failed("decode_lost");
        breaker.heard(Instant::now());
        tokio::time::advance(QUIET_TIME).await;
        assert!(!breaker.settle(), "the second pause is longer");
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_failed_for_hours_is_tried_within_five_seconds() {
        let breaker = Breaker::default();
        for _ in 0..100 {
            breaker.failed("prefill_down");
            breaker.heard(Instant::now());
            tokio::time::advance(MAX_PAUSE).await;
            assert!(breaker.try_pass());
        }
        breaker.failed("prefill_down");
        breaker.heard(Instant::now());
        tokio::time::advance(Duration::from_secs(5)).await;
        assert!(breaker.try_pass());
        // A trial whose outcome never came does not close the door for ever.
        tokio::time::advance(TRIAL_TIME).await;
        assert!(breaker.try_pass());
    }
}

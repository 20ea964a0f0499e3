//! Keeps requests away from a failing node, and lets one through at intervals to test the node.
//!
//! Closed: requests pass. A failure opens the breaker for a pause that doubles with each failure in a row. After the
//! pause one request passes (half-open); its success closes the breaker, its failure opens it for longer. No request
//! passes before the node has answered a probe since its failure, because a request to a frozen node would wait for
//! seconds. If no request comes to try a node that answers, the breaker closes by itself.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// How long the first failure keeps requests away.
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// The longest pause, so that a node that works again is used again within it.
const MAX_PAUSE: Duration = Duration::from_secs(4);

/// How long after its pause a breaker waits for a request before it closes by itself.
const QUIET_TIME: Duration = Duration::from_secs(2);

/// A breaker of a node's task, of a pair of nodes, of an upstream, or of one of its prefill servers. `R` is the type of
/// failure reasons.
#[derive(Debug)]
pub struct Breaker<R> {
    record: Mutex<BreakerRecord<R>>,
    first_pause: Duration,
    /// The longest pause. The breaker also waits this long for the outcome of the request that it let through: there may be none,
    /// because the client may leave.
    max_pause: Duration,
}

#[derive(Debug)]
struct BreakerRecord<R> {
    n_in_a_row: u32,
    /// When the next request may pass, if the breaker is open.
    open_until: Option<Instant>,
    /// When the pause of the last failure ended.
    paused_until: Option<Instant>,
    /// The request that was let through has no outcome yet.
    is_on_trial: bool,
    failed_at: Option<Instant>,
    /// The node has answered a probe since the last failure.
    has_answered: bool,
    counts: BTreeMap<R, u64>,
    last_reason: Option<R>,
}

/// A breaker at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BreakerView<R> {
    /// Requests are kept away, except for one at intervals.
    pub is_open: bool,
    /// Failures since the last success.
    pub n_in_a_row: u32,
    /// Why it failed last.
    pub last_reason: Option<R>,
    /// Failures by reason since the start.
    pub counts: BTreeMap<R, u64>,
}

impl<R> Default for Breaker<R> {
    fn default() -> Breaker<R> {
        Breaker::pausing_up_to(MAX_PAUSE)
    }
}

impl<R> Breaker<R> {
    /// A breaker for what costs a request so much when it fails that it is tried less often.
    pub fn pausing_up_to(max_pause: Duration) -> Breaker<R> {
        Breaker::pausing(FIRST_PAUSE, max_pause)
    }

    /// The same with a first pause of its own.
    pub fn pausing(first_pause: Duration, max_pause: Duration) -> Breaker<R> {
        let record = BreakerRecord {
            n_in_a_row: 0,
            open_until: None,
            paused_until: None,
            is_on_trial: false,
            failed_at: None,
            has_answered: false,
            counts: BTreeMap::new(),
            last_reason: None,
        };
        Breaker { record: Mutex::new(record), first_pause, max_pause }
    }
}

impl<R> BreakerRecord<R> {
    fn close(&mut self) {
        self.n_in_a_row = 0;
        self.open_until = None;
        self.is_on_trial = false;
    }
}

impl<R: Copy + Ord> BreakerRecord<R> {
    fn count(&mut self, reason: R, now: Instant) {
        self.failed_at = Some(now);
        self.last_reason = Some(reason);
        *self.counts.entry(reason).or_default() += 1;
    }
}

impl<R: Copy + Ord> Breaker<R> {
    /// Returns true if a request may be sent now. In the half-open state this takes the only place, so call it only to
    /// send.
    pub fn try_pass(&self) -> bool {
        let mut record = self.lock();
        match record.open_until {
            None => true,
            Some(until) if Instant::now() < until || !record.has_answered => false,
            Some(_) => {
                record.open_until = Some(Instant::now() + self.max_pause);
                record.is_on_trial = true;
                true
            }
        }
    }

    /// Returns what [`Breaker::try_pass`] would return, and takes nothing.
    pub fn would_pass(&self) -> bool {
        let record = self.lock();
        record.open_until.is_none_or(|until| record.has_answered && Instant::now() >= until)
    }

    /// Returns true if requests are kept away, except for one at intervals.
    pub fn is_open(&self) -> bool {
        self.lock().open_until.is_some()
    }

    /// Returns true if requests are kept away until a probe is answered.
    pub fn awaits_answer(&self) -> bool {
        let record = self.lock();
        record.open_until.is_some() && !record.has_answered
    }

    /// Why [`Breaker::try_pass`] would return false; `None` if it would return true.
    pub fn bars(&self) -> Option<R> {
        if self.would_pass() { None } else { self.last_reason() }
    }

    /// Notes that the node has answered a probe that was sent at `asked`.
    pub fn answered(&self, asked: Instant) {
        let mut record = self.lock();
        record.has_answered |= record.failed_at.is_none_or(|failed_at| asked >= failed_at);
    }

    /// Closes the breaker if the node has answered for a while and no request came to try it. Returns true if it closed.
    pub fn close_if_quiet(&self) -> bool {
        let mut record = self.lock();
        let is_quiet =
            record.has_answered && record.open_until.is_some_and(|until| Instant::now() >= until + QUIET_TIME);
        if is_quiet {
            record.close();
        }
        is_quiet
    }

    /// A request that was sent at `asked` succeeded: the breaker closes, unless it has opened since.
    pub fn succeeded(&self, asked: Instant) {
        let mut record = self.lock();
        if record.failed_at.is_none_or(|failed_at| asked >= failed_at) {
            record.close();
        }
    }

    /// The request that was let through shows nothing: it did not need the node, or failed without its fault. It counts as none, so
    /// that the breaker closes by itself even if only such requests come.
    pub fn untried(&self) {
        let mut record = self.lock();
        if std::mem::take(&mut record.is_on_trial) {
            record.open_until = record.paused_until;
        }
    }

    /// A request failed, and perhaps the request itself is the cause: the breaker opens if the last one failed, too.
    pub fn suspected(&self, reason: R) {
        let mut record = self.lock();
        match record.n_in_a_row {
            0 => {
                record.n_in_a_row = 1;
                record.count(reason, Instant::now());
            }
            _ => self.open(&mut record, reason),
        }
    }

    /// A request failed because of the node: the breaker opens.
    pub fn failed(&self, reason: R) {
        self.open(&mut self.lock(), reason);
    }

    fn open(&self, record: &mut BreakerRecord<R>, reason: R) {
        let now = Instant::now();
        // Requests that were running when the breaker opened fail for the same cause and must not lengthen the pause.
        let is_another = record.open_until.is_none_or(|until| until <= now) || record.is_on_trial;
        record.n_in_a_row = record.n_in_a_row.saturating_add(u32::from(is_another));
        let doublings = record.n_in_a_row.saturating_sub(1).min(8);
        let pause = self.first_pause.saturating_mul(1 << doublings).min(self.max_pause);
        record.is_on_trial = false;
        record.paused_until = Some(now + pause);
        record.open_until = record.paused_until;
        record.has_answered = false;
        record.count(reason, now);
    }

    /// The time until the next request may pass.
    pub fn pause_left(&self) -> Duration {
        self.lock().open_until.map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()))
    }

    /// The breaker's state, for reports.
    pub fn view(&self) -> BreakerView<R> {
        let record = self.lock();
        BreakerView {
            is_open: record.open_until.is_some(),
            n_in_a_row: record.n_in_a_row,
            last_reason: record.last_reason,
            counts: record.counts.clone(),
        }
    }

    /// Why it failed last.
    pub fn last_reason(&self) -> Option<R> {
        self.lock().last_reason
    }

    fn lock(&self) -> MutexGuard<'_, BreakerRecord<R>> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use baton_planner::reason::FailureReason;
    use baton_schemas::handoff::HandoffFailure;

    use super::*;

    const PREFILL_DOWN: FailureReason = FailureReason::Handoff(HandoffFailure::PrefillDown);

    impl Breaker<FailureReason> {
        fn has_answered(&self) -> bool {
            self.lock().has_answered
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_keeps_requests_away_and_one_is_let_through_later() {
        let breaker = Breaker::default();
        assert!(breaker.try_pass());
        breaker.failed(PREFILL_DOWN);
        assert!(!breaker.try_pass());
        // A second request that was under way.
        breaker.failed(PREFILL_DOWN);
        tokio::time::advance(FIRST_PAUSE).await;
        assert!(!breaker.try_pass(), "it has not answered");
        breaker.answered(Instant::now());
        assert!(breaker.would_pass());
        assert!(breaker.try_pass(), "half-open: one request");
        assert!(!breaker.try_pass(), "and no second one");
        let asked_before = Instant::now();
        tokio::time::advance(Duration::from_millis(1)).await;
        breaker.failed(PREFILL_DOWN);
        breaker.answered(asked_before);
        assert!(!breaker.has_answered(), "an answer from before the failure");
        breaker.answered(Instant::now());
        tokio::time::advance(FIRST_PAUSE).await;
        assert!(!breaker.try_pass(), "the second pause is longer");
        tokio::time::advance(FIRST_PAUSE).await;
        assert!(breaker.try_pass());
        breaker.succeeded(asked_before);
        assert!(!breaker.try_pass(), "a success of a request from before the failure");
        breaker.succeeded(Instant::now());
        assert!(breaker.try_pass() && breaker.try_pass());
        assert_eq!(breaker.view().counts, BTreeMap::from([(PREFILL_DOWN, 3)]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_that_may_be_the_requests_own_counts_if_the_next_one_fails_too() {
        let breaker = Breaker::default();
        for _ in 0..3 {
            breaker.suspected(PREFILL_DOWN);
            assert!(breaker.try_pass() && !breaker.awaits_answer());
            breaker.succeeded(Instant::now());
        }
        breaker.suspected(PREFILL_DOWN);
        breaker.suspected(PREFILL_DOWN);
        assert!(!breaker.would_pass() && breaker.awaits_answer());
        breaker.answered(Instant::now());
        assert!(!breaker.awaits_answer());
        assert_eq!(breaker.view().counts, BTreeMap::from([(PREFILL_DOWN, 5)]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_answers_is_trusted_again_without_a_request() {
        let breaker = Breaker::default();
        assert!(!breaker.close_if_quiet(), "it is closed");
        breaker.failed(FailureReason::DecodeLost);
        tokio::time::advance(FIRST_PAUSE + QUIET_TIME).await;
        assert!(!breaker.close_if_quiet(), "it has not answered");
        breaker.answered(Instant::now());
        assert!(breaker.close_if_quiet() && !breaker.view().is_open);
        breaker.failed(FailureReason::DecodeLost);
        breaker.answered(Instant::now());
        tokio::time::advance(FIRST_PAUSE).await;
        assert!(breaker.try_pass() && !breaker.close_if_quiet(), "a request tries it");
        breaker.failed(FailureReason::DecodeLost);
        breaker.answered(Instant::now());
        tokio::time::advance(QUIET_TIME).await;
        assert!(!breaker.close_if_quiet(), "the second pause is longer");
    }

    #[tokio::test(start_paused = true)]
    async fn requests_that_show_nothing_do_not_keep_a_breaker_open() {
        let breaker = Breaker::default();
        breaker.failed(PREFILL_DOWN);
        breaker.answered(Instant::now());
        tokio::time::advance(FIRST_PAUSE).await;
        let mut n_passed = 0;
        while !breaker.close_if_quiet() {
            n_passed += 1;
            assert!(n_passed < 100 && breaker.try_pass() && !breaker.try_pass(), "one at a time");
            tokio::time::advance(QUIET_TIME / 4).await;
            breaker.untried();
        }
        assert!(!breaker.is_open());
        breaker.untried();
        assert!(!breaker.is_open(), "nothing was on trial");
    }

    #[tokio::test(start_paused = true)]
    async fn what_costs_much_is_tried_less_often() {
        let minute = Duration::from_secs(60);
        let breaker = Breaker::pausing_up_to(minute);
        for _ in 0..100 {
            breaker.failed(PREFILL_DOWN);
            breaker.answered(Instant::now());
            tokio::time::advance(minute).await;
            assert!(breaker.try_pass());
        }
        breaker.failed(PREFILL_DOWN);
        breaker.answered(Instant::now());
        tokio::time::advance(minute - FIRST_PAUSE).await;
        assert!(!breaker.try_pass());
        tokio::time::advance(FIRST_PAUSE).await;
        assert!(breaker.try_pass());
    }

    #[tokio::test(start_paused = true)]
    async fn a_node_that_failed_for_hours_is_tried_within_five_seconds() {
        let breaker = Breaker::default();
        for _ in 0..100 {
            breaker.failed(PREFILL_DOWN);
            breaker.answered(Instant::now());
            tokio::time::advance(MAX_PAUSE).await;
            assert!(breaker.try_pass());
        }
        breaker.failed(PREFILL_DOWN);
        breaker.answered(Instant::now());
        tokio::time::advance(Duration::from_secs(5)).await;
        assert!(breaker.try_pass());
        // A trial without an outcome does not keep requests away forever.
        tokio::time::advance(MAX_PAUSE).await;
        assert!(breaker.try_pass());
    }
}

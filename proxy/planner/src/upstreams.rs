//! Chooses among upstreams that serve one model, and between them and the model's own nodes.
//!
//! The upstream that is predicted to end the reply first is chosen. One that was not measured gets a request while it is idle. One
//! that was slower than another gets one again when that costs little beside the requests since: it may be fast again.

use crate::cost::{Prediction, worthwhile_gain_ms};
use crate::reason::{BarReason, RouteReason};
use crate::snapshot::RequestSize;
use crate::upstream_queue::{self, NewRequest, QueuedTimes, QueuedWork};
use crate::upstream_rates::{FirstTokenSeconds, PromptBacklog, SentPrompt, UpstreamRates};
use crate::upstream_work::{FollowedRequest, MAX_FOLLOWED};

/// Completion times whose relative difference is at most this count as equal.
const TIE: f64 = 0.02;

/// A slower upstream is measured again if that costs at most this share of the time of the requests since its last one.
const RETRIAL_SHARE: f64 = 0.02;

/// An upstream is not measured again before this many seconds, and requests.
const RETRIAL_SECONDS: f64 = 600.0;
const RETRIAL_REQUESTS: u64 = 50;

/// An upstream that was tried so often without a whole reply is not tried again before [`RETRIAL_REQUESTS`].
const MAX_UNTAUGHT: u32 = 3;

/// One upstream at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct UpstreamView {
    /// Its name, for explanations.
    pub name: String,
    /// The reason why it cannot be sent the request, if there is one.
    pub barred: Option<BarReason>,
    /// Replies that it generates together.
    pub n_slots: u32,
    /// Replies that it generates now.
    pub n_running: u32,
    /// Requests that wait for it.
    pub n_waiting: u32,
    /// Tokens of the prompts of all these that are not computed yet.
    pub n_backlog: u32,
    /// Each of these requests that is known, in the order in which they are done. Empty if they are too many.
    pub open: Vec<FollowedRequest>,
    /// Tokens at the start of this prompt that it has probably cached.
    pub n_held: u32,
    /// The part of `n_held` that is counted on, from 0 to 1.
    pub belief: f64,
    pub rates: UpstreamRates,
    /// Seconds since it was measured. Infinite before.
    pub age: f64,
    /// Requests for this model that went elsewhere since then, or since the last reply that its client left.
    pub n_passed_over: u64,
    /// Replies in a row that began and taught nothing, as their clients left before the end.
    pub n_untaught: u32,
}

impl UpstreamView {
    /// Prompt tokens that it probably need not compute.
    pub fn n_cached(&self, request: &RequestSize) -> u32 {
        let held = (f64::from(self.n_held) * self.belief.clamp(0.0, 1.0)) as u32;
        held.min(request.n_prompt.saturating_sub(1))
    }

    /// Requests that it has, and that wait for it.
    fn n_open(&self) -> u32 {
        self.n_running.saturating_add(self.n_waiting)
    }

    /// The prompts before one with so many tokens to compute. Those of which only the sum is known are taken for as long.
    fn backlog(&self, n_missing: f64) -> PromptBacklog {
        let n_tokens = f64::from(self.n_backlog);
        match self.open.is_empty() {
            false => self.rates.backlog(self.open.iter().map(|open| open.n_missing)),
            true => PromptBacklog { n_tokens, seconds: self.rates.prompt_seconds(n_missing) * n_tokens / n_missing },
        }
    }

    /// Requests of which only the number is known.
    fn n_unknown(&self) -> u32 {
        self.n_open().saturating_sub(u32::try_from(self.open.len()).unwrap_or(u32::MAX))
    }

    /// Returns true if enough is known of its requests to follow a new one behind them.
    fn is_followed(&self) -> bool {
        let is_few = self.n_open() as usize <= MAX_FOLLOWED && self.open.len() <= MAX_FOLLOWED;
        let is_known = self.n_unknown() <= self.n_slots && (self.n_backlog == 0 || !self.open.is_empty());
        is_few && is_known
    }

    fn is_idle(&self) -> bool {
        self.n_open() == 0
    }

    /// Returns true if one more request may show what is not known.
    fn may_be_tried(&self) -> bool {
        self.is_idle() && (self.n_untaught < MAX_UNTAUGHT || self.n_passed_over >= RETRIAL_REQUESTS)
    }

    /// Its load in thousandths.
    fn load(&self) -> u64 {
        u64::from(self.n_open()) * 1_000 / u64::from(self.n_slots.max(1))
    }
}

/// A request, and all upstreams of its model at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct UpstreamSnapshot {
    /// The request's size. Its prompt is estimated by the same rule for all upstreams and requests.
    pub request: RequestSize,
    pub upstreams: Vec<UpstreamView>,
    /// The best route of the model's own nodes, if they can take the request instead.
    pub own: Option<Prediction>,
    /// The request's number: equals take turns.
    pub turn: usize,
}

/// The server that answers a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlannedTarget {
    /// The model's own nodes.
    Own,
    /// The upstream of this index.
    Upstream(usize),
}

/// The server that answers a request, and the reason.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TargetChoice {
    pub target: PlannedTarget,
    pub reason: RouteReason,
    /// The predicted times, if they are known.
    pub prediction: Option<Prediction>,
}

/// The predicted times of each upstream. `None` if it is barred, or nothing was measured for such a prompt.
pub fn predictions(snapshot: &UpstreamSnapshot) -> Vec<Option<Prediction>> {
    let UpstreamSnapshot { request, upstreams, .. } = snapshot;
    upstreams.iter().map(|view| predicted(request, view, view.n_cached(request))).collect()
}

fn predicted(request: &RequestSize, view: &UpstreamView, n_cached: u32) -> Option<Prediction> {
    if view.barred.is_some() {
        return None;
    }
    let rates = &view.rates;
    let n_missing = f64::from(request.n_prompt.saturating_sub(n_cached).max(1));
    let n_others = view.n_open().min(view.n_slots.max(1) - 1);
    let parts = rates.first_token(&SentPrompt { n_missing, n_others, backlog: view.backlog(n_missing) })?;
    let times = if view.is_followed() {
        let work = QueuedWork { n_slots: view.n_slots, rates, open: &view.open, n_unknown: view.n_unknown() };
        let new = NewRequest { prompt_seconds: parts.prefill + parts.beyond, n_output: request.n_output };
        upstream_queue::times(work, new)
    } else {
        crowded_times(request, view, &parts, n_others)
    };
    let refusals = rates.refusal_seconds(view.age);
    let n_steps = (request.n_output - 1.0).max(0.0);
    Some(Prediction {
        queue_ms: ((times.first - parts.prefill - parts.constant).max(0.0) + refusals) * 1e3,
        prefill_ms: parts.prefill * 1e3,
        step_ms: if n_steps > 0.0 { (times.last - times.first) / n_steps } else { rates.step(n_others + 1) } * 1e3,
        ttft_ms: (times.first + refusals) * 1e3,
        completion_ms: (times.last + refusals) * 1e3,
        ..Prediction::default()
    })
}

/// The times behind so many requests that only averages count: streams are half done on average, and end one after another.
/// Meanwhile the prompts that wait are computed.
fn crowded_times(request: &RequestSize, view: &UpstreamView, parts: &FirstTokenSeconds, n_others: u32) -> QueuedTimes {
    let n_slots = view.n_slots.max(1);
    let step = view.rates.step(n_others + 1);
    let stream = request.n_output * step + parts.prefill;
    let n_before = view.n_open().saturating_sub(n_slots - 1);
    let until_slot = stream * (f64::from(n_before) - 0.5).max(0.0) / f64::from(n_slots);
    let first = parts.wait().max(until_slot) + parts.prefill + parts.constant;
    QueuedTimes { first, last: first + (request.n_output - 1.0).max(0.0) * step }
}

/// Chooses who answers; `None` if all are barred.
pub fn choose(snapshot: &UpstreamSnapshot) -> Option<TargetChoice> {
    let predictions = predictions(snapshot);
    let open: Vec<usize> = in_turn(snapshot).filter(|i| snapshot.upstreams[*i].barred.is_none()).collect();
    if open.is_empty() {
        let own = TargetChoice { target: PlannedTarget::Own, reason: RouteReason::OnlyRoute, prediction: snapshot.own };
        return snapshot.own.map(|_| own);
    }
    let at = |i: usize, reason: RouteReason| TargetChoice {
        target: PlannedTarget::Upstream(i),
        reason,
        prediction: predictions[i],
    };
    let is_only = open.len() == 1 && snapshot.own.is_none();
    if is_only {
        let reason = if snapshot.upstreams.len() == 1 { RouteReason::OnlyUpstream } else { RouteReason::OnlyRoute };
        return Some(at(open[0], reason));
    }
    // One request at a time tries what was not measured.
    let untried = open.iter().find(|i| predictions[**i].is_none() && snapshot.upstreams[**i].may_be_tried());
    if let Some(i) = untried {
        return Some(at(*i, RouteReason::RatesUnknown));
    }
    let Some((best, fastest)) = best(snapshot, &open, &predictions) else {
        if let Some(own) = snapshot.own {
            let (target, reason) = (PlannedTarget::Own, RouteReason::LeastTime);
            return Some(TargetChoice { target, reason, prediction: Some(own) });
        }
        let least = open.iter().min_by_key(|i| snapshot.upstreams[**i].load());
        return least.map(|i| at(*i, RouteReason::LeastRunning));
    };
    let own = snapshot.own.filter(|own| !is_worth_leaving(own, &fastest));
    let leader = own.unwrap_or(fastest);
    if let Some(i) = worth_measuring(snapshot, &open, &predictions, &leader) {
        return Some(at(i, RouteReason::Remeasured));
    }
    if let Some(own) = own {
        let (target, reason) = (PlannedTarget::Own, RouteReason::LeastTime);
        return Some(TargetChoice { target, reason, prediction: Some(own) });
    }
    Some(at(
        best,
        if is_for_its_cache(snapshot, &open, best) { RouteReason::PrefixHeld } else { RouteReason::LeastTime },
    ))
}

/// The upstreams' indices, beginning with that whose turn it is.
fn in_turn(snapshot: &UpstreamSnapshot) -> impl Iterator<Item = usize> {
    let (n, turn) = (snapshot.upstreams.len(), snapshot.turn);
    (0..n).map(move |i| (i + turn % n.max(1)) % n)
}

/// Returns true if another one is so much faster that predictions hardly err about it.
fn is_worth_leaving(from: &Prediction, to: &Prediction) -> bool {
    to.completion_ms + worthwhile_gain_ms(from.ttft_ms) < from.completion_ms
}

/// The upstream that is predicted to end first; of equals the one with the most of the prompt in its cache, then the least loaded.
fn best(
    snapshot: &UpstreamSnapshot,
    open: &[usize],
    predictions: &[Option<Prediction>],
) -> Option<(usize, Prediction)> {
    let known = || open.iter().filter_map(|i| Some((*i, predictions[*i]?)));
    let (first, fastest) = known().min_by(|a, b| a.1.completion_ms.total_cmp(&b.1.completion_ms))?;
    let n_cached = |i: usize| snapshot.upstreams[i].n_cached(&snapshot.request);
    // A conversation leaves the upstream that has it for a gain that is worth it.
    let home = known().max_by_key(|(i, _)| n_cached(*i)).filter(|(i, _)| n_cached(*i) > n_cached(first));
    if let Some((home, there)) = home.filter(|(_, there)| !is_worth_leaving(there, &fastest)) {
        return Some((home, there));
    }
    let is_equal = |there: &Prediction| there.completion_ms <= fastest.completion_ms * (1.0 + TIE);
    let equals = known().filter(|(i, there)| is_equal(there) && n_cached(*i) >= n_cached(first));
    equals.min_by_key(|(i, _)| snapshot.upstreams[*i].load())
}

/// The slower upstream that was not measured for longest, if trying it costs little.
fn worth_measuring(
    snapshot: &UpstreamSnapshot,
    open: &[usize],
    predictions: &[Option<Prediction>],
    leader: &Prediction,
) -> Option<usize> {
    let is_worth_it = |i: &usize| {
        let view = &snapshot.upstreams[*i];
        let Some(there) = predictions[*i] else { return false };
        let loss = there.completion_ms - leader.completion_ms;
        let spent = leader.completion_ms * view.n_passed_over as f64;
        let is_old = view.age >= RETRIAL_SECONDS && view.n_passed_over >= RETRIAL_REQUESTS;
        view.is_idle() && is_old && loss > TIE * leader.completion_ms && loss <= RETRIAL_SHARE * spent
    };
    let candidates = open.iter().copied().filter(is_worth_it);
    candidates.max_by(|a, b| snapshot.upstreams[*a].age.total_cmp(&snapshot.upstreams[*b].age))
}

/// Returns true if without caches another one had been chosen.
fn is_for_its_cache(snapshot: &UpstreamSnapshot, open: &[usize], chosen: usize) -> bool {
    if snapshot.upstreams[chosen].n_cached(&snapshot.request) == 0 {
        return false;
    }
    let without = |i: usize| predicted(&snapshot.request, &snapshot.upstreams[i], 0).map(|there| there.completion_ms);
    let own = snapshot.own.map(|own| own.completion_ms);
    let others = open.iter().filter(|i| **i != chosen).filter_map(|i| without(*i)).chain(own);
    without(chosen).zip(others.reduce(f64::min)).is_some_and(|(mine, others)| others < mine)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rates::Curve;
    use crate::upstream_work::RequestStage;

    /// An idle upstream of eight slots.
    fn upstream(name: &str, prefill: f64, decode: f64) -> UpstreamView {
        UpstreamView {
            name: name.into(),
            barred: None,
            n_slots: 8,
            n_running: 0,
            n_waiting: 0,
            n_backlog: 0,
            open: Vec::new(),
            n_held: 0,
            belief: 1.0,
            rates: UpstreamRates {
                constant: 0.05,
                prefill: Curve::constant(prefill),
                decode: Curve::constant(decode),
                ..UpstreamRates::default()
            },
            age: 0.0,
            n_passed_over: 0,
            n_untaught: 0,
        }
    }

    fn two() -> UpstreamSnapshot {
        UpstreamSnapshot {
            request: RequestSize { n_prompt: 4_000, n_replayed: 0, n_output: 100.0 },
            upstreams: vec![upstream("fast", 4_000.0, 50.0), upstream("slow", 1_000.0, 50.0)],
            own: None,
            turn: 0,
        }
    }

    fn chosen(snapshot: &UpstreamSnapshot) -> (PlannedTarget, RouteReason) {
        let choice = choose(snapshot).unwrap();
        (choice.target, choice.reason)
    }

    const FAST: PlannedTarget = PlannedTarget::Upstream(0);
    const SLOW: PlannedTarget = PlannedTarget::Upstream(1);

    #[test]
    fn the_one_that_is_done_first_gets_the_request() {
        let mut snapshot = two();
        assert_eq!(chosen(&snapshot), (FAST, RouteReason::LeastTime));
        snapshot.upstreams[0].n_backlog = 20_000;
        assert_eq!(chosen(&snapshot), (SLOW, RouteReason::LeastTime), "others' prompts count");
        snapshot.upstreams[1].barred = Some(BarReason::Busy);
        assert_eq!(chosen(&snapshot), (FAST, RouteReason::OnlyRoute));
        snapshot.upstreams[0].barred = Some(BarReason::Suspect);
        assert_eq!(choose(&snapshot), None);
        snapshot.upstreams.truncate(1);
        snapshot.upstreams[0].barred = None;
        assert_eq!(chosen(&snapshot), (FAST, RouteReason::OnlyUpstream));
    }

    #[test]
    fn a_cached_conversation_is_saved_time_and_no_rule() {
        let mut snapshot = two();
        snapshot.upstreams[1].n_held = 3_900;
        assert_eq!(chosen(&snapshot), (SLOW, RouteReason::PrefixHeld));
        snapshot.upstreams[1].n_backlog = 3_000;
        assert_eq!(chosen(&snapshot), (FAST, RouteReason::LeastTime), "its queue outweighs its cache");
        snapshot.upstreams[1].n_backlog = 0;
        snapshot.upstreams[1].belief = 0.0;
        assert_eq!(chosen(&snapshot), (FAST, RouteReason::LeastTime), "it did not have what it should have had");
    }

    #[test]
    fn equals_take_turns_and_a_conversation_stays_where_it_is() {
        let mut snapshot = two();
        snapshot.upstreams[1] = upstream("equal", 4_000.0, 50.0);
        assert_eq!(chosen(&snapshot).0, FAST);
        snapshot.turn = 1;
        assert_eq!(chosen(&snapshot).0, SLOW);
        snapshot.upstreams[1].n_running = 1;
        assert_eq!(chosen(&snapshot).0, FAST, "the less loaded one");
        snapshot.upstreams[1].n_held = 16;
        snapshot.turn = 0;
        assert_eq!(chosen(&snapshot).0, SLOW, "four milliseconds are within the error, and it has the conversation");
    }

    #[test]
    fn what_was_not_measured_is_tried_by_one_request_at_a_time() {
        let mut snapshot = two();
        snapshot.upstreams[1].rates = UpstreamRates::default();
        assert_eq!(chosen(&snapshot), (SLOW, RouteReason::RatesUnknown));
        snapshot.upstreams[1].n_running = 1;
        assert_eq!(chosen(&snapshot), (FAST, RouteReason::LeastTime));
        snapshot.upstreams[0].rates = UpstreamRates::default();
        snapshot.upstreams[0].n_running = 2;
        assert_eq!(chosen(&snapshot), (SLOW, RouteReason::LeastRunning), "nothing is known of either");
    }

    #[test]
    fn what_never_ends_a_reply_is_not_tried_by_everyone() {
        let mut snapshot = two();
        snapshot.upstreams[1].rates = UpstreamRates::default();
        snapshot.upstreams[1].n_untaught = 3;
        assert_eq!(chosen(&snapshot), (FAST, RouteReason::LeastTime));
        snapshot.upstreams[1].n_passed_over = 50;
        assert_eq!(chosen(&snapshot), (SLOW, RouteReason::RatesUnknown));
    }

    #[test]
    fn a_slow_one_is_measured_again_when_that_costs_little() {
        let mut snapshot = two();
        // The slow one takes 6 s, the fast one 3 s.
        (snapshot.upstreams[1].age, snapshot.upstreams[1].n_passed_over) = (601.0, 60);
        assert_eq!(chosen(&snapshot), (SLOW, RouteReason::Remeasured));
        for (age, n_passed_over, n_running) in [(599.0, 60, 0), (601.0, 49, 0), (601.0, 60, 1)] {
            let view = &mut snapshot.upstreams[1];
            (view.age, view.n_passed_over, view.n_running) = (age, n_passed_over, n_running);
            assert_eq!(chosen(&snapshot), (FAST, RouteReason::LeastTime), "{age} {n_passed_over} {n_running}");
        }
    }

    #[test]
    fn own_nodes_are_left_for_a_gain_alone() {
        let mut snapshot = two();
        let own = |completion_ms: f64| Some(Prediction { ttft_ms: 1_000.0, completion_ms, ..Prediction::default() });
        snapshot.own = own(3_000.0);
        assert_eq!(chosen(&snapshot), (PlannedTarget::Own, RouteReason::LeastTime));
        // The fast one takes 3,030 ms.
        snapshot.own = own(3_045.0);
        assert_eq!(chosen(&snapshot).0, PlannedTarget::Own, "by 2 % of its time to first token");
        snapshot.own = own(3_060.0);
        assert_eq!(chosen(&snapshot), (FAST, RouteReason::LeastTime));
        snapshot.upstreams.iter_mut().for_each(|view| view.barred = Some(BarReason::Suspect));
        assert_eq!(chosen(&snapshot), (PlannedTarget::Own, RouteReason::OnlyRoute));
    }

    #[test]
    fn requests_that_arrive_together_spread_over_the_slots_before_anything_is_measured_of_them() {
        let mut snapshot = two();
        snapshot.request = RequestSize { n_prompt: 10, n_replayed: 0, n_output: 100.0 };
        // 2 s and 2.5 s for a reply.
        snapshot.upstreams[1] = upstream("slow", 4_000.0, 40.0);
        snapshot.upstreams.iter_mut().for_each(|view| view.n_slots = 2);
        let order = (0..8).map(|_| {
            let PlannedTarget::Upstream(i) = chosen(&snapshot).0 else { panic!("no own nodes") };
            let view = &mut snapshot.upstreams[i];
            view.n_waiting += 1;
            view.n_backlog += 10;
            view.open.push(FollowedRequest { n_missing: 10.0, n_output: 100.0, stage: RequestStage::Waiting });
            i
        });
        // The fifth waits 2 s for a slot of the fast one, the seventh 2.5 s for one of the slow one.
        assert_eq!(order.collect::<Vec<usize>>(), [0, 0, 1, 1, 0, 0, 1, 1]);
    }

    #[test]
    fn a_full_upstream_costs_the_wait_for_a_slot() {
        let mut snapshot = two();
        (snapshot.upstreams[0].n_running, snapshot.upstreams[0].n_waiting) = (8, 16);
        let [fast, slow] = predictions(&snapshot)[..] else { panic!("two upstreams") };
        assert!((fast.unwrap().queue_ms - 3_000.0 * 16.5 / 8.0).abs() < 1e-6, "{fast:?}");
        assert_eq!(slow.unwrap().queue_ms, 0.0);
        assert_eq!(chosen(&snapshot).0, SLOW);
    }

    proptest::proptest! {
        #[test]
        fn a_larger_cache_never_makes_an_upstream_less_wanted(
            held in 0u32..4_000, more in 0u32..4_000, backlog in 0u32..9_000, prefill in 10f64..10_000.0,
        ) {
            let mut snapshot = two();
            snapshot.upstreams[1].rates.prefill = Curve::constant(prefill);
            (snapshot.upstreams[1].n_held, snapshot.upstreams[1].n_backlog) = (held, backlog);
            let before = chosen(&snapshot).0;
            snapshot.upstreams[1].n_held = held + more;
            let after = chosen(&snapshot).0;
            proptest::prop_assert!(before != SLOW || after == SLOW);
        }
    }
}

//! The default: chooses the route that is predicted to complete first.

use super::{Policy, PolicyName, RouteChoice, completion, load, open, why_direct};
use crate::cost::{RouteCandidate, worthwhile_gain_ms};
use crate::reason::{RouteKind, RouteReason};
use crate::snapshot::Snapshot;

/// Completion times whose relative difference is at most this count as equal; the time to first token then decides.
const TIE: f64 = 0.01;

#[derive(Debug)]
pub(super) struct Fastest;

impl Policy for Fastest {
    fn name(&self) -> PolicyName {
        PolicyName::Fastest
    }

    fn choose(&self, snapshot: &Snapshot, candidates: &[RouteCandidate]) -> Option<RouteChoice> {
        let best = |kind: RouteKind| best(snapshot, candidates, kind);
        // Without a usable decode node there is no handoff, either.
        let (direct, directly) = best(RouteKind::Direct)?;
        let handoff = best(RouteKind::Handoff).filter(|(_, c)| c.prediction.is_some());
        let pays = |handed_over: &RouteCandidate| {
            completion(handed_over) + worthwhile_gain_ms(ttft(directly)) < completion(directly)
        };
        if let Some((candidate, _)) = handoff.filter(|(_, c)| directly.prediction.is_some() && pays(c)) {
            return Some(RouteChoice { candidate, reason: RouteReason::Faster });
        }
        let could_pay = |c: &RouteCandidate| c.prediction.is_none() || directly.prediction.is_none();
        let unknown = open(candidates).any(|(_, c)| c.route.kind() == RouteKind::Handoff && could_pay(c));
        let reason = match (unknown, handoff) {
            (true, _) => RouteReason::RatesUnknown,
            (false, Some(_)) => RouteReason::NotWorthIt,
            (false, None) => why_direct(candidates),
        };
        Some(RouteChoice { candidate: direct, reason })
    }
}

fn ttft(candidate: &RouteCandidate) -> f64 {
    candidate.prediction.map_or(f64::INFINITY, |prediction| prediction.ttft_ms)
}

/// The route of this kind that is predicted to complete first. Equal machines differ by the error of predictions, and would be
/// filled one after the other: of routes that are as good as equal, the least loaded is chosen, also where nothing is predicted.
fn best<'a>(
    snapshot: &Snapshot,
    candidates: &'a [RouteCandidate],
    kind: RouteKind,
) -> Option<(usize, &'a RouteCandidate)> {
    let of_kind = || open(candidates).filter(move |(_, c)| c.route.kind() == kind);
    let least = |time: fn(&RouteCandidate) -> f64, most_ms: f64| {
        let times = of_kind().filter(move |(_, c)| completion(c) <= most_ms).map(move |(_, c)| time(c));
        times.min_by(f64::total_cmp)
    };
    let most_ms = least(completion, f64::INFINITY)? * (1.0 + TIE);
    let least_ttft = least(ttft, most_ms)?;
    let most_ttft = least_ttft + worthwhile_gain_ms(least_ttft);
    let equal = of_kind().filter(|(_, c)| completion(c) <= most_ms && ttft(c) <= most_ttft);
    equal.min_by(|(_, a), (_, b)| {
        let by_load = load(snapshot, a).cmp(&load(snapshot, b));
        by_load.then(ttft(a).total_cmp(&ttft(b))).then(completion(a).total_cmp(&completion(b)))
    })
}

//! The default: chooses the route that is predicted to complete first.

use super::{Policy, PolicyName, RouteChoice, completion, open, why_direct};
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

    fn choose(&self, _: &Snapshot, candidates: &[RouteCandidate]) -> Option<RouteChoice> {
        let best = |kind: RouteKind| {
            open(candidates).filter(move |(_, c)| c.route.kind() == kind).min_by(|a, b| order(a.1, b.1))
        };
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

fn order(a: &RouteCandidate, b: &RouteCandidate) -> std::cmp::Ordering {
    let first = completion(a);
    let second = completion(b);
    if (first - second).abs() <= TIE * first.min(second) {
        return ttft(a).total_cmp(&ttft(b));
    }
    first.total_cmp(&second)
}

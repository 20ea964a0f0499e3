//! The default: the route that is predicted to complete first.

use super::{Policy, PolicyName, RouteChoice, completion, open, why_direct};
use crate::cost::Candidate;
use crate::reason::RouteReason;
use crate::snapshot::Snapshot;

/// Completions this close count as equal, and the first token decides.
const TIE: f64 = 0.01;

/// A handoff has to complete earlier than direct generation by this share of the latter's time to first token:
/// predictions err, and a handoff that does not pay is worse than none. Not a share of the completion: a long reply
/// takes its time on either route, and would hide a first token that comes in half the time.
const MARGIN: f64 = 0.02;

/// And by this much, in milliseconds: less is within what a prediction of a few milliseconds can err by.
const MIN_GAIN_MS: f64 = 5.0;

/// See the module.
#[derive(Debug)]
pub(super) struct Fastest;

impl Policy for Fastest {
    fn name(&self) -> PolicyName {
        PolicyName::Fastest
    }

    fn choose(&self, _: &Snapshot, candidates: &[Candidate]) -> Option<RouteChoice> {
        let best = |handoff: bool| {
            open(candidates).filter(move |(_, c)| c.route.prefill.is_some() == handoff).min_by(|a, b| order(a.1, b.1))
        };
        let Some((direct, directly)) = best(false) else {
            // Handoffs end on decode nodes, so there are none either.
            return None;
        };
        let Some((handoff, handed_over)) = best(true).filter(|(_, c)| c.prediction.is_some()) else {
            let unknown = open(candidates).any(|(_, c)| c.route.prefill.is_some() && c.prediction.is_none());
            let reason = if unknown { RouteReason::RatesUnknown } else { why_direct(candidates) };
            return Some(RouteChoice { candidate: direct, reason });
        };
        let margin = (MARGIN * ttft(directly)).max(MIN_GAIN_MS);
        let pays = completion(handed_over) + margin < completion(directly);
        Some(match pays {
            true => RouteChoice { candidate: handoff, reason: RouteReason::Faster },
            false => RouteChoice { candidate: direct, reason: RouteReason::NotWorthIt },
        })
    }
}

fn ttft(candidate: &Candidate) -> f64 {
    candidate.prediction.map_or(f64::INFINITY, |prediction| prediction.ttft_ms)
}

fn order(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    let (first, second) = (completion(a), completion(b));
    if (first - second).abs() <= TIE * first.min(second) {
        return ttft(a).total_cmp(&ttft(b));
    }
    first.total_cmp(&second)
}

//! The default: the route that is predicted to complete first.

use super::{Choice, Policy, completion, open, why_direct};
use crate::plan::cost::Candidate;
use crate::plan::snapshot::Snapshot;

/// Completions this close count as equal, and the first token decides.
const TIE: f64 = 0.01;

/// A handoff has to be better than direct generation by this much: predictions err, and a handoff that does not pay is
/// worse than none.
const MARGIN: f64 = 0.02;

/// See the module.
#[derive(Debug)]
pub(super) struct Fastest;

impl Policy for Fastest {
    fn name(&self) -> &'static str {
        "fastest"
    }

    fn choose(&self, _: &Snapshot, candidates: &[Candidate]) -> Option<Choice> {
        let best = |handoff: bool| {
            open(candidates).filter(move |(_, c)| c.route.prefill.is_some() == handoff).min_by(|a, b| order(a.1, b.1))
        };
        let Some((direct, directly)) = best(false) else {
            // Handoffs end on decode nodes, so there are none either.
            return None;
        };
        let Some((handoff, handed_over)) = best(true).filter(|(_, c)| c.prediction.is_some()) else {
            let unknown = open(candidates).any(|(_, c)| c.route.prefill.is_some() && c.prediction.is_none());
            let reason = if unknown { "rates_unknown" } else { why_direct(candidates) };
            return Some(Choice { candidate: direct, reason });
        };
        let pays = completion(handed_over) < completion(directly) * (1.0 - MARGIN);
        Some(match pays {
            true => Choice { candidate: handoff, reason: "faster" },
            false => Choice { candidate: direct, reason: "not_worth_it" },
        })
    }
}

fn order(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    let (first, second) = (completion(a), completion(b));
    if (first - second).abs() <= TIE * first.min(second) {
        let ttft = |c: &Candidate| c.prediction.map_or(f64::INFINITY, |p| p.ttft_ms);
        return ttft(a).total_cmp(&ttft(b));
    }
    first.total_cmp(&second)
}

//! Every prompt is computed on a prefill node, if one can. For comparison, and for owners who want the decode node
//! left alone.

use super::{Policy, PolicyName, RouteChoice, completion, open, why_direct};
use crate::cost::Candidate;
use crate::reason::RouteReason;
use crate::snapshot::Snapshot;

/// See the module.
#[derive(Debug)]
pub(super) struct AlwaysHandoff;

impl Policy for AlwaysHandoff {
    fn name(&self) -> PolicyName {
        PolicyName::AlwaysHandoff
    }

    fn choose(&self, _: &Snapshot, candidates: &[Candidate]) -> Option<RouteChoice> {
        let best = |handoff: bool| {
            let those = open(candidates).filter(|(_, c)| c.route.prefill.is_some() == handoff);
            those.min_by(|a, b| completion(a.1).total_cmp(&completion(b.1))).map(|(candidate, _)| candidate)
        };
        let handoff = best(true).map(|candidate| RouteChoice { candidate, reason: RouteReason::Policy });
        handoff.or_else(|| Some(RouteChoice { candidate: best(false)?, reason: why_direct(candidates) }))
    }
}

//! Every prompt is computed on a prefill node, if one can. For comparison, and for owners who want the decode node
//! left alone.

use super::{Choice, Policy, completion, open, why_direct};
use crate::cost::Candidate;
use crate::snapshot::Snapshot;

/// See the module.
#[derive(Debug)]
pub(super) struct AlwaysHandoff;

impl Policy for AlwaysHandoff {
    fn name(&self) -> &'static str {
        "always_handoff"
    }

    fn choose(&self, _: &Snapshot, candidates: &[Candidate]) -> Option<Choice> {
        let best = |handoff: bool| {
            let those = open(candidates).filter(|(_, c)| c.route.prefill.is_some() == handoff);
            those.min_by(|a, b| completion(a.1).total_cmp(&completion(b.1))).map(|(candidate, _)| candidate)
        };
        let handoff = best(true).map(|candidate| Choice { candidate, reason: "policy" });
        handoff.or_else(|| Some(Choice { candidate: best(false)?, reason: why_direct(candidates) }))
    }
}

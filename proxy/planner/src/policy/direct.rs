//! No handoffs: the decode node that is predicted to complete first does everything.

use super::{Policy, PolicyName, RouteChoice, completion, open};
use crate::cost::Candidate;
use crate::reason::RouteReason;
use crate::snapshot::Snapshot;

/// See the module.
#[derive(Debug)]
pub(super) struct Direct;

impl Policy for Direct {
    fn name(&self) -> PolicyName {
        PolicyName::Direct
    }

    fn choose(&self, _: &Snapshot, candidates: &[Candidate]) -> Option<RouteChoice> {
        let direct = open(candidates).filter(|(_, c)| c.route.prefill.is_none());
        let best = direct.min_by(|a, b| completion(a.1).total_cmp(&completion(b.1)));
        best.map(|(candidate, _)| RouteChoice { candidate, reason: RouteReason::Policy })
    }
}

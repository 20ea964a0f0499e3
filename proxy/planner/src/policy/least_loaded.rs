//! Sends each part of a request to the least loaded node, and hands over if a prefill node is free. It needs no rates,
//! and suits pools of equal machines.

use super::{Policy, PolicyName, RouteChoice, load, open};
use crate::cost::RouteCandidate;
use crate::reason::RouteReason;
use crate::snapshot::Snapshot;

#[derive(Debug)]
pub(super) struct LeastLoaded;

impl Policy for LeastLoaded {
    fn name(&self) -> PolicyName {
        PolicyName::LeastLoaded
    }

    fn choose(&self, snapshot: &Snapshot, candidates: &[RouteCandidate]) -> Option<RouteChoice> {
        let best = open(candidates).min_by_key(|(_, c)| load(snapshot, c));
        best.map(|(candidate, _)| RouteChoice { candidate, reason: RouteReason::Policy })
    }
}

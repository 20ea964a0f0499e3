//! Takes turns among handoffs, or among decode nodes if no handoff is possible. A baseline that measures nothing.

use super::{Policy, PolicyName, RouteChoice, open};
use crate::cost::RouteCandidate;
use crate::reason::{RouteKind, RouteReason};
use crate::snapshot::Snapshot;

#[derive(Debug)]
pub(super) struct RoundRobin;

impl Policy for RoundRobin {
    fn name(&self) -> PolicyName {
        PolicyName::RoundRobin
    }

    fn choose(&self, snapshot: &Snapshot, candidates: &[RouteCandidate]) -> Option<RouteChoice> {
        let of_kind = |kind: RouteKind| -> Vec<usize> {
            open(candidates).filter(|(_, c)| c.route.kind() == kind).map(|(i, _)| i).collect()
        };
        let handoffs = of_kind(RouteKind::Handoff);
        let routes = if handoffs.is_empty() { of_kind(RouteKind::Direct) } else { handoffs };
        let n = u64::try_from(routes.len()).ok().filter(|&n| n > 0)?;
        Some(RouteChoice { candidate: routes[(snapshot.turn % n) as usize], reason: RouteReason::Policy })
    }
}

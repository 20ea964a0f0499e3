//! Takes turns among handoffs, or among decode nodes where there is no prefill node. Knows nothing and measures
//! nothing: a baseline.

use super::{Policy, PolicyName, RouteChoice, open};
use crate::cost::Candidate;
use crate::reason::RouteReason;
use crate::snapshot::Snapshot;

/// See the module.
#[derive(Debug)]
pub(super) struct RoundRobin;

impl Policy for RoundRobin {
    fn name(&self) -> PolicyName {
        PolicyName::RoundRobin
    }

    fn choose(&self, snapshot: &Snapshot, candidates: &[Candidate]) -> Option<RouteChoice> {
        let places = |handoff: bool| -> Vec<usize> {
            open(candidates).filter(|(_, c)| c.route.prefill.is_some() == handoff).map(|(i, _)| i).collect()
        };
        let handoffs = places(true);
        let those = if handoffs.is_empty() { places(false) } else { handoffs };
        let n = u64::try_from(those.len()).ok().filter(|&n| n > 0)?;
        Some(RouteChoice { candidate: those[(snapshot.turn % n) as usize], reason: RouteReason::Policy })
    }
}

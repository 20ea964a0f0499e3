//! Hands over every prompt if a handoff is possible. For comparisons, and for operators who want to keep prompts away
//! from the decode nodes.

use super::{Policy, PolicyName, RouteChoice, first_to_complete, why_direct};
use crate::cost::RouteCandidate;
use crate::reason::{RouteKind, RouteReason};
use crate::snapshot::Snapshot;

#[derive(Debug)]
pub(super) struct AlwaysHandoff;

impl Policy for AlwaysHandoff {
    fn name(&self) -> PolicyName {
        PolicyName::AlwaysHandoff
    }

    fn choose(&self, _: &Snapshot, candidates: &[RouteCandidate]) -> Option<RouteChoice> {
        if let Some(candidate) = first_to_complete(candidates, RouteKind::Handoff) {
            return Some(RouteChoice { candidate, reason: RouteReason::Policy });
        }
        let candidate = first_to_complete(candidates, RouteKind::Direct)?;
        Some(RouteChoice { candidate, reason: why_direct(candidates) })
    }
}

//! Never hands over: chooses the decode node that is predicted to complete first.

use super::{Policy, PolicyName, RouteChoice, first_to_complete};
use crate::cost::RouteCandidate;
use crate::reason::{RouteKind, RouteReason};
use crate::snapshot::Snapshot;

#[derive(Debug)]
pub(super) struct Direct;

impl Policy for Direct {
    fn name(&self) -> PolicyName {
        PolicyName::Direct
    }

    fn choose(&self, _: &Snapshot, candidates: &[RouteCandidate]) -> Option<RouteChoice> {
        let candidate = first_to_complete(candidates, RouteKind::Direct)?;
        Some(RouteChoice { candidate, reason: RouteReason::Policy })
    }
}

//! No handoffs: the decode node that is predicted to complete first does everything.

use super::{Choice, Policy, completion, open};
use crate::cost::Candidate;
use crate::snapshot::Snapshot;

/// See the module.
#[derive(Debug)]
pub(super) struct Direct;

impl Policy for Direct {
    fn name(&self) -> &'static str {
        "direct"
    }

    fn choose(&self, _: &Snapshot, candidates: &[Candidate]) -> Option<Choice> {
        let direct = open(candidates).filter(|(_, c)| c.route.prefill.is_none());
        let best = direct.min_by(|a, b| completion(a.1).total_cmp(&completion(b.1)));
        best.map(|(candidate, _)| Choice { candidate, reason: "policy" })
    }
}

//! Each part of a request goes to the node with the least to do, handed over where a prefill node is free. Needs no
//! rates: for pools of equal machines.

use super::{Policy, PolicyName, RouteChoice, open};
use crate::cost::Candidate;
use crate::reason::RouteReason;
use crate::snapshot::{NodeView, Snapshot};

/// See the module.
#[derive(Debug)]
pub(super) struct LeastLoaded;

impl Policy for LeastLoaded {
    fn name(&self) -> PolicyName {
        PolicyName::LeastLoaded
    }

    fn choose(&self, snapshot: &Snapshot, candidates: &[Candidate]) -> Option<RouteChoice> {
        let load = |c: &Candidate| {
            let prefill = c.route.prefill.map(|p| &snapshot.prefill[p]);
            // Without a prefill node the decode node computes the prompt beside its streams.
            let prompts = prefill.unwrap_or(&snapshot.decode[c.route.decode]).n_backlog;
            (streams(&snapshot.decode[c.route.decode]), prompts, prefill.is_none())
        };
        let best = open(candidates).min_by_key(|(_, c)| load(c));
        best.map(|(candidate, _)| RouteChoice { candidate, reason: RouteReason::Policy })
    }
}

fn streams(node: &NodeView) -> u32 {
    node.n_active + node.n_queued
}

//! Sends each part of a request to the least loaded node, and hands over if a prefill node is free. It needs no rates,
//! and suits pools of equal machines.

use super::{Policy, PolicyName, RouteChoice, open};
use crate::cost::RouteCandidate;
use crate::reason::RouteReason;
use crate::snapshot::{NodeView, Snapshot};

#[derive(Debug)]
pub(super) struct LeastLoaded;

impl Policy for LeastLoaded {
    fn name(&self) -> PolicyName {
        PolicyName::LeastLoaded
    }

    fn choose(&self, snapshot: &Snapshot, candidates: &[RouteCandidate]) -> Option<RouteChoice> {
        let load = |c: &RouteCandidate| {
            let prefill = c.route.prefill.map(|p| &snapshot.prefill[p]);
            // Without a prefill node, the decode node computes the prompt while its streams run.
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

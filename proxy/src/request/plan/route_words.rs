//! The words of `x-baton-route`: the kind of the route, then `key=value` pairs.

use std::{fmt, iter};

use baton_planner::cost::Prediction;
use baton_planner::reason::{RouteKind, RouteReason};
use baton_schemas::handoff::HandoffFailure;
use baton_schemas::sequence::CachedTokens;

use super::Plan;

/// Describes a request that an upstream answers.
pub fn of_upstream(upstream: &str, reason: RouteReason, prediction: Option<&Prediction>) -> String {
    let ttft = prediction.map(|prediction| format!("; ttft_ms={:.0}", prediction.ttft_ms)).unwrap_or_default();
    format!("{}; upstream={upstream}; reason={reason}{ttft}", RouteKind::Upstream.as_str())
}

/// Describes a route that has started with what was `cached`. If its handoff failed, the decode node computes the rest of the
/// prompt.
pub fn after_start(plan: &Plan, cached: CachedTokens, failure: Option<HandoffFailure>) -> String {
    let restored = [("memory", cached.memory), ("disk", cached.disk)].into_iter().filter(|(_, n)| *n > 0);
    let restored = restored.map(|(tier, n)| format!("; {tier}={n}"));
    let failure = failure.map(|failure| format!("; failure={}", failure.as_str()));
    iter::once(plan.to_string()).chain(restored).chain(failure).collect()
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.route.kind().as_str();
        match self.prefill() {
            None => write!(f, "{kind}; decode={}", self.decode().name)?,
            Some(prefill) => write!(f, "{kind}; prefill={}; decode={}", prefill.name, self.decode().name)?,
        }
        write!(f, "; policy={}; reason={}", self.policy, self.reason)?;
        if let Some(prediction) = &self.prediction {
            write!(f, "; ttft_ms={:.0}", prediction.ttft_ms)?;
        }
        if let Some(direct) = self.direct_ttft_ms.filter(|_| self.route.prefill.is_some()) {
            write!(f, "; direct_ttft_ms={direct:.0}")?;
        }
        let prefill = self.prefill().filter(|_| self.woken.prefill);
        let decode = Some(self.decode()).filter(|_| self.woken.decode);
        prefill.into_iter().chain(decode).try_for_each(|node| write!(f, "; woken={}", node.name))
    }
}

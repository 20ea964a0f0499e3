//! The words of `x-baton-route`: the kind of the route, then `key=value` pairs.

use std::fmt;

use baton_planner::reason::{RouteKind, RouteReason};
use baton_schemas::handoff::HandoffFailure;

use super::Plan;

/// Describes a request that an upstream answers.
pub fn of_upstream(upstream: &str, reason: RouteReason) -> String {
    format!("{}; upstream={upstream}; reason={reason}", RouteKind::Upstream.as_str())
}

/// Describes a route whose handoff failed, so that the decode node computes the rest of the prompt.
pub fn after_failed_handoff(plan: &Plan, failure: HandoffFailure) -> String {
    format!("{plan}; failure={}", failure.as_str())
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
        match self.direct_ttft_ms {
            Some(direct) if self.route.prefill.is_some() => write!(f, "; direct_ttft_ms={direct:.0}"),
            _ => Ok(()),
        }
    }
}

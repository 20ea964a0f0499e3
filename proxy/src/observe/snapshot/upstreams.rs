//! Servers that are asked in text.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::counts::{BreakerReport, FallbackState, breaker, fallbacks};
use crate::targets::nodes::Life;
use crate::targets::upstreams::{self, Member};

/// An upstream.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct UpstreamState {
    /// As in `x-baton-route`.
    pub name: String,
    /// Which server program it is.
    pub kind: String,
    /// The state of the server, as its list of models shows.
    pub life: Life,
    /// Why it does not answer, in one word.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Its URL; only for operators.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The models that it serves here, by their public names.
    pub models: Vec<String>,
    /// Replies that it generates.
    pub running: u32,
    /// Replies that wait for a place.
    pub waiting: u32,
    /// Replies at once at most.
    pub limit: u32,
    /// The longest time for which a model of the server still gets no requests because it was busy, milliseconds; 0: none.
    pub busy_ms: u64,
    /// What keeps requests away from it.
    pub breaker: BreakerReport,
    /// How often its prefill servers could not be used, by reason.
    pub fallbacks: BTreeMap<String, FallbackState>,
}

pub(super) fn report(member: &Member, with_address: bool) -> UpstreamState {
    let settings = member.client.settings();
    let (life, reason) = match member.life() {
        upstreams::Life::Unknown => (Life::Starting, None),
        upstreams::Life::Answers => (Life::Ready, None),
        upstreams::Life::Silent { reason } => (Life::Down, Some(reason.to_owned())),
    };
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let running = member.n_running();
    UpstreamState {
        name: settings.name.clone(),
        kind: settings.kind.as_str().to_owned(),
        life,
        reason,
        address: with_address.then(|| settings.url.clone()),
        models: member.models(),
        running: count(running),
        waiting: count(member.n_claimed().saturating_sub(running)),
        limit: count(settings.max_concurrent),
        busy_ms: member.longest_busy().map_or(0, |left| left.as_millis() as u64),
        breaker: breaker(member.breaker.view(), |reason| reason),
        fallbacks: fallbacks(&member.fallbacks, |reason| reason),
    }
}

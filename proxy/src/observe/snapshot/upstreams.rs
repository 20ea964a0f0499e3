//! Upstreams: other servers that answer requests.

use std::collections::BTreeMap;

use baton_planner::upstream_learning::LearnedUpstream;
use baton_upstream::{PrefillFailure, UpstreamFailure};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::counts::{BreakerReport, FallbackState, breaker, fallbacks};
use super::nodes::{RatePoint, points};
use crate::targets::nodes::NodeState;
use crate::targets::upstreams::{PrefillFallback, PrefillServer, PrefillTotals, UpstreamHealth, UpstreamServer};

/// An upstream.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "UpstreamState")]
pub struct UpstreamReport {
    /// As in `x-baton-route`.
    pub name: String,
    /// The kind of server.
    pub kind: String,
    /// It was found; no configuration names it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub adopted: bool,
    /// The state of the server, as its list of models shows.
    #[serde(rename = "life")]
    pub state: NodeState,
    /// The reason why it does not answer, in one word.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Its URL; only for operators.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The models that it serves here, by their public names.
    pub models: Vec<String>,
    /// What its latest replies have shown of these, by which requests are planned.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub measured: Vec<MeasuredModelReport>,
    /// Replies that it generates.
    pub running: u32,
    /// Replies that wait for a place.
    pub waiting: u32,
    /// The most replies at once.
    pub limit: u32,
    /// The longest time for which a model of the server still gets no requests because it was busy, milliseconds; 0: none.
    pub busy_ms: u64,
    /// Replies that it ended for a reason that Baton does not know.
    #[serde(default)]
    pub unknown_ends: u64,
    /// Keeps requests away from it while it fails.
    pub breaker: BreakerReport,
    /// How often its prefill servers could not be used, by reason.
    pub fallbacks: BTreeMap<String, FallbackState>,
    /// The servers that compute prompts for it, in the order of the configuration.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub prefill: Vec<PrefillServerReport>,
}

/// The measured times and cache of one model of an upstream.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "MeasuredModelState")]
pub struct MeasuredModelReport {
    /// Its public name.
    pub model: String,
    /// Replies that have ended.
    pub replies: u32,
    /// The time to the first token of a prompt with nothing to compute, milliseconds; 0 until measured.
    pub constant_ms: f64,
    /// Prompt tokens per second, measured with about these numbers of tokens to compute.
    pub prefill_rates: Vec<RatePoint>,
    /// Tokens per second of one reply, measured with about these numbers of replies.
    pub decode_rates: Vec<RatePoint>,
    /// The share of what it should have cached that it had cached, from 0 to 1, the latest counting most.
    pub cache_belief: f64,
    /// The share of requests that it refused or failed before their first token, from 0 to 1, the latest counting most.
    pub refused_share: f64,
}

/// A server that computes prompts for an upstream.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "PrefillServerState")]
pub struct PrefillServerReport {
    /// `prefill-1` is the first one in the configuration.
    pub name: String,
    /// Its URL; only for operators.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Keeps prompts away from it while it fails, or while the upstream cannot use its KV.
    pub breaker: BreakerReport,
    /// Prompts that it computed.
    pub prompts: u64,
    /// The seconds that it took for them.
    pub prompt_seconds: f64,
    /// Tokens of prompts that came by transfer, at most, of complete replies and as far as the servers report them.
    pub transferred_tokens: u64,
}

pub(super) fn report(server: &UpstreamServer, with_address: bool) -> UpstreamReport {
    let settings = server.client.settings();
    let (state, reason) = match server.health() {
        UpstreamHealth::Unknown => (NodeState::Starting, None),
        UpstreamHealth::Answering => (NodeState::Ready, None),
        UpstreamHealth::Silent { failure } => (NodeState::Down, Some(failure.as_str().to_owned())),
    };
    let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    UpstreamReport {
        name: settings.name.clone(),
        kind: settings.kind.as_str().to_owned(),
        adopted: settings.is_adopted,
        state,
        reason,
        address: with_address.then(|| settings.url.clone()),
        models: server.models(),
        measured: server.measured_models().into_iter().map(|(model, learned)| measured(model, &learned)).collect(),
        running: count(server.places.n_taken()),
        waiting: count(server.places.n_wanted()),
        limit: count(settings.max_concurrent),
        busy_ms: server.longest_busy().map_or(0, |left| left.as_millis() as u64),
        unknown_ends: server.reports.n_unknown_ends(),
        breaker: breaker(server.breaker.view(), UpstreamFailure::as_str),
        fallbacks: fallbacks(&server.prefill.fallbacks, PrefillFallback::as_str),
        prefill: (server.prefill.servers.iter().zip(&settings.prefill))
            .map(|(server, url)| prefill_server(server, with_address.then(|| url.clone())))
            .collect(),
    }
}

fn measured(model: String, learned: &LearnedUpstream) -> MeasuredModelReport {
    let rates = &learned.rates;
    MeasuredModelReport {
        model,
        replies: rates.n_replies,
        constant_ms: rates.constant_seconds() * 1e3,
        prefill_rates: points(&rates.prefill),
        decode_rates: points(&rates.decode),
        cache_belief: learned.belief(),
        refused_share: rates.refused_share,
    }
}

fn prefill_server(server: &PrefillServer, address: Option<String>) -> PrefillServerReport {
    let PrefillTotals { n_prompts, time, n_transferred } = server.totals();
    PrefillServerReport {
        name: server.name.clone(),
        address,
        breaker: breaker(server.breaker.view(), PrefillFailure::as_str),
        prompts: n_prompts,
        prompt_seconds: time.as_secs_f64(),
        transferred_tokens: n_transferred,
    }
}

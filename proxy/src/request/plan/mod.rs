//! Chooses the nodes that serve a request.
//!
//! `snapshot` describes the nodes at one moment, `cost` predicts the time of every route from it, and a `policy`
//! chooses. Those are pure; this module connects them to the nodes.

mod estimated;
pub mod explanation;
mod node_views;
mod plan_request;
pub mod route_words;

use std::sync::Arc;
use std::time::Duration;

use baton_link::trace;
use baton_planner::cost::{Prediction, Route, RouteCandidate, candidates, n_cached, n_promised};
use baton_planner::policy::{Policy, PolicyName, RouteChoice};
use baton_planner::reason::RouteReason;
use baton_planner::snapshot::{NodeView, Snapshot};
use baton_schemas::SequenceRequest;
use baton_schemas::handoff::KvSource;

pub use self::estimated::estimated;
use self::node_views::snapshot;
pub use self::plan_request::PlanRequest;
use crate::error::RequestError;
use crate::observe::{DirectPrediction, PlannedRoute};
use crate::targets::models::ServedModel;
use crate::targets::nodes::{Node, NodeClaim, Task};

/// Fewer computed tokens measure the launch and not the rate. Also the difference between planned and computed tokens of a
/// short prompt that is no other work: the last token is decoded.
const MIN_COMPUTED: u32 = 16;

/// The chosen route of a request, with its reason.
#[derive(Clone)]
pub struct Plan {
    pub model: Arc<ServedModel>,
    /// Indices of the chosen nodes.
    pub route: Route,
    /// The predicted times; `None` if no rates were known.
    pub prediction: Option<Prediction>,
    pub reason: RouteReason,
    /// The policy that decided.
    pub policy: PolicyName,
    /// The policy that the request asked for, if any.
    pub asked_policy: Option<&'static dyn Policy>,
    /// The predicted time to first token of direct generation on the best decode node, in ms.
    pub direct_ttft_ms: Option<f64>,
    /// The predicted times of direct generation on this plan's decode node.
    alone: Option<Prediction>,
    /// The decode node that alone is predicted to be done first, and its times.
    best_direct: Option<(usize, Prediction)>,
    /// Prompt tokens that are not cached on the node that computes the prompt.
    n_missing: u32,
    pub promised: PromisedTokens,
    /// Which of its nodes were woken for the request.
    pub woken: WokenNodes,
    /// Choices of the request that start with this one, before it.
    pub n_before: u32,
}

/// Which nodes of a plan were woken for the request.
#[derive(Debug, Clone, Copy, Default)]
pub struct WokenNodes {
    pub decode: bool,
    pub prefill: bool,
}

/// Prompt tokens that the nodes of a plan say they hold.
#[derive(Debug, Clone, Copy, Default)]
pub struct PromisedTokens {
    pub decode: u32,
    /// 0 without a prefill node.
    pub prefill: u32,
}

/// The basis of a plan, for explanations.
pub struct Explained {
    /// The snapshot of the nodes.
    pub snapshot: Snapshot,
    /// Every route with its prediction.
    pub candidates: Vec<RouteCandidate>,
    pub policy: PolicyName,
    /// The policy's choice: the index of the candidate, and the reason.
    pub choice: Option<RouteChoice>,
}

/// Shows what would become of a request now, without reserving anything.
pub fn explain(model: &ServedModel, request: &PlanRequest<'_>) -> Explained {
    choose(model, request, model.routes.turn()).carried_out()
}

/// Returns true if nothing of a prompt is left to hand over: the decode node holds all tokens that are prefilled.
pub fn is_whole(n_cached: u32, n_prefill: usize) -> bool {
    n_cached as usize >= n_prefill
}

impl Explained {
    /// The choice as the nodes carry it out: a decode node that holds the whole prompt pulls nothing (see
    /// [`Plan::cached`]).
    fn carried_out(mut self) -> Explained {
        let Explained { snapshot, candidates, choice, .. } = &self;
        let cached = choice.and_then(|choice| {
            let Route { decode, prefill } = candidates[choice.candidate].route;
            let cached = n_cached(&snapshot.request, &snapshot.decode[decode]);
            prefill.filter(|_| is_whole(cached, snapshot.request.n_prefill() as usize))?;
            let direct = candidates.iter().position(|c| c.route == Route { decode, prefill: None })?;
            Some(RouteChoice { candidate: direct, reason: RouteReason::Cached })
        });
        self.choice = cached.or(self.choice);
        self
    }
}

fn choose(model: &ServedModel, request: &PlanRequest<'_>, turn: u64) -> Explained {
    let policy = request.policy.unwrap_or(model.policy);
    let snapshot = snapshot(model, request, turn);
    let candidates = candidates(&snapshot);
    let choice = policy.choose(&snapshot, &candidates);
    Explained { snapshot, candidates, policy: policy.name(), choice }
}

/// Plans a request. Errors: no decode node can accept requests.
pub fn plan(model: &Arc<ServedModel>, request: &PlanRequest<'_>) -> Result<Plan, RequestError> {
    let turn = model.routes.next_turn();
    let (Explained { snapshot, candidates, policy, .. }, choice) = loop {
        let explained = choose(model, request, turn);
        let Some(choice) = explained.choice else {
            let reason = "no engine that serves this model can be reached";
            return Err(RequestError::unavailable(reason, Duration::from_secs(1)));
        };
        // A half-open breaker lets one request through as a probe. If another request took that place, the route is
        // barred now and this request is planned again. Each breaker can cause this only once every few seconds.
        if may_hand_over(model, explained.candidates[choice.candidate].route) {
            break (explained, choice);
        }
    };
    let RouteCandidate { route, prediction, .. } = candidates[choice.candidate];
    model.decode[route.decode].breakers.of(Task::Decode).try_pass();
    // The time to encode images is not known beforehand.
    let is_known = request.projector.is_none();
    let direct = candidates.iter().filter(|c| is_known && c.route.prefill.is_none());
    let direct = direct.filter_map(|c| Some((c.route.decode, c.prediction?)));
    let is_alone = |c: &&RouteCandidate| c.route == Route { prefill: None, ..route };
    let alone = candidates.iter().find(is_alone).and_then(|c| c.prediction).filter(|_| is_known);
    // Images are no part of what lists of held prefixes name.
    let promised = |node: &NodeView| if is_known { n_promised(&snapshot.request, node) } else { 0 };
    let promised = PromisedTokens {
        decode: promised(&snapshot.decode[route.decode]),
        prefill: route.prefill.map_or(0, |p| promised(&snapshot.prefill[p])),
    };
    let computing = route.prefill.map_or(&snapshot.decode[route.decode], |p| &snapshot.prefill[p]);
    Ok(Plan {
        model: Arc::clone(model),
        route,
        prediction: prediction.filter(|_| is_known),
        reason: choice.reason,
        policy,
        asked_policy: request.policy,
        direct_ttft_ms: direct.clone().map(|(_, times)| times.ttft_ms).min_by(f64::total_cmp),
        alone,
        best_direct: direct.min_by(|(_, a), (_, b)| a.completion_ms.total_cmp(&b.completion_ms)),
        n_missing: snapshot.request.n_prefill().saturating_sub(n_cached(&snapshot.request, computing)),
        promised,
        woken: WokenNodes::default(),
        n_before: 0,
    })
}

/// Returns true if the breakers between a route's nodes permit a handoff. Takes the only place of a half-open breaker.
fn may_hand_over(model: &ServedModel, route: Route) -> bool {
    route.prefill.is_none_or(|p| {
        // Failures before a machine slept bar no waking.
        let sleeps = model.prefill[p].is_asleep();
        let may_prefill = sleeps || model.prefill[p].breakers.of(Task::Prefill).try_pass();
        may_prefill && model.pairs.try_pass(p, route.decode)
    })
}

impl Plan {
    /// The node that generates.
    pub fn decode(&self) -> &Arc<Node> {
        &self.model.decode[self.route.decode]
    }

    /// The node that computes the prompt, if it is another one.
    pub fn prefill(&self) -> Option<&Arc<Node>> {
        self.route.prefill.map(|p| &self.model.prefill[p])
    }

    /// Its nodes that must be woken first.
    pub fn sleeping(&self) -> Vec<&Arc<Node>> {
        [Some(self.decode()), self.prefill()].into_iter().flatten().filter(|node| node.is_asleep()).collect()
    }

    /// Notes which of its nodes were woken: those of `woken`.
    #[must_use]
    pub fn after_waking(self, woken: &[Arc<Node>]) -> Plan {
        let is_woken = |node: &Arc<Node>| woken.iter().any(|other| Arc::ptr_eq(other, node));
        let woken = WokenNodes { decode: is_woken(self.decode()), prefill: self.prefill().is_some_and(is_woken) };
        Plan { woken, ..self }
    }

    /// The record of this plan, for a prompt of `n_prompt` tokens.
    pub fn summary(&self, n_prompt: u32) -> PlannedRoute {
        PlannedRoute {
            kind: self.route.kind(),
            n_prompt,
            decode: self.decode().name.clone(),
            prefill: self.prefill().map(|node| node.name.clone()),
            policy: Some(self.policy),
            reason: self.reason,
            prediction: self.prediction,
            direct_ttft_ms: self.direct_ttft_ms,
            best_direct: self.best_direct.map(|(decode, times)| DirectPrediction {
                node: self.model.decode[decode].name.clone(),
                ttft_ms: times.ttft_ms,
                step_ms: times.step_ms,
            }),
            simulated: self.decode().is_simulated() || self.prefill().is_some_and(|node| node.is_simulated()),
        }
    }

    /// The source of the prompt's KV cache for the decode node. `span` is the span of the reply.
    fn kv_source(&self, span: &tracing::Span) -> Option<KvSource> {
        let patience_ms = self.model.deadlines.pull_ms(self.prediction.as_ref());
        Some(KvSource {
            patience_ms,
            reports_begin: true,
            traceparent: trace::traceparent(span),
            ..self.prefill()?.kv_source()?
        })
    }

    /// Names the nodes that help the decode node: the source of the prompt's KV, and a draft node.
    pub fn name_sources(&self, request: &mut SequenceRequest, span: &tracing::Span) {
        request.kv_source = self.kv_source(span);
        request.draft_source = self.model.draft_node(self.decode(), self.n_before).and_then(|node| node.kv_source());
    }

    /// Prompt tokens that the computing node is to compute.
    pub fn n_missing(&self) -> u32 {
        self.n_missing
    }

    /// Returns true if a request that computed so many prompt tokens shows how wrong the route's predictions are. It does not
    /// if it computed few, or others than planned: a cache was not known or is gone, so the prediction was about other work.
    pub fn is_tried_by(&self, n_computed: u32) -> bool {
        n_computed >= MIN_COMPUTED && n_computed.abs_diff(self.n_missing) <= MIN_COMPUTED.max(self.n_missing / 8)
    }

    /// The plan of one of several choices that share a prompt. Only the first choice computes the prompt and is used
    /// for learning.
    pub fn for_choice(&self, choice: u32) -> Plan {
        let is_first = choice == 0;
        Plan {
            model: Arc::clone(&self.model),
            prediction: self.prediction.filter(|_| is_first),
            alone: self.alone.filter(|_| is_first),
            n_missing: if is_first { self.n_missing } else { 0 },
            promised: if is_first { self.promised } else { PromisedTokens::default() },
            ..*self
        }
    }

    /// Changes the plan to direct generation if the decode node turns out to have the whole prompt, so that nothing is
    /// left to hand over. A plan can only estimate which tokens are cached.
    pub fn cached(&self) -> Plan {
        Plan {
            model: Arc::clone(&self.model),
            route: Route { prefill: None, ..self.route },
            prediction: self.alone,
            reason: RouteReason::Cached,
            n_missing: 0,
            ..*self
        }
    }

    /// Registers the expected work with the chosen nodes, for as long as the claims live.
    pub fn claim(&self) -> Vec<NodeClaim> {
        match self.prefill() {
            None => vec![self.decode().claim(1, self.n_missing)],
            Some(prefill) => vec![prefill.claim(1, self.n_missing).of_prompt(), self.decode().claim(1, 0)],
        }
    }
}

#[cfg(test)]
mod tests;

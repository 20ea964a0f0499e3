//! Which nodes serve a request, and why.
//!
//! [`snapshot`] is what is known at one moment, [`cost`] predicts every route from it, a [`policy`] chooses. All of
//! that is pure; here it meets the pool.

pub mod explanation;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use baton_engines::trace;
use baton_planner::cost::{Candidate, Prediction, Route, candidates};
use baton_planner::policy::{Policy, PolicyName};
use baton_planner::reason::{BarReason, RouteKind, RouteReason};
use baton_planner::snapshot::{NodeView, RequestSize, Snapshot};
use baton_schemas::CacheScope;
use baton_schemas::Token;
use baton_schemas::handoff::KvSource;
use baton_schemas::node::NodeInfo;

use crate::error::RequestError;
use crate::observe::PlannedRoute;
use crate::request::caller::Caller;
use crate::request::prompt::PreparedPrompt;
use crate::targets::nodes::{Claim, Node, ServedModel, Sight, Task, expected_output};

/// A decision with its reason.
#[derive(Clone)]
pub struct Plan {
    /// The model's nodes.
    pub model: Arc<ServedModel>,
    /// Indices of the chosen nodes.
    pub route: Route,
    /// What it should take; `None` if nothing was known.
    pub prediction: Option<Prediction>,
    /// Why this route.
    pub reason: RouteReason,
    /// Which policy decided.
    pub policy: PolicyName,
    /// The one that the request asked for, if it did.
    pub asked_policy: Option<&'static dyn Policy>,
    /// What direct generation on the best decode node should have taken until the first token, ms.
    pub direct_ttft_ms: Option<f64>,
    /// What the decode node should take by itself.
    alone: Option<Prediction>,
    /// Prompt tokens that the computing node does not have.
    n_missing: u32,
}

/// What a plan is asked for.
pub struct PlanRequest<'a> {
    /// The whole prompt, and what was generated already if the request is taken up again.
    pub tokens: &'a [Token],
    /// Tokens at their end that are decoded again, one a step.
    pub n_replayed: u32,
    /// Whose it is.
    pub scope: CacheScope,
    /// Tokens the client wants at most.
    pub max_tokens: Option<u32>,
    /// Instead of the model's own policy.
    pub policy: Option<&'static dyn Policy>,
    /// With which projector the images in the prompt are seen, if there are any. Such a prompt is not handed over.
    pub projector: Option<&'a str>,
    /// Decode nodes that have just failed or refused this request.
    pub exclude: &'a [usize],
    /// Prefill nodes that it is not to wait for once more.
    pub exclude_prefill: &'a [usize],
}

impl<'a> PlanRequest<'a> {
    /// The plan of a request that no engine has begun. `exclude` lists decode nodes that refused it.
    pub fn of_prompt(prompt: &'a PreparedPrompt, caller: &Caller, exclude: &'a [usize]) -> PlanRequest<'a> {
        PlanRequest {
            tokens: &prompt.tokens,
            n_replayed: 0,
            scope: caller.cache_scope,
            max_tokens: prompt.max_tokens,
            policy: caller.policy,
            projector: prompt.projector.as_deref(),
            exclude,
            exclude_prefill: &[],
        }
    }
}

/// Everything a plan was made from, for explanations.
pub struct Explained {
    /// What was known.
    pub snapshot: Snapshot,
    /// Every route with its prediction.
    pub candidates: Vec<Candidate>,
    /// The policy's name.
    pub policy: PolicyName,
    /// What it chose: the candidate's place, and why.
    pub choice: Option<baton_planner::policy::RouteChoice>,
}

/// Looks at the pool and chooses, without taking anything: what [`plan`] would do now.
pub fn explain(model: &ServedModel, request: &PlanRequest<'_>) -> Explained {
    choose(model, request, model.routes.turn())
}

fn choose(model: &ServedModel, request: &PlanRequest<'_>, turn: u64) -> Explained {
    let policy = request.policy.unwrap_or(model.policy);
    let snapshot = snapshot(model, request, turn);
    let candidates = candidates(&snapshot);
    let choice = policy.choose(&snapshot, &candidates);
    Explained { snapshot, candidates, policy: policy.name(), choice }
}

/// Plans a request. Errors: no decode node can be sent requests.
pub fn plan(model: &Arc<ServedModel>, request: &PlanRequest<'_>) -> Result<Plan, RequestError> {
    let turn = model.routes.next_turn();
    let (Explained { snapshot, candidates, policy, .. }, choice) = loop {
        let explained = choose(model, request, turn);
        let Some(choice) = explained.choice else {
            let reason = "no engine that serves this model can be reached".to_owned();
            return Err(RequestError::Unavailable { reason, retry_after: Duration::from_secs(1) });
        };
        // What failed lets one request through to see whether it is back. If another one was quicker, that route is
        // barred now, and this one goes elsewhere; each breaker can send it back but once in some seconds.
        if may_hand_over(model, explained.candidates[choice.candidate].route) {
            break (explained, choice);
        }
    };
    let Candidate { route, prediction, .. } = candidates[choice.candidate];
    model.decode[route.decode].breakers.of(Task::Decode).try_pass();
    // What its images take is not known beforehand.
    let is_known = request.projector.is_none();
    let direct = candidates.iter().filter(|c| is_known && c.route.prefill.is_none());
    let direct = direct.filter_map(|c| Some(c.prediction?.ttft_ms));
    let is_alone = |c: &&Candidate| c.route == Route { prefill: None, ..route };
    let alone = candidates.iter().find(is_alone).and_then(|c| c.prediction).filter(|_| is_known);
    let computing = route.prefill.map_or(&snapshot.decode[route.decode], |p| &snapshot.prefill[p]);
    Ok(Plan {
        model: Arc::clone(model),
        route,
        prediction: prediction.filter(|_| is_known),
        reason: choice.reason,
        policy,
        asked_policy: request.policy,
        direct_ttft_ms: direct.min_by(f64::total_cmp),
        alone,
        n_missing: snapshot.request.n_prefill().saturating_sub(computing.n_cached),
    })
}

/// Returns true if the breakers between a route's nodes let a handoff pass. Takes their one place where they are
/// half-open.
fn may_hand_over(model: &ServedModel, route: Route) -> bool {
    route.prefill.is_none_or(|p| {
        let may_prefill = model.prefill[p].breakers.of(Task::Prefill).try_pass();
        may_prefill && model.pairs.try_pass(p, route.decode)
    })
}

fn snapshot(model: &ServedModel, request: &PlanRequest<'_>, turn: u64) -> Snapshot {
    let routes = model.routes.view();
    let size = RequestSize {
        n_prompt: u32::try_from(request.tokens.len()).unwrap_or(u32::MAX),
        n_replayed: request.n_replayed,
        n_output: expected_output(&routes.n_output, request.max_tokens),
    };
    let prefill = model.prefill.iter().enumerate().map(|(p, node)| {
        let view = node.view(Task::Prefill, request.scope, request.tokens);
        if request.projector.is_some() {
            return NodeView { barred: Some(BarReason::Images), ..view };
        }
        let barred = view.barred.map(|reason| if reason == BarReason::Down { BarReason::PREFILL_DOWN } else { reason });
        let barred = barred.or_else(|| model.bars_prefill(&*node.info()?));
        NodeView { barred: barred.or(request.exclude_prefill.contains(&p).then_some(BarReason::JustFailed)), ..view }
    });
    Snapshot {
        request: size,
        prefill: prefill.collect(),
        decode: decode_nodes(model, request, &size),
        links: routes.links,
        barred_pairs: model.pairs.barred(),
        corrections: routes.corrections,
        turn,
    }
}

/// The decode nodes, barred where they cannot generate for this request or another one should.
fn decode_nodes(model: &ServedModel, request: &PlanRequest<'_>, size: &RequestSize) -> Vec<NodeView> {
    let infos: Vec<_> = model.decode.iter().map(|node| node.info()).collect();
    let unfit: Vec<_> = infos.iter().map(|info| unfit(model, info.as_deref()?, request)).collect();
    let looked_at = model.decode.iter().enumerate().map(|(i, node)| {
        let view = node.view(Task::Decode, request.scope, request.tokens);
        let barred = unfit[i].or(view.barred).or(request.exclude.contains(&i).then_some(BarReason::JustFailed));
        NodeView { barred, ..view }
    });
    let mut views: Vec<_> = looked_at.collect();
    // A node that fails is better than none, but one that has just failed this request only if there is no other.
    for has_just_failed in [false, true] {
        if views.iter().any(|view| view.barred.is_none()) {
            break;
        }
        let those = |i: &usize| infos[*i].is_some() && request.exclude.contains(i) == has_just_failed;
        for i in (0..views.len()).filter(those) {
            views[i].barred = unfit[i];
        }
    }
    // Where one node has room for the whole reply, none is sent to another that would cut it short.
    let n_ctx = |i: usize| infos[i].as_ref().map_or(0, |info| u64::from(info.n_ctx));
    let open = (0..views.len()).filter(|&i| views[i].barred.is_none());
    let longest = open.map(n_ctx).max().unwrap_or(0);
    let n_output = request.max_tokens.map_or(size.n_output.ceil() as u64, u64::from);
    let wanted = (u64::from(size.n_prompt) + n_output).min(longest);
    for (_, view) in views.iter_mut().enumerate().filter(|(i, view)| view.barred.is_none() && n_ctx(*i) < wanted) {
        view.barred = Some(BarReason::ContextTooSmall);
    }
    views
}

/// Why a decode node cannot generate for this request, however well it is.
fn unfit(model: &ServedModel, info: &NodeInfo, request: &PlanRequest<'_>) -> Option<BarReason> {
    // Room for one new token, unless none is wanted.
    let n_needed = request.tokens.len() + usize::from(request.max_tokens != Some(0));
    let is_blind = !Sight::by(request.projector).is_met_by(info);
    let barred = model.bars_decode(info).or(is_blind.then_some(BarReason::NoProjector));
    barred.or((n_needed > info.n_ctx as usize).then_some(BarReason::ContextTooSmall))
}

impl Plan {
    /// The node that generates.
    pub fn decode(&self) -> &Arc<Node> {
        &self.model.decode[self.route.decode]
    }

    /// The node that computes the prompt, if that is another.
    pub fn prefill(&self) -> Option<&Arc<Node>> {
        self.route.prefill.map(|p| &self.model.prefill[p])
    }

    /// The kind of its route.
    pub fn kind(&self) -> RouteKind {
        if self.route.prefill.is_some() { RouteKind::Handoff } else { RouteKind::Direct }
    }

    /// What is recorded of it, for a prompt of so many tokens.
    pub fn summary(&self, n_prompt: u32) -> PlannedRoute {
        PlannedRoute {
            kind: self.kind(),
            n_prompt,
            decode: self.decode().name.clone(),
            prefill: self.prefill().map(|node| node.name.clone()),
            policy: Some(self.policy),
            reason: self.reason,
            predicted_ttft_ms: self.prediction.map(|prediction| prediction.ttft_ms),
            predicted_step_ms: self.prediction.map(|prediction| prediction.step_ms),
            direct_ttft_ms: self.direct_ttft_ms,
        }
    }

    /// Where the decode node gets the prompt's KV cache, for a reply under this span.
    pub fn kv_source(&self, span: &tracing::Span) -> Option<KvSource> {
        let patience_ms = self.model.deadlines.pull_ms(self.prediction.as_ref());
        Some(KvSource { patience_ms, traceparent: trace::traceparent(span), ..self.prefill()?.kv_source()? })
    }

    /// The plan of one of several choices that share a prompt: the first computes it, and is what is learned from.
    pub fn for_choice(&self, choice: u32) -> Plan {
        let is_first = choice == 0;
        Plan {
            model: Arc::clone(&self.model),
            prediction: self.prediction.filter(|_| is_first),
            alone: self.alone.filter(|_| is_first),
            n_missing: if is_first { self.n_missing } else { 0 },
            ..*self
        }
    }

    /// What becomes of it if the decode node turns out to have the whole prompt: nothing is left to hand over. A plan can
    /// only guess what is cached where.
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

    /// Notes with the chosen nodes what they will have to do, for as long as the claims live.
    pub fn claim(&self) -> Vec<Claim> {
        match self.prefill() {
            None => vec![self.decode().claim(1, self.n_missing)],
            Some(prefill) => vec![prefill.claim_prompt(self.n_missing), self.decode().claim(1, 0)],
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.kind().as_str();
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

#[cfg(test)]
mod tests;

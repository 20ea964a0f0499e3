//! Which nodes serve a request, and why.
//!
//! [`snapshot`] is what is known at one moment, [`cost`] predicts every route from it, a [`policy`] chooses. All of
//! that is pure; here it meets the pool.

pub mod cost;
pub mod explanation;
pub mod policy;
pub mod snapshot;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use baton_schemas::Token;
use baton_schemas::handoff::KvSource;
use baton_schemas::sequence::CacheScope;

use self::cost::{Candidate, Prediction, Route, candidates};
use self::policy::Policy;
use self::snapshot::{NodeView, RequestSize, Snapshot};
use crate::error::RequestError;
use crate::pool::{Claim, Node, ServedModel, expected_output};

/// A decision with its reason.
pub struct Plan {
    /// The model's nodes.
    pub model: Arc<ServedModel>,
    /// Indices of the chosen nodes.
    pub route: Route,
    /// What it should take; `None` if nothing was known.
    pub prediction: Option<Prediction>,
    /// Why this route, in one word for counting.
    pub reason: &'static str,
    /// Which policy decided.
    pub policy: &'static str,
    /// What direct generation on the best decode node should have taken until the first token, ms.
    pub direct_ttft_ms: Option<f64>,
    /// Prompt tokens that the computing node does not have.
    n_missing: u32,
}

/// What a plan is asked for.
pub struct PlanRequest<'a> {
    /// The whole prompt, and what was generated already if the request is taken up again.
    pub tokens: &'a [Token],
    /// Whose it is.
    pub scope: CacheScope,
    /// Tokens the client wants at most.
    pub max_tokens: Option<u32>,
    /// Instead of the model's own policy.
    pub policy: Option<&'static dyn Policy>,
    /// Decode nodes that have just failed or refused this request.
    pub exclude: &'a [usize],
}

/// Everything a plan was made from, for explanations.
pub struct Explained {
    /// What was known.
    pub snapshot: Snapshot,
    /// Every route with its prediction.
    pub candidates: Vec<Candidate>,
    /// The policy's name.
    pub policy: &'static str,
    /// What it chose: the candidate's place, and why.
    pub choice: Option<policy::Choice>,
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
    let Explained { snapshot, candidates, policy, choice } = choose(model, request, model.routes.next_turn());
    let Some(choice) = choice else {
        let reason = "no engine that serves this model can be reached".to_owned();
        return Err(RequestError::Unavailable { reason, retry_after: Duration::from_secs(1) });
    };
    let Candidate { route, prediction, .. } = &candidates[choice.candidate];
    // A node that failed lets one request through to see whether it is back: this one.
    let may_prefill = route.prefill.is_none_or(|p| model.prefill[p].breaker.try_pass());
    let route = if may_prefill { *route } else { Route { prefill: None, ..*route } };
    model.decode[route.decode].breaker.try_pass();
    let direct = candidates.iter().filter(|c| c.route.prefill.is_none()).filter_map(|c| Some(c.prediction?.ttft_ms));
    let computing = route.prefill.map_or(&snapshot.decode[route.decode], |p| &snapshot.prefill[p]);
    Ok(Plan {
        model: Arc::clone(model),
        route,
        prediction: prediction.filter(|_| may_prefill),
        reason: choice.reason,
        policy,
        direct_ttft_ms: direct.min_by(f64::total_cmp),
        n_missing: snapshot.request.n_prompt.saturating_sub(1).saturating_sub(computing.n_cached),
    })
}

fn snapshot(model: &ServedModel, request: &PlanRequest<'_>, turn: u64) -> Snapshot {
    let routes = model.routes.view();
    let looked_at = model.decode.iter().enumerate().map(|(i, node)| {
        let view = node.view(request.scope, request.tokens);
        let (is_ready, unfit) = (node.info().is_some(), unfit(model, node, request));
        let barred = unfit.or(view.barred).or(request.exclude.contains(&i).then_some("just_failed"));
        (NodeView { barred, ..view }, is_ready, unfit)
    });
    let mut looked_at: Vec<_> = looked_at.collect();
    // A node that has just failed is better than none.
    if looked_at.iter().all(|(view, ..)| view.barred.is_some()) {
        for (view, _, unfit) in looked_at.iter_mut().filter(|(_, is_ready, _)| *is_ready) {
            view.barred = *unfit;
        }
    }
    let decode = looked_at.into_iter().map(|(view, ..)| view).collect();
    let prefill = model.prefill.iter().map(|node| {
        let view = node.view(request.scope, request.tokens);
        let barred = view.barred.map(|reason| if reason == "down" { "prefill_down" } else { reason });
        NodeView { barred: barred.or_else(|| model.bars_prefill(&*node.info()?)), ..view }
    });
    Snapshot {
        request: RequestSize {
            n_prompt: u32::try_from(request.tokens.len()).unwrap_or(u32::MAX),
            n_output: expected_output(&routes.n_output, request.max_tokens),
        },
        prefill: prefill.collect(),
        decode,
        links: routes.links,
        corrections: routes.corrections,
        turn,
    }
}

/// Why a decode node cannot generate for this request, however well it is.
fn unfit(model: &ServedModel, node: &Node, request: &PlanRequest<'_>) -> Option<&'static str> {
    let info = node.info()?;
    let is_too_long = request.tokens.len() > info.n_ctx as usize;
    model.bars_decode(&info).or(is_too_long.then_some("context_too_small"))
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

    /// What the decode node is told of where to get the prompt's KV.
    pub fn kv_source(&self) -> Option<KvSource> {
        self.prefill()?.kv_source()
    }

    /// The plan of one of several choices that share a prompt: the first computes it, and is what is learned from.
    pub fn for_choice(&self, choice: u32) -> Plan {
        let is_first = choice == 0;
        Plan {
            model: Arc::clone(&self.model),
            prediction: self.prediction.filter(|_| is_first),
            n_missing: if is_first { self.n_missing } else { 0 },
            ..*self
        }
    }

    /// Notes with the chosen nodes what they will have to do, for as long as the claims live.
    pub fn claim(&self) -> Vec<Claim> {
        match self.prefill() {
            None => vec![self.decode().claim(1, self.n_missing)],
            Some(prefill) => vec![prefill.claim(0, self.n_missing), self.decode().claim(1, 0)],
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.prefill() {
            None => write!(f, "direct; decode={}", self.decode().name)?,
            Some(prefill) => write!(f, "handoff; prefill={}; decode={}", prefill.name, self.decode().name)?,
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

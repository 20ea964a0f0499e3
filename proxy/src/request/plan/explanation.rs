//! The explanation of a plan: the reply of `POST /baton/plan`.

use baton_planner::cost::{Prediction, RouteCandidate, n_cached};
use baton_planner::policy::PolicyName;
use baton_planner::reason::RouteKind;
use baton_planner::snapshot::Snapshot;
use baton_planner::upstreams::{PlannedTarget, UpstreamSnapshot, choose, predictions};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Explained;
use crate::targets::nodes::WorkerReport;

/// The plan that a request would get now, with its reasons. If only upstreams serve the model, the prompt's length is estimated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Explanation {
    /// The model's public name.
    pub model: String,
    /// The policy that decided.
    pub policy: String,
    /// The reason for this route, in one word; `None` if there is no route.
    pub reason: Option<String>,
    /// Tokens of the rendered prompt.
    pub n_prompt: u32,
    /// The expected number of tokens in the reply.
    pub expected_output: f64,
    /// All routes, direct ones first, those of upstreams last.
    pub routes: Vec<RouteExplanation>,
    /// The nodes that compute with workers. Their rates are those of node and workers together.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub workers: Vec<NodeWorkers>,
}

/// A node that computes with workers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeWorkers {
    /// The node's name.
    pub node: String,
    /// Its workers.
    pub workers: Vec<WorkerReport>,
}

/// A route with its predicted times.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RouteExplanation {
    /// `direct`, `handoff` or `upstream`.
    #[serde(default)]
    pub kind: String,
    /// The node or the upstream that generates.
    pub decode: String,
    /// The node that computes the prompt, if it is another one.
    pub prefill: Option<String>,
    /// This route is the planned one.
    pub chosen: bool,
    /// Prompt tokens that are probably cached on the decode node or the upstream.
    pub cached_on_decode: u32,
    /// Prompt tokens that are probably cached on the prefill node.
    pub cached_on_prefill: Option<u32>,
    /// Milliseconds; `None` if the route cannot be taken or its rates are not known.
    pub prediction: Option<Prediction>,
    /// The reason why the route cannot be taken, if there is one.
    #[serde(alias = "barred")]
    pub unused_reason: Option<String>,
}

impl Explanation {
    /// Explains what [`explain`](super::explain) found for the model of this name.
    pub fn new(model: String, explained: &Explained, workers: Vec<NodeWorkers>) -> Explanation {
        let Explained { snapshot, candidates, policy, choice } = explained;
        let chosen = choice.map(|choice| choice.candidate);
        let routes = candidates.iter().enumerate().map(|(i, c)| route(snapshot, c, chosen == Some(i)));
        Explanation {
            model,
            policy: policy.to_string(),
            reason: choice.map(|choice| choice.reason.to_string()),
            n_prompt: snapshot.request.n_prompt,
            expected_output: snapshot.request.n_output,
            routes: routes.collect(),
            workers,
        }
    }

    /// Explains a plan for a model that only upstreams serve.
    pub fn of_upstreams(model: String, snapshot: &UpstreamSnapshot) -> Explanation {
        let none = Explanation {
            model,
            policy: PolicyName::Fastest.to_string(),
            reason: None,
            n_prompt: snapshot.request.n_prompt,
            expected_output: snapshot.request.n_output,
            routes: Vec::new(),
            workers: Vec::new(),
        };
        none.with_upstreams(snapshot)
    }

    /// Adds the upstreams that serve the same model. If one of them is chosen, the nodes' best route is not.
    pub fn with_upstreams(mut self, snapshot: &UpstreamSnapshot) -> Explanation {
        let choice = choose(snapshot);
        let chosen = choice.and_then(|choice| match choice.target {
            PlannedTarget::Upstream(i) => Some((i, choice.reason)),
            PlannedTarget::Own => None,
        });
        if let Some((_, reason)) = chosen {
            self.reason = Some(reason.to_string());
            self.routes.iter_mut().for_each(|route| route.chosen = false);
        }
        let predictions = predictions(snapshot);
        let routes =
            snapshot.upstreams.iter().zip(predictions).enumerate().map(|(i, (view, prediction))| RouteExplanation {
                kind: RouteKind::Upstream.as_str().to_owned(),
                decode: view.name.clone(),
                prefill: None,
                chosen: chosen.is_some_and(|(chosen, _)| chosen == i),
                cached_on_decode: view.n_cached(&snapshot.request),
                cached_on_prefill: None,
                prediction,
                unused_reason: view.barred.map(|reason| reason.as_str().to_owned()),
            });
        self.routes.extend(routes);
        self
    }
}

fn route(snapshot: &Snapshot, candidate: &RouteCandidate, chosen: bool) -> RouteExplanation {
    let decode = &snapshot.decode[candidate.route.decode];
    let prefill = candidate.route.prefill.map(|p| &snapshot.prefill[p]);
    RouteExplanation {
        kind: candidate.route.kind().as_str().to_owned(),
        decode: decode.name.clone(),
        prefill: prefill.map(|node| node.name.clone()),
        chosen,
        cached_on_decode: n_cached(&snapshot.request, decode),
        cached_on_prefill: prefill.map(|node| n_cached(&snapshot.request, node)),
        prediction: candidate.prediction,
        unused_reason: candidate.barred.map(|reason| reason.as_str().to_owned()),
    }
}

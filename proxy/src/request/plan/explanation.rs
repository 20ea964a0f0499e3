//! A plan as it is shown to people and programs: the reply of `POST /baton/plan`.

use baton_planner::cost::{Candidate, Prediction};
use baton_planner::snapshot::Snapshot;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Explained;

/// What would be done with a request now, and why.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Explanation {
    /// The model's public name.
    pub model: String,
    /// Which policy decided.
    pub policy: String,
    /// Why this route, in one word; `None` if there is none.
    pub reason: Option<String>,
    /// Tokens of the rendered prompt.
    pub n_prompt: u32,
    /// Tokens that the reply will probably have.
    pub expected_output: f64,
    /// Every route, direct ones first.
    pub routes: Vec<RouteExplanation>,
}

/// A route with what it would take.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RouteExplanation {
    /// The node that generates.
    pub decode: String,
    /// The node that computes the prompt, if that is another.
    pub prefill: Option<String>,
    /// This route is the planned one.
    pub chosen: bool,
    /// Tokens of the prompt whose KV the decode node probably has.
    pub cached_on_decode: u32,
    /// The same of the prefill node.
    pub cached_on_prefill: Option<u32>,
    /// Milliseconds; `None` if the route is barred or its rates are not known.
    pub prediction: Option<Prediction>,
    /// Why it cannot be taken.
    pub barred: Option<String>,
}

impl Explanation {
    /// The explanation of what [`explain`](super::explain) found for the model of this name.
    pub fn new(model: String, explained: &Explained) -> Explanation {
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
        }
    }
}

fn route(snapshot: &Snapshot, candidate: &Candidate, chosen: bool) -> RouteExplanation {
    let decode = &snapshot.decode[candidate.route.decode];
    let prefill = candidate.route.prefill.map(|p| &snapshot.prefill[p]);
    RouteExplanation {
        decode: decode.name.clone(),
        prefill: prefill.map(|node| node.name.clone()),
        chosen,
        cached_on_decode: decode.n_cached,
        cached_on_prefill: prefill.map(|node| node.n_cached),
        prediction: candidate.prediction,
        barred: candidate.barred.map(|reason| reason.as_str().to_owned()),
    }
}

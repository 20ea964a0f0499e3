//! What `/baton/state?stream=changes` sends: first everything, then each second what has changed.

use schemars::JsonSchema;
use serde::Serialize;

use crate::observe::RouteRecord;
use crate::observe::history::HistorySample;
use crate::observe::snapshot::{DiscoveryState, EndpointState, ModelState, RequestsState, UpstreamReport};

/// The parts of the state that differ from the event before. A part that is there replaces the earlier one, except for
/// `routes` and `history`, which have only what is new. The first event has all parts, and the history of the last hour.
#[derive(Debug, Default, PartialEq, Serialize, JsonSchema)]
pub(super) struct StateChanges {
    /// When the snapshot was taken, milliseconds since the Unix epoch. Always there.
    at_ms: u64,
    /// The program's version.
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<String>,
    /// True after a stop signal.
    #[serde(skip_serializing_if = "Option::is_none")]
    is_stopping: Option<bool>,
    /// Admission.
    #[serde(skip_serializing_if = "Option::is_none")]
    requests: Option<RequestsState>,
    /// All models, if one has changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    models: Option<Vec<ModelState>>,
    /// All upstreams, if one has changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    upstreams: Option<Vec<UpstreamReport>>,
    /// What was found in the network, if that has changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    discovery: Option<DiscoveryState>,
    /// Bytes that the models loaded on demand may take; 0: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_budget_bytes: Option<u64>,
    /// All requests that have not ended, if one has changed; the newest first.
    #[serde(skip_serializing_if = "Option::is_none")]
    open: Option<Vec<RouteRecord>>,
    /// Requests with a route that have ended since; the newest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    routes: Vec<RouteRecord>,
    /// Differences from the configuration, a sentence each.
    #[serde(skip_serializing_if = "Option::is_none")]
    warnings: Option<Vec<String>>,
    /// New samples; the oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    history: Vec<HistorySample>,
}

impl StateChanges {
    /// Compares the state with the one of the event before; `None` for the first event. `history` has the new samples.
    pub(super) fn between(
        before: Option<&EndpointState>,
        now: &EndpointState,
        history: Vec<HistorySample>,
    ) -> StateChanges {
        StateChanges {
            at_ms: now.at_ms,
            version: changed(before, now, |state| &state.version),
            is_stopping: changed(before, now, |state| &state.is_stopping),
            requests: changed(before, now, |state| &state.requests),
            models: changed(before, now, |state| &state.models),
            upstreams: changed(before, now, |state| &state.upstreams),
            discovery: changed(before, now, |state| &state.discovery).flatten(),
            memory_budget_bytes: changed(before, now, |state| &state.memory_budget_bytes),
            open: changed(before, now, |state| &state.open),
            routes: new_routes(before, now),
            warnings: changed(before, now, |state| &state.warnings),
            history,
        }
    }
}

fn changed<T: Clone + PartialEq>(
    before: Option<&EndpointState>,
    now: &EndpointState,
    part: fn(&EndpointState) -> &T,
) -> Option<T> {
    let is_same = before.is_some_and(|before| part(before) == part(now));
    (!is_same).then(|| part(now).clone())
}

/// The requests that have ended since. The newest one of before may be gone: refused requests drive out refused ones.
fn new_routes(before: Option<&EndpointState>, now: &EndpointState) -> Vec<RouteRecord> {
    let is_new = |route: &&RouteRecord| before.is_none_or(|before| !before.routes.contains(route));
    now.routes.iter().filter(is_new).cloned().collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn route(id: &str) -> RouteRecord {
        serde_json::from_value(json!({ "at_ms": 1, "request_id": id, "model": "m", "decode": "local", "prefill": null,
            "policy": "fastest", "reason": "faster", "n_prompt": 1, "n_cached": 0, "n_completion": 1,
            "before_plan_ms": 0.0, "predicted_ttft_ms": null, "predicted_direct_ttft_ms": null, "ttft_ms": 1.0,
            "e2e_ms": 1.0, "handoff": null, "outcome": "done" }))
        .unwrap()
    }

    #[test]
    fn the_first_event_has_everything_and_later_ones_what_changed() {
        let first = EndpointState { at_ms: 1, routes: vec![route("a")], ..EndpointState::default() };
        let json = serde_json::to_value(StateChanges::between(None, &first, Vec::new())).unwrap();
        for part in ["version", "is_stopping", "requests", "models", "upstreams", "open", "warnings"] {
            assert!(json.get(part).is_some(), "{part} is missing in {json}");
        }
        assert_eq!(json["routes"][0]["request_id"], "a");

        let same = EndpointState { at_ms: 2, ..first.clone() };
        let nothing = StateChanges::between(Some(&first), &same, Vec::new());
        assert_eq!(serde_json::to_value(nothing).unwrap(), json!({ "at_ms": 2 }));

        let requests = RequestsState { running: 1, ..RequestsState::default() };
        let routes = vec![route("c"), route("b"), route("a")];
        let later = EndpointState { at_ms: 3, requests, routes, ..first };
        let changes = StateChanges::between(Some(&same), &later, vec![HistorySample::default()]);
        let new: Vec<&str> = changes.routes.iter().map(|route| route.request_id.as_str()).collect();
        assert_eq!((new, changes.requests.unwrap().running, changes.history.len()), (vec!["c", "b"], 1, 1));
        assert_eq!((changes.models, changes.version), (None, None));
    }
}

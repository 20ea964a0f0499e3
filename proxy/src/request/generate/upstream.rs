//! Starts requests on upstreams: if only upstreams serve the model, or if no node can start the request.

use baton_planner::reason::RouteReason;
use baton_schemas::EngineError;
use tracing::Instrument;

use super::start::{Loaded, StartedChoices, StartedRequest, Starting};
use crate::error::RequestError;
use crate::request::plan::route_words;
use crate::targets::models::ServedModel;
use crate::targets::nodes::FallbackReason;
use crate::targets::upstreams::{self, ServedByUpstreams};

/// Starts every choice on the first upstream that begins to answer. `reason`, if given, is announced instead of the
/// reason for which that upstream was chosen.
pub(super) async fn start_on_upstreams(
    starting: &mut Starting<'_>,
    serving: &ServedByUpstreams,
    reason: Option<RouteReason>,
) -> Result<StartedRequest, RequestError> {
    let Starting { request, caller, watch, .. } = starting;
    if !request.earlier_tokens().is_empty() {
        let problem = "an upstream counts in tokens of its own; send the history to /api/chat".to_owned();
        return Err(RequestError::InvalidField { field: "context", problem });
    }
    let started = upstreams::start(serving, request, &caller.request_id).instrument(watch.span().clone()).await?;
    let n_prompt = upstreams::estimated_tokens(request);
    let reason = reason.unwrap_or(started.reason);
    watch.upstream(started.server.name(), reason, n_prompt, started.asked);
    let route = route_words::of_upstream(started.server.name(), reason);
    let choices = StartedChoices::Text { choices: started.choices, places: starting.take_places() };
    Ok(StartedRequest { n_prompt, route, choices, plan: None, loaded: Loaded::default() })
}

/// Starts a request on upstreams after nodes refused it with this error, if upstreams can help.
pub(super) async fn fall_back(
    starting: &mut Starting<'_>,
    model: &ServedModel,
    serving: &ServedByUpstreams,
    error: RequestError,
) -> Result<StartedRequest, RequestError> {
    if !is_worth_falling_back(&error) {
        return Err(error);
    }
    model.fallbacks.count(FallbackReason::Upstream);
    let request_id = &starting.caller.request_id;
    tracing::info!(request_id, %error, "no engine accepted the request; trying upstreams");
    match start_on_upstreams(starting, serving, Some(RouteReason::NoEngine)).await {
        // The upstream cannot serve this request, but an engine can once it is back.
        Err(RequestError::InvalidField { .. } | RequestError::ImagesUnsupported { .. }) => Err(error),
        outcome => outcome,
    }
}

/// Returns true for errors of engines, and false if the request itself is wrong.
fn is_worth_falling_back(error: &RequestError) -> bool {
    use EngineError::{Lost, QueueFull, Unavailable};
    let of_engine = matches!(error, RequestError::Engine(Lost { .. } | QueueFull { .. } | Unavailable { .. }));
    of_engine || matches!(error, RequestError::Unavailable { .. })
}

//! `GET /baton/state`: the endpoint's [`EndpointState`] as JSON, or as an event stream: with one state a second, or with
//! the changes of each second.
//!
//! If keys are required, this route requires an operator's key: timings and cache hits of other callers' requests
//! reveal something about their prompts. Addresses of nodes are shown only with such a key. A loopback connection is
//! not enough: behind a reverse proxy on this machine, every request comes over loopback.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use baton_schemas::ErrorCode;
use baton_schemas::openai::{ErrorBody, ErrorKind};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use schemars::json_schema;
use serde::Serialize;

use super::state_changes::StateChanges;
use crate::http::errors::{HttpFailure, Retry};
use crate::http::http_state::MAX_WATCHERS;
use crate::http::openapi::Operation;
use crate::http::reply::event_stream::sse_headers;
use crate::http::reply::request_steps::Stopping;
use crate::http::{HttpBackend, HttpState};
use crate::observe::snapshot::EndpointState;
use crate::request::caller::{Caller, CallerRole};

/// The interval between two states of a stream.
const INTERVAL: Duration = Duration::from_secs(1);

pub(super) fn operation() -> Operation {
    Operation::new("The current state of the endpoint")
        .asks("stream", "1: stream the state every second. changes: the state, then every second what changed")
        .replies::<EndpointState>()
        .streams(|generator| {
            let items = [generator.subschema_for::<EndpointState>(), generator.subschema_for::<StateChanges>()];
            json_schema!({ "anyOf": items })
        })
        .fails(&[503])
        .answered_while_stopping()
}

/// What a client asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StateForm {
    /// One state.
    State,
    /// A state every second.
    States,
    /// A state, and then every second what changed.
    Changes,
}

/// Answers with one state, or with a stream if the query has `stream=1` or `stream=changes`, or if `Accept` names event
/// streams.
pub(super) async fn show(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
    stopping: Option<Extension<Stopping>>,
    headers: HeaderMap,
    uri: Uri,
) -> Result<Response, HttpFailure> {
    let with_addresses = may_observe(&caller)?;
    let stopping = stopping.map(|Extension(stopping)| stopping).unwrap_or_default();
    let wanted = wanted(&uri, &headers);
    if wanted == StateForm::State {
        return Ok(Json(now(&*state.backend, &stopping, with_addresses)).into_response());
    }
    let Ok(place) = Arc::clone(&state.watchers.0).try_acquire_owned() else {
        let message = format!("{MAX_WATCHERS} streams of states are open already.");
        let error = ErrorBody::new(ErrorKind::Unavailable, message).code(ErrorCode::TooManyWatchers);
        let retry = Retry::After(INTERVAL);
        return Err(HttpFailure { retry, ..HttpFailure::new(StatusCode::SERVICE_UNAVAILABLE, error) });
    };
    let secret = caller.secret;
    let events = async_stream::stream! {
        let _place = place;
        let granted = state.access.load_full();
        let mut sent = None;
        let mut sampled_ms = 0;
        let mut is_last = false;
        // A key may have been taken away, or its last day may have passed: whoever still has one asks again.
        while Arc::ptr_eq(&granted, &state.access.load_full()) && granted.keys.is_accepted(secret) {
            let now = now(&*state.backend, &stopping, with_addresses);
            let event = if wanted == StateForm::Changes {
                let history = state.backend.history(sampled_ms);
                sampled_ms = history.last().map_or(sampled_ms, |sample| sample.at_ms);
                let event = event(&StateChanges::between(sent.as_ref(), &now, history));
                sent = Some(now);
                event
            } else {
                event(&now)
            };
            yield Ok::<Bytes, Infallible>(event);
            if is_last {
                break;
            }
            // Otherwise the stream would delay the shutdown until the drain deadline. One more event says that it stops.
            is_last = stopping.0.run_until_cancelled(tokio::time::sleep(INTERVAL)).await.is_none();
        }
    };
    let mut response = Body::from_stream(events).into_response();
    sse_headers(response.headers_mut());
    Ok(response)
}

/// Returns true if this caller may see addresses. Errors: the caller may not see the state at all.
pub(super) fn may_observe(caller: &Caller) -> Result<bool, HttpFailure> {
    match caller.role {
        CallerRole::Anyone => Ok(false),
        CallerRole::Operator => Ok(true),
        CallerRole::Guest => {
            let message = "This API key may not see the server at work. Its operator can set 'operator = true' for it.";
            let error = ErrorBody::new(ErrorKind::Permission, message).code(ErrorCode::OperatorKeyRequired);
            Err(HttpFailure::new(StatusCode::FORBIDDEN, error))
        }
    }
}

fn wanted(uri: &Uri, headers: &HeaderMap) -> StateForm {
    let asks = |wanted: &str| uri.query().is_some_and(|query| query.split('&').any(|pair| pair == wanted));
    let is_events = |value: &HeaderValue| value.to_str().is_ok_and(|value| value.contains("text/event-stream"));
    match () {
        () if asks("stream=changes") => StateForm::Changes,
        () if asks("stream=1") || headers.get_all(header::ACCEPT).iter().any(is_events) => StateForm::States,
        () => StateForm::State,
    }
}

fn now(backend: &dyn HttpBackend, stopping: &Stopping, with_addresses: bool) -> EndpointState {
    EndpointState { is_stopping: stopping.0.is_cancelled(), ..backend.state(with_addresses) }
}

fn event(data: &impl Serialize) -> Bytes {
    let json = serde_json::to_string(data).unwrap_or_default();
    format!("data: {json}\n\n").into()
}

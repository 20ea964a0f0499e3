//! `GET /health`, in llama-server's words: load balancers and start scripts wait for `{"status":"ok"}`.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use baton_schemas::openai::{ErrorBody, ErrorKind};
use http::StatusCode;
use schemars::JsonSchema;
use serde::Serialize;

use crate::http::HttpState;
use crate::http::errors::{HttpFailure, Retry};
use crate::http::openapi::Operation;
use crate::http::reply::request_steps::{STOPPING, Stopping};
use crate::observe::readiness::Readiness;
use crate::targets::nodes::NodeState;

/// A small model loads in about this time. A client that waits for a large one asks again.
const RETRY_AFTER: Duration = Duration::from_secs(2);

#[derive(Serialize, JsonSchema)]
struct HealthReport {
    status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<ErrorBody>,
    /// Warnings: differences from the configuration that do not stop requests.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
    /// The number of nodes in each state, unless all are ready.
    #[serde(skip_serializing_if = "all_ready")]
    nodes: BTreeMap<NodeState, usize>,
}

fn all_ready(nodes: &BTreeMap<NodeState, usize>) -> bool {
    nodes.keys().all(|state| *state == NodeState::Ready)
}

pub(super) fn operation() -> Operation {
    Operation::new("Check whether requests can be answered now")
        .public()
        .answered_while_stopping()
        .replies::<HealthReport>()
        .unavailable::<HealthReport>()
}

/// Answers 200 if a request sent now would be answered, else 503 with the reason.
pub(super) async fn health(State(state): State<HttpState>, stopping: Option<Extension<Stopping>>) -> Response {
    let warnings = state.backend.warnings();
    let nodes = state.backend.node_states();
    let is_stopping = stopping.is_some_and(|Extension(stopping)| stopping.0.is_cancelled());
    let readiness = match is_stopping {
        true => Readiness::Unavailable { reason: STOPPING.to_owned() },
        false => state.backend.readiness(),
    };
    let (status, reason) = match readiness {
        Readiness::Ok => return Json(HealthReport { status: "ok", error: None, warnings, nodes }).into_response(),
        Readiness::Loading { reason } => ("loading", reason),
        Readiness::Unavailable { reason } => ("unavailable", reason),
    };
    let error = ErrorBody::new(ErrorKind::Unavailable, reason);
    let failure =
        HttpFailure { retry: Retry::After(RETRY_AFTER), ..HttpFailure::new(StatusCode::SERVICE_UNAVAILABLE, error) };
    let report = HealthReport { status, error: Some(failure.error.clone()), warnings, nodes };
    // Uses the head of an ordinary error, but the body has one more key.
    let (mut head, _) = failure.into_response().into_parts();
    head.headers.remove(http::header::CONTENT_LENGTH);
    let body = Json(report).into_response().into_body();
    Response::from_parts(head, body)
}

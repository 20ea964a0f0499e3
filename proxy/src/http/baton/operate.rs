//! `GET /baton/config`: what the file and the flags set, and what a reload has left for a restart; `GET /baton/config/changes`: what a
//! reload would change; `GET /baton/log`: the last lines of the log. Never a secret. All need an operator's key, also where the state does
//! not: without keys everybody could read them.

use axum::extract::State;
use axum::{Extension, Json};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::RequestError;
use crate::http::openapi::Operation;
use crate::http::{HttpFailure, HttpState};
use crate::log_queue::LOG;
use crate::observe::{ConfigReport, ReloadPreview};
use crate::request::caller::{Caller, CallerRole};

/// The reply to `GET /baton/log`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub(super) struct LogTail {
    /// The oldest first: at most 200 of the endpoint's own process, with at most 64 KiB together.
    lines: Vec<String>,
}

pub(super) fn config_operation() -> Operation {
    Operation::new("What the configuration sets, and what waits for a restart").replies::<ConfigReport>()
}

pub(super) fn config_changes_operation() -> Operation {
    Operation::new("What a reload of the configuration would change").replies::<ReloadPreview>().fails(&[503])
}

pub(super) fn log_operation() -> Operation {
    Operation::new("The last lines of the log").replies::<LogTail>()
}

pub(super) async fn config(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<ConfigReport>, HttpFailure> {
    must_operate(&caller, "see the configuration")?;
    Ok(Json(state.backend.config()))
}

pub(super) async fn config_changes(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
) -> Result<Json<ReloadPreview>, HttpFailure> {
    must_operate(&caller, "see the configuration")?;
    state.backend.config_changes().await.map(Json).map_err(|busy| HttpFailure::not_now(busy.to_string()))
}

pub(super) async fn log(Extension(caller): Extension<Caller>) -> Result<Json<LogTail>, HttpFailure> {
    must_operate(&caller, "see the log")?;
    Ok(Json(LogTail { lines: LOG.recent() }))
}

fn must_operate(caller: &Caller, what: &'static str) -> Result<(), HttpFailure> {
    match caller.role {
        CallerRole::Operator => Ok(()),
        CallerRole::Anyone | CallerRole::Guest => {
            Err(HttpFailure::of_request(&RequestError::OperatorOnly { what }, &caller.request_id))
        }
    }
}

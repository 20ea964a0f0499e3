//! `GET /metrics`. Callers that may see `/baton/state` may scrape.

use axum::Extension;
use axum::extract::State;
use axum::response::IntoResponse;
use http::header;

use super::state::may_observe;
use crate::http::HttpState;
use crate::http::errors::HttpFailure;
use crate::http::openapi::Operation;
use crate::observe::metrics::CONTENT_TYPE;
use crate::request::caller::Caller;

pub(super) fn operation() -> Operation {
    Operation::new("Metrics, in OpenMetrics' text format").replies_text(CONTENT_TYPE).answered_while_stopping()
}

pub(super) async fn scrape(
    State(state): State<HttpState>,
    Extension(caller): Extension<Caller>,
) -> Result<impl IntoResponse, HttpFailure> {
    may_observe(&caller)?;
    Ok(([(header::CONTENT_TYPE, CONTENT_TYPE)], state.backend.metrics()))
}

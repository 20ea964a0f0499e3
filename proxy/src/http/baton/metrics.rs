//! `GET /metrics`, and the counter of replies. Callers that may see `/baton/state` may scrape.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::header;

use super::state::may_observe;
use crate::http::errors::HttpFailure;
use crate::http::openapi::Operation;
use crate::http::{HttpBackend, HttpState};
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

/// Counts every reply by its route's pattern. Paths as clients send them would create unbounded labels.
pub(in crate::http) async fn count(
    State(backend): State<Arc<dyn HttpBackend>>,
    request: Request,
    next: Next,
) -> Response {
    let route = request.extensions().get::<MatchedPath>().cloned();
    let response = next.run(request).await;
    backend.replied(route.as_ref().map_or("other", MatchedPath::as_str), response.status().as_u16());
    response
}

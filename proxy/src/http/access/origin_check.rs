//! Refuses web pages except those of this machine, of desktop apps and of configured origins.
//!
//! A browser lets any page send a request and only hides the reply from it, so any page could make this server compute.
//! A request whose reply CORS would hide is therefore refused before any work; the same list decides both. Callers that
//! are not browsers send no `Origin` and are not affected.

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use baton_schemas::ErrorCode;
use baton_schemas::openai::{ErrorBody, ErrorKind};
use http::{StatusCode, header};

use super::SharedAccess;
use crate::http::dialect::Dialect;
use crate::http::errors::HttpFailure;

/// Answers 403 to a page whose origin is not allowed, preflights included.
pub(in crate::http) async fn check(State(access): State<SharedAccess>, request: Request, next: Next) -> Response {
    let access = access.load_full();
    let origins = request.headers().get_all(header::ORIGIN);
    if origins.iter().all(|origin| access.origins.allows(origin)) {
        next.run(request).await
    } else {
        origin_not_allowed().respond(Dialect::of(request.uri().path()))
    }
}

fn origin_not_allowed() -> HttpFailure {
    let message =
        "Web pages of this origin may not use this server. Its operator can add the origin to allowed_origins.";
    let error = ErrorBody::new(ErrorKind::Permission, message).code(ErrorCode::OriginNotAllowed);
    HttpFailure::new(StatusCode::FORBIDDEN, error)
}

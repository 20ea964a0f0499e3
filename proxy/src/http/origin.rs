//! Refuses web pages that may not call: all but those of this machine, of desktop apps, and of configured origins.
//!
//! A browser lets any page send a request and only hides the reply from it, so a page elsewhere could make this server
//! compute. A request whose reply CORS would hide is therefore refused before any work: one list decides both. Callers
//! that are not browsers send no `Origin` and are not affected.

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use baton_schemas::openai::{ErrorBody, ErrorKind};
use http::{StatusCode, header};

use super::access::SharedAccess;
use super::dialect::Dialect;
use super::errors::Failure;

/// Answers 403 to a page that may not call, preflights included.
pub async fn check(State(access): State<SharedAccess>, request: Request, next: Next) -> Response {
    let access = access.load_full();
    let origins = request.headers().get_all(header::ORIGIN);
    if origins.iter().all(|origin| access.origins.allows(origin)) {
        next.run(request).await
    } else {
        origin_not_allowed().respond(Dialect::of(request.uri().path()))
    }
}

fn origin_not_allowed() -> Failure {
    let message =
        "Web pages of this origin may not use this server. Its operator can add the origin to allowed_origins.";
    let error = ErrorBody::new(ErrorKind::Permission, message).code("origin_not_allowed");
    Failure::new(StatusCode::FORBIDDEN, error)
}

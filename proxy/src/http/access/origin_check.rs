//! Refuses web pages except those of this machine, of desktop apps and of configured origins.
//!
//! A browser lets any page send a request and only hides the reply from it, so any page could make this server compute.
//! A request whose reply CORS would hide is therefore refused before any work; the same list decides both. Callers that
//! are not browsers send no `Origin` and are not affected.

use axum::extract::Request;
use baton_schemas::ErrorCode;
use baton_schemas::openai::{ErrorBody, ErrorKind};
use http::{StatusCode, header};

use super::SharedAccess;
use crate::http::errors::HttpFailure;

/// Refuses a page whose origin is not allowed, preflights included. Errors: 403.
pub(in crate::http) fn check(access: &SharedAccess, request: &Request) -> Result<(), HttpFailure> {
    let mut origins = request.headers().get_all(header::ORIGIN).iter();
    match origins.all(|origin| access.load().origins.allows(origin)) {
        true => Ok(()),
        false => Err(origin_not_allowed()),
    }
}

fn origin_not_allowed() -> HttpFailure {
    let message =
        "Web pages of this origin may not use this server. Its operator can add the origin to allowed_origins.";
    let error = ErrorBody::new(ErrorKind::Permission, message).code(ErrorCode::OriginNotAllowed);
    HttpFailure::new(StatusCode::FORBIDDEN, error)
}

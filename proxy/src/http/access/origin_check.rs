//! Refuses web pages except this server's own, those of this machine, of desktop apps and of configured origins.
//!
//! A browser lets any page send a request and only hides the reply from it, so any page could make this server compute.
//! A request whose reply CORS would hide is therefore refused before any work; the same list decides both. Callers that
//! are not browsers send no `Origin` and are not affected.

use axum::extract::Request;
use baton_schemas::ErrorCode;
use baton_schemas::openai::{ErrorBody, ErrorKind};
use http::{HeaderValue, StatusCode, Uri, header};

use super::SharedAccess;
use super::allowed_hosts::AllowedHosts;
use crate::http::errors::HttpFailure;

/// Refuses a page whose origin is not allowed, preflights included. Errors: 403.
pub(in crate::http) fn check(access: &SharedAccess, request: &Request) -> Result<(), HttpFailure> {
    let access = access.load();
    let mut origins = request.headers().get_all(header::ORIGIN).iter();
    match origins.all(|origin| access.origins.allows(origin) || is_own_page(&access.hosts, request, origin)) {
        true => Ok(()),
        false => Err(origin_not_allowed()),
    }
}

/// Returns true for a page of this server itself, as other machines reach it: by an address, or by a name of this machine. A
/// browser sends both the page's origin and the host that it asks. Under another name the page could be a stranger's, whose
/// name service has made the name resolve to this server after the page was loaded.
fn is_own_page(hosts: &AllowedHosts, request: &Request, origin: &HeaderValue) -> bool {
    let asked = request.uri().authority().cloned().or_else(|| {
        let host = request.headers().get(header::HOST)?;
        host.to_str().ok()?.parse().ok()
    });
    let Some((asked, origin)) = asked.zip(origin.to_str().ok().and_then(|origin| origin.parse::<Uri>().ok())) else {
        return false;
    };
    let is_same = origin.authority().is_some_and(|authority| authority.as_str().eq_ignore_ascii_case(asked.as_str()));
    is_same && hosts.is_own(asked.host())
}

fn origin_not_allowed() -> HttpFailure {
    let message =
        "Web pages of this origin may not use this server. Its operator can add the origin to allowed_origins.";
    let error = ErrorBody::new(ErrorKind::Permission, message).code(ErrorCode::OriginNotAllowed);
    HttpFailure::new(StatusCode::FORBIDDEN, error)
}

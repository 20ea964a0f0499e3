//! The defence against DNS rebinding (CVE-2024-28224). A page whose name is made to resolve to 127.0.0.1 reaches a
//! loopback listener, but its browser still sends the page's own name in `Host`. A listener that other machines can
//! reach accepts any name, but only one per request (RFC 9112, section 3.2).

use axum::extract::Request;
use baton_schemas::ErrorCode;
use baton_schemas::openai::{ErrorBody, ErrorKind};
use http::uri::Authority;
use http::{StatusCode, Version, header};

use super::SharedAccess;
use crate::http::errors::HttpFailure;

/// The host check of one listener. The allowed names can change while it serves.
#[derive(Clone)]
pub struct HostCheck {
    /// Holds the allowed names.
    pub access: SharedAccess,
    /// False on a listener that other machines can reach: it accepts every name.
    pub checks_names: bool,
}

/// Refuses a request without exactly one valid host, and where the listener checks names, a host that is not allowed.
/// Errors: 400 or 403.
pub(in crate::http) fn check(host: &HostCheck, request: &Request) -> Result<(), HttpFailure> {
    let authority = authority(request).map_err(bad_host_header)?;
    // Only HTTP/1.0 allows a request without a host, and no browser uses it.
    let is_allowed = |authority: &Authority| host.access.load().hosts.allows(authority.host());
    match !host.checks_names || authority.as_ref().is_none_or(is_allowed) {
        true => Ok(()),
        false => Err(host_not_allowed()),
    }
}

/// Returns the host that a request names: in the URI with HTTP/2, in a header with HTTP/1.
fn authority(request: &Request) -> Result<Option<Authority>, &'static str> {
    if let Some(authority) = request.uri().authority() {
        return Ok(Some(authority.clone()));
    }
    let mut headers = request.headers().get_all(header::HOST).iter();
    match (headers.next(), headers.next()) {
        (Some(_), Some(_)) => Err("The request has more than one 'Host' header."),
        (None, _) if request.version() < Version::HTTP_11 => Ok(None),
        (None, _) => Err("The request has no 'Host' header."),
        (Some(host), None) => match host.to_str().ok().and_then(|host| host.parse().ok()) {
            Some(authority) => Ok(Some(authority)),
            None => Err("The request's 'Host' header is not HOST or HOST:PORT."),
        },
    }
}

fn bad_host_header(problem: &str) -> HttpFailure {
    HttpFailure::new(StatusCode::BAD_REQUEST, ErrorBody::new(ErrorKind::InvalidRequest, problem))
}

fn host_not_allowed() -> HttpFailure {
    let message = "This server listens on loopback and only answers under local names. \
                   Its operator can add the name in 'Host' to allowed_hosts.";
    let error = ErrorBody::new(ErrorKind::Permission, message).code(ErrorCode::HostNotAllowed);
    HttpFailure::new(StatusCode::FORBIDDEN, error)
}

//! `x-baton-route`: where a request ran and why.

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::admission::RequestAdmission;

pub const X_BATON_ROUTE: HeaderName = HeaderName::from_static("x-baton-route");

/// Adds the route of a request to the headers. A route that is not a valid header value is left out: the reply matters
/// more.
pub(in crate::http) fn insert_route(headers: &mut HeaderMap, route: &str) {
    if let Ok(value) = HeaderValue::from_str(route) {
        headers.insert(X_BATON_ROUTE, value);
    }
}

/// The header of a stream whose head leaves before the route is known: the request still waits, at this place of the queue if
/// it is not admitted, or for a machine that is being woken. The stream names the route later.
pub(in crate::http) fn not_known_yet(admission: &RequestAdmission) -> String {
    let place = admission.position().map(|place| format!("; place={place}")).unwrap_or_default();
    let waking = if admission.is_waking() { "; waking" } else { "" };
    format!("pending{place}{waking}")
}

//! `x-baton-route`: where a request ran and why.

use http::{HeaderMap, HeaderName, HeaderValue};

pub const X_BATON_ROUTE: HeaderName = HeaderName::from_static("x-baton-route");

/// Adds the route of a request to the headers. A route that is not a valid header value is left out: the reply matters
/// more.
pub(in crate::http) fn insert_route(headers: &mut HeaderMap, route: &str) {
    if let Ok(value) = HeaderValue::from_str(route) {
        headers.insert(X_BATON_ROUTE, value);
    }
}

/// The header of a stream whose head leaves before the route is known: the request still waits, at this place of the queue if
/// it is not admitted. The stream names the route later.
pub(in crate::http) fn not_known_yet(place: Option<usize>) -> String {
    place.map_or_else(|| "pending".to_owned(), |place| format!("pending; place={place}"))
}

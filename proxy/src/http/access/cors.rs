//! CORS: lets allowed pages read our replies. Answers preflights and adds the headers that browsers check.
//!
//! Credentials are never allowed, so an echoed origin exposes only the reply to the page's own request.

use std::time::Duration;

use http::{HeaderName, Method, header};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use super::SharedAccess;
use crate::http::edge::request_id::X_REQUEST_ID;
use crate::http::reply::route_header::X_BATON_ROUTE;
use crate::http::reply::warning::X_BATON_WARNING;

/// Browsers cap this at 2 h. Each cached preflight saves a round trip.
const MAX_AGE: Duration = Duration::from_secs(2 * 60 * 60);

/// Our response headers that a page's script may read.
const EXPOSED: [HeaderName; 12] = [
    X_REQUEST_ID,
    X_BATON_ROUTE,
    X_BATON_WARNING,
    header::RETRY_AFTER,
    HeaderName::from_static("retry-after-ms"),
    HeaderName::from_static("x-should-retry"),
    HeaderName::from_static("x-ratelimit-limit-requests"),
    HeaderName::from_static("x-ratelimit-remaining-requests"),
    HeaderName::from_static("x-ratelimit-reset-requests"),
    HeaderName::from_static("x-ratelimit-limit-tokens"),
    HeaderName::from_static("x-ratelimit-remaining-tokens"),
    HeaderName::from_static("x-ratelimit-reset-tokens"),
];

/// Answers preflights and adds CORS headers to replies.
pub(in crate::http) fn layer(access: SharedAccess) -> CorsLayer {
    CorsLayer::new()
        .allow_origin(AllowOrigin::predicate(move |origin, _| access.load().origins.allows(origin)))
        .allow_methods([Method::GET, Method::HEAD, Method::POST, Method::OPTIONS])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(EXPOSED)
        .max_age(MAX_AGE)
}

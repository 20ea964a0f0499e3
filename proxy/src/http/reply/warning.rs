//! `x-baton-warning`: what a request asks for and does not get, and what a reply lacks. A response may have several.

use baton_upstream::LeftOut;
use http::{HeaderMap, HeaderName, HeaderValue};

pub(in crate::http) const X_BATON_WARNING: HeaderName = HeaderName::from_static("x-baton-warning");

/// Adds a warning. One that is not a valid header value is left out: the reply matters more.
pub(in crate::http) fn warn(headers: &mut HeaderMap, warning: &str) {
    if let Ok(value) = HeaderValue::try_from(warning) {
        headers.append(X_BATON_WARNING, value);
    }
}

/// Adds a warning of what an upstream's reply has and no dialect shows.
pub(in crate::http) fn warn_left_out(headers: &mut HeaderMap, left_out: &[LeftOut]) {
    if !left_out.is_empty() {
        warn(headers, &left_out_warning(left_out));
    }
}

pub(super) fn left_out_warning(left_out: &[LeftOut]) -> String {
    let words: Vec<&str> = left_out.iter().map(|left_out| left_out.as_str()).collect();
    format!("parts of the upstream's reply are not passed on: {}", words.join(", "))
}

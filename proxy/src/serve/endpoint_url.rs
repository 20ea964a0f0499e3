//! The address of a running endpoint, as people type it.

use super::CommandFailure;
use crate::config::DEFAULT_LISTEN;

/// Returns an address as a URL, without a slash or `/v1` at its end. Errors: it is not one.
pub fn endpoint_url(address: &str) -> Result<String, CommandFailure> {
    let scheme = if address.contains("://") { "" } else { "http://" };
    let base = format!("{scheme}{}", address.trim_end_matches('/'));
    // OpenAI's clients take the address with /v1, so people paste it here.
    let base = base.strip_suffix("/v1").unwrap_or(&base).to_owned();
    let is_url = reqwest::Url::parse(&base).is_ok_and(|url| {
        let is_plain = url.username().is_empty() && url.password().is_none() && url.query().is_none();
        matches!(url.scheme(), "http" | "https") && url.has_host() && is_plain
    });
    // The message does not repeat the address, which may hold a password.
    let wrong = || {
        CommandFailure(format!("an endpoint is HOST:PORT, like {DEFAULT_LISTEN}, or a URL without a user or a query"))
    };
    is_url.then_some(base).ok_or_else(wrong)
}

//! Which web pages may read our replies: those of this machine and of desktop apps, and those configured.
//!
//! Credentials are never allowed, so an echoed origin gives a page nothing but the reply to what it sent itself.

use std::net::IpAddr;
use std::time::Duration;

use http::{HeaderName, HeaderValue, Method, Uri, header};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// Schemes of desktop shells; no web page can have them.
const APP_SCHEMES: [&str; 3] = ["app://", "tauri://", "vscode-webview://"];

/// Browsers cap it at 2 h; each preflight it saves is a round trip.
const MAX_AGE: Duration = Duration::from_secs(2 * 60 * 60);

/// Headers of ours that a page's script may read.
const EXPOSED: [HeaderName; 5] = [
    super::request_id::X_REQUEST_ID,
    super::openai::X_BATON_ROUTE,
    header::RETRY_AFTER,
    HeaderName::from_static("retry-after-ms"),
    HeaderName::from_static("x-should-retry"),
];

/// Answers preflights and marks replies.
pub fn layer(configured: &[String]) -> CorsLayer {
    let configured = configured.to_vec();
    let allowed = move |origin: &HeaderValue| origin.to_str().is_ok_and(|origin| is_allowed(origin, &configured));
    CorsLayer::new()
        .allow_origin(AllowOrigin::predicate(move |origin, _| allowed(origin)))
        .allow_methods([Method::GET, Method::HEAD, Method::POST, Method::OPTIONS])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(EXPOSED)
        .max_age(MAX_AGE)
}

fn is_allowed(origin: &str, configured: &[String]) -> bool {
    APP_SCHEMES.iter().any(|scheme| origin.starts_with(scheme))
        || is_local_page(origin)
        || configured.iter().any(|allowed| allowed == "*" || allowed.trim_end_matches('/') == origin)
}

/// A page that this machine serves itself, on any port.
fn is_local_page(origin: &str) -> bool {
    let Ok(uri) = origin.parse::<Uri>() else { return false };
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        return false;
    }
    let host = uri.host().unwrap_or_default();
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    host == "localhost" || host.ends_with(".localhost") || address.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(origin: &str, expected: bool) {
        let configured = ["https://chat.example.com/".to_owned()];
        assert_eq!(is_allowed(origin, &configured), expected, "{origin}");
    }

    #[test]
    fn only_local_pages_apps_and_configured_origins_may_read() {
        check("http://localhost", true);
        check("http://localhost:3000", true);
        check("https://127.0.0.1:3000", true);
        check("http://[::1]:3000", true);
        check("http://tauri.localhost", true);
        check("app://obsidian.md", true);
        check("tauri://localhost", true);
        check("vscode-webview://1a2b", true);
        check("https://chat.example.com", true);
        check("https://chat.example.com.evil.com", false);
        check("http://chat.example.com", false);
        check("https://example.com", false);
        check("http://localhost.evil.com", false);
        check("http://127.0.0.1.evil.com", false);
        check("http://evil.com#localhost", false);
        check("ftp://localhost", false);
        check("null", false);
        check("", false);
        assert!(is_allowed("https://any.where", &["*".to_owned()]));
    }
}

//! The web pages that may call this server.

use std::net::IpAddr;
use std::sync::Arc;

use http::{HeaderValue, Uri};

/// Schemes of desktop shells; no web page can have them.
const APP_SCHEMES: [&str; 3] = ["app://", "tauri://", "vscode-webview://"];

/// The origins that may call this server.
#[derive(Debug, Clone)]
pub struct AllowedOrigins(Arc<[String]>);

impl AllowedOrigins {
    /// Allows local pages, desktop apps and these origins, each as in the `Origin` header, or `*` for all.
    pub fn new(configured: &[String]) -> Self {
        AllowedOrigins(configured.iter().map(|origin| origin.trim_end_matches('/').to_ascii_lowercase()).collect())
    }

    /// Returns true if a page of this origin may call. Scheme and host are compared without case.
    pub fn allows(&self, origin: &HeaderValue) -> bool {
        let Ok(origin) = origin.to_str() else { return false };
        let origin = origin.to_ascii_lowercase();
        APP_SCHEMES.iter().any(|scheme| origin.starts_with(scheme))
            || is_local_page(&origin)
            || self.0.iter().any(|allowed| allowed == "*" || *allowed == origin)
    }
}

/// Checks an entry of `allowed_origins`. Errors: no browser would send such an origin.
pub fn check_configured(origin: &str) -> Result<(), String> {
    if matches!(origin, "*" | "null") {
        return Ok(());
    }
    let uri: Option<Uri> = origin.parse().ok();
    let bare = uri.filter(|uri| uri.scheme().is_some() && uri.host().is_some_and(|host| !host.is_empty()));
    let bare = bare.filter(|uri| !uri.authority().is_some_and(|authority| authority.as_str().contains(['*', '@'])));
    match bare {
        Some(uri) if uri.path().trim_matches('/').is_empty() && uri.query().is_none() => Ok(()),
        _ => Err(format!("{origin:?} is not an origin like \"https://chat.example.com\", \"null\" or \"*\"")),
    }
}

/// Returns true for a page that this machine serves itself, on any port.
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

    fn allows(configured: &str, origin: &str) -> bool {
        AllowedOrigins::new(&[configured.to_owned()]).allows(&HeaderValue::from_str(origin).unwrap())
    }

    fn check(origin: &str, expected: bool) {
        assert_eq!(allows("https://Chat.example.com/", origin), expected, "{origin}");
    }

    #[test]
    fn only_local_pages_apps_and_configured_origins_may_call() {
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
        assert!(allows("*", "https://any.where") && allows("null", "null"));
    }

    #[test]
    fn an_entry_that_no_browser_would_send_is_refused() {
        let check = |origin: &str, expected| assert_eq!(check_configured(origin).is_ok(), expected, "{origin}");
        check("https://chat.example.com", true);
        check("https://chat.example.com:8443/", true);
        check("http://192.168.1.5:3000", true);
        check("moz-extension://1a2b", true);
        check("null", true);
        check("*", true);
        check("", false);
        check("chat.example.com", false);
        check("https://chat.example.com/ui", false);
        check("https://chat.example.com?x", false);
        check("https://", false);
        check("https://*.example.com", false);
        check("https://two words", false);
    }
}

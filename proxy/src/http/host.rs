//! The defence against DNS rebinding (CVE-2024-28224): a page whose name suddenly resolves to 127.0.0.1 reaches a
//! loopback listener, but its browser still sends the page's own name in `Host`.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use baton_schemas::openai::{ErrorBody, ErrorKind};
use http::uri::Authority;
use http::{StatusCode, header};

use super::errors::Failure;

/// Names that nobody can register: they never resolve by a stranger's DNS.
const PRIVATE_SUFFIXES: [&str; 3] = [".local", ".localhost", ".internal"];

/// The names under which this machine answers, in lower case.
pub struct AllowedHosts(Vec<String>);

impl AllowedHosts {
    /// The machine's own name and the configured ones.
    pub fn new(configured: &[String]) -> Self {
        let own = rustix::system::uname().nodename().to_string_lossy().into_owned();
        AllowedHosts::of(configured.iter().cloned().chain([own]))
    }

    fn of(names: impl IntoIterator<Item = String>) -> Self {
        AllowedHosts(names.into_iter().map(|name| normalized(&name)).filter(|name| !name.is_empty()).collect())
    }

    fn allows(&self, host: &str) -> bool {
        let name = normalized(host);
        // An IPv6 address stands in brackets.
        let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(&name);
        if let Ok(address) = address.parse::<IpAddr>() {
            return address.to_canonical().is_loopback();
        }
        name == "localhost"
            || PRIVATE_SUFFIXES.iter().any(|suffix| name.len() > suffix.len() && name.ends_with(suffix))
            || self.0.contains(&name)
    }
}

/// Answers 403 to a request that was meant for another host.
pub async fn check(State(hosts): State<Arc<AllowedHosts>>, request: Request, next: Next) -> Response {
    // No name at all is HTTP/1.0 or a tool on a socket. Every browser sends one.
    let Some(host) = named(&request) else { return next.run(request).await };
    match host.parse::<Authority>() {
        Ok(authority) if hosts.allows(authority.host()) => next.run(request).await,
        _ => refused().into_response(),
    }
}

/// HTTP/2 has it in the URI, HTTP/1 in a header. A header that is not text is a name that is never allowed.
fn named(request: &Request) -> Option<&str> {
    match request.uri().authority() {
        Some(authority) => Some(authority.as_str()),
        None => request.headers().get(header::HOST).map(|host| host.to_str().unwrap_or_default()),
    }
}

fn refused() -> Failure {
    let message = "This server only answers under local names. Add the name in 'Host' to its configured hosts.";
    let error = ErrorBody::new(ErrorKind::Permission, message).code("host_not_allowed");
    Failure::new(StatusCode::FORBIDDEN, error)
}

/// Lower case, without the root's dot.
fn normalized(name: &str) -> String {
    name.trim_end_matches('.').to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(host: &str, expected: bool) {
        let hosts = AllowedHosts::of(["Spark".to_owned(), "llm.example.com".to_owned(), String::new()]);
        let allowed = host.parse::<Authority>().is_ok_and(|authority| hosts.allows(authority.host()));
        assert_eq!(allowed, expected, "{host}");
    }

    #[test]
    fn only_this_machines_names_are_answered() {
        check("localhost", true);
        check("LOCALHOST.:8080", true);
        check("127.0.0.1:8080", true);
        check("127.8.9.1", true);
        check("[::1]:8080", true);
        check("[::ffff:127.0.0.1]", true);
        check("tauri.localhost", true);
        check("mac.local:1", true);
        check("host.docker.internal", true);
        check("spark:9000", true);
        check("llm.example.com", true);
        check("evil.example.com", false);
        check("example.com", false);
        check("127.0.0.1.evil.com", false);
        check("localhost.evil.com", false);
        check("evillocalhost", false);
        check(".local", false);
        check("192.168.1.5", false);
        check("0.0.0.0", false);
        check("[::2]", false);
        check("", false);
        check("a b", false);
    }
}

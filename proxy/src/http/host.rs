//! The defence against DNS rebinding (CVE-2024-28224): a page whose name suddenly resolves to 127.0.0.1 reaches a
//! loopback listener, but its browser still sends the page's own name in `Host`. A listener that others can reach
//! answers under any name, but to one name at a time (RFC 9112, section 3.2).

use std::net::IpAddr;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use baton_schemas::openai::{ErrorBody, ErrorKind};
use http::uri::Authority;
use http::{StatusCode, Version, header};

use super::access::SharedAccess;
use super::dialect::Dialect;
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
            return address.to_canonical().is_loopback() || self.0.contains(&name);
        }
        name == "localhost"
            || PRIVATE_SUFFIXES.iter().any(|suffix| name.len() > suffix.len() && name.ends_with(suffix))
            || self.0.contains(&name)
    }
}

/// What is wrong with an entry of `allowed_hosts`, if anything is.
pub fn check_configured(name: &str) -> Result<(), String> {
    let bare = name.parse::<Authority>().is_ok_and(|authority| authority.host() == name && !name.contains(['*', '@']));
    if bare { Ok(()) } else { Err(format!("{name:?} is not a host name like \"llm.example.com\": no scheme, no port")) }
}

/// A listener's own part of the check: its names can change while it serves, whether they are asked for cannot.
#[derive(Clone)]
pub struct Names {
    /// The names, among the rest.
    pub access: SharedAccess,
    /// Whether they are checked: where the listener is bound to loopback.
    pub checked: bool,
}

/// Answers 400 to a request that does not say which host it is for, and 403 to one for another host than these, where
/// that is checked.
pub async fn check(State(names): State<Names>, request: Request, next: Next) -> Response {
    let dialect = Dialect::of(request.uri().path());
    let named = match named(&request) {
        Ok(named) => named,
        Err(problem) => return unclear(problem).respond(dialect),
    };
    // Only HTTP/1.0, which no browser speaks, may come without a name.
    let is_allowed = |authority: &Authority| names.access.load().hosts.allows(authority.host());
    if names.checked && !named.as_ref().is_none_or(is_allowed) {
        return refused().respond(dialect);
    }
    next.run(request).await
}

/// HTTP/2 has it in the URI, HTTP/1 in a header.
fn named(request: &Request) -> Result<Option<Authority>, &'static str> {
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

fn unclear(problem: &str) -> Failure {
    Failure::new(StatusCode::BAD_REQUEST, ErrorBody::new(ErrorKind::InvalidRequest, problem))
}

fn refused() -> Failure {
    let message = "This server listens on loopback and only answers under local names. \
                   Its operator can add the name in 'Host' to allowed_hosts.";
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
        let names = ["Spark", "llm.example.com", "192.168.1.7", ""];
        let hosts = AllowedHosts::of(names.map(str::to_owned));
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
        check("192.168.1.7:80", true);
        check("192.168.1.5", false);
        check("0.0.0.0", false);
        check("[::2]", false);
        check("", false);
        check("a b", false);
    }

    #[test]
    fn an_entry_that_no_request_could_match_is_refused() {
        let check = |name: &str, expected| assert_eq!(check_configured(name).is_ok(), expected, "{name}");
        check("llm.example.com", true);
        check("spark", true);
        check("192.168.1.5", true);
        check("[fe80::1]", true);
        check("", false);
        check("llm.example.com:8080", false);
        check("https://llm.example.com", false);
        check("*.example.com", false);
        check("two words", false);
    }
}

//! The names in `Host` that a loopback listener accepts.

use std::net::IpAddr;

use http::uri::Authority;

/// Suffixes that cannot be registered, so a stranger's DNS never resolves them.
const PRIVATE_SUFFIXES: [&str; 3] = [".local", ".localhost", ".internal"];

/// The accepted names, in lower case.
pub struct AllowedHosts(Vec<String>);

impl AllowedHosts {
    /// Accepts the configured names and this machine's own.
    pub fn new(configured: &[String]) -> Self {
        let own = rustix::system::uname().nodename().to_string_lossy().into_owned();
        AllowedHosts::of(configured.iter().cloned().chain([own]))
    }

    fn of(names: impl IntoIterator<Item = String>) -> Self {
        AllowedHosts(names.into_iter().map(|name| normalized(&name)).filter(|name| !name.is_empty()).collect())
    }

    /// Returns true if nobody else can make `host`, without port, resolve to this machine: an address, or a name of its
    /// own. In a local network anybody answers for other names of `.local`.
    pub fn is_own(&self, host: &str) -> bool {
        let name = normalized(host);
        let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(&name);
        let own = name.strip_suffix(".local").unwrap_or(&name);
        address.parse::<IpAddr>().is_ok()
            || name == "localhost"
            || name.ends_with(".localhost")
            || self.0.iter().any(|known| *known == name || known == own)
    }

    /// Returns true if `host`, without port, is accepted.
    pub fn allows(&self, host: &str) -> bool {
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

/// Checks an entry of `allowed_hosts`. Errors: the entry is not a bare host name.
pub fn check_configured(name: &str) -> Result<(), String> {
    let bare = name.parse::<Authority>().is_ok_and(|authority| authority.host() == name && !name.contains(['*', '@']));
    if bare { Ok(()) } else { Err(format!("{name:?} is not a host name like \"llm.example.com\": no scheme, no port")) }
}

/// Converts to lower case and removes the trailing dot of the DNS root.
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
    fn pages_are_this_machines_own_by_addresses_and_its_own_names() {
        let hosts = AllowedHosts::of(["Spark", "llm.example.com"].map(str::to_owned));
        for own in ["192.168.1.5", "[fe80::1]", "localhost", "a.localhost", "spark", "SPARK.local.", "llm.example.com"]
        {
            assert!(hosts.is_own(own), "{own}");
        }
        for other in ["evil.local", "host.internal", "evil.example.com", "spark.evil.com", ".local", ""] {
            assert!(!hosts.is_own(other), "{other}");
        }
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

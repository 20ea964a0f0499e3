//! Addresses of nodes: `HOST:PORT` or a URL.

/// A server's address as a URL: without a scheme it is plain HTTP.
pub fn node_url(address: &str) -> String {
    let url = if address.contains("://") { address.to_owned() } else { format!("http://{address}") };
    url.trim_end_matches('/').to_owned()
}

/// Returns true if the address is `HOST:PORT` or a URL of a host, without a user, a path or a query. Nobody listens on port 0.
pub(super) fn is_node_address(address: &str) -> bool {
    // An address without a scheme must name its port: no node listens on 80.
    let has_port = || address.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok_and(|port| port != 0));
    let url = reqwest::Url::parse(&node_url(address));
    url.is_ok_and(|url| {
        let is_plain = url.username().is_empty() && url.password().is_none() && url.query().is_none();
        matches!(url.scheme(), "http" | "https")
            && url.has_host()
            && url.port() != Some(0)
            && is_plain
            && url.path() == "/"
    }) && (address.contains("://") || has_port())
}

//! The addresses at which servers are looked for.

use std::net::IpAddr;

use reqwest::Url;

use crate::config::{AdoptHost, AdoptionConfig};

/// The ports that servers have by default: Ollama, LM Studio, vLLM, llama-server and mlx_lm.server; then those that people take
/// where Baton has 8080.
const PORTS: [u16; 9] = [11434, 1234, 8000, 8080, 8081, 8082, 8083, 8084, 8085];

/// The most places: a paired machine may have several addresses.
const MAX_PLACES: usize = 1_024;

/// An address that is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerPlace {
    /// The URL without a path.
    pub url: String,
    /// The machine's name or address.
    pub host: String,
    /// The port.
    pub port: u16,
    /// It is this machine.
    pub is_loopback: bool,
}

impl ServerPlace {
    fn new(host: &str, port: u16) -> ServerPlace {
        let address = host.parse::<IpAddr>().ok();
        let is_loopback = address.map_or_else(|| host.eq_ignore_ascii_case("localhost"), |ip| ip.is_loopback());
        ServerPlace { url: AdoptHost::url(host, port), host: host.to_owned(), port, is_loopback }
    }
}

/// This machine and `paired` ones if servers there are adopted, and the machines that the operator names; each place once, and never
/// one of this endpoint's own ports on loopback.
pub(super) fn places(
    config: &AdoptionConfig,
    paired: impl Iterator<Item = String>,
    own_ports: &[u16],
) -> Vec<ServerPlace> {
    let loopback = config.adopts.then(|| "127.0.0.1".to_owned());
    let known_ports = |host: String| PORTS.map(|port| ServerPlace::new(&host, port));
    let named = config.hosts.iter().filter_map(|host| AdoptHost::parse(host));
    let named = named.flat_map(|AdoptHost { host, port }| match port {
        Some(port) => vec![ServerPlace::new(&host, port)],
        None => PORTS.map(|port| ServerPlace::new(&host, port)).to_vec(),
    });
    let paired = paired.filter(|_| config.adopts);
    let all = loopback.into_iter().chain(paired).flat_map(known_ports).chain(named);
    let mut places: Vec<ServerPlace> = Vec::new();
    for place in all {
        let is_own = place.is_loopback && own_ports.contains(&place.port);
        if !is_own && places.len() < MAX_PLACES && !places.iter().any(|known| is_same_server(&known.url, &place.url)) {
            places.push(place);
        }
    }
    places
}

/// The host of a URL.
pub(super) fn host_of(url: &str) -> Option<String> {
    let host = Url::parse(url).ok()?.host_str()?.to_owned();
    Some(host.trim_matches(['[', ']']).to_owned())
}

/// Returns true if two URLs lead to the same port of the same machine, as far as their texts tell. All loopback addresses count as
/// one.
pub(super) fn is_same_server(one: &str, other: &str) -> bool {
    let place = |url: &str| {
        let port = Url::parse(url).ok()?.port_or_known_default()?;
        Some(ServerPlace::new(&host_of(url)?, port))
    };
    match (place(one), place(other)) {
        (Some(one), Some(other)) => {
            let is_same_host = one.host.eq_ignore_ascii_case(&other.host) || (one.is_loopback && other.is_loopback);
            one.port == other.port && is_same_host
        }
        _ => false,
    }
}

//! How prefill nodes are reached: at a configured address, or at the best of those that were found in the network.
//!
//! A machine may have several networks: Wi-Fi, a cable, a Thunderbolt bridge. The endpoint passes on all addresses that the
//! prefill node announces, because it cannot know which of them this node reaches. Each must prove the cluster key here
//! before the key is sent there. The order is that of the measured rates; an address that fails comes last for a while.
//!
//! The endpoint proves addresses too (`serve/discovery/sighted.rs`), and the two stay apart. It asks every announced address
//! on a schedule, to learn which nodes exist, and sees its own networks. This node asks when it pulls, and must choose by
//! rates that only it can measure. What both need is in `remote/`: the proof ([`Prover`]), the ordered addresses that a
//! client uses ([`NodePaths`]), and the look whether a port is open.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_schemas::handoff::{HandoffFailure, KvSource, LinkMeasurement};
use futures::future::join_all;
use http::StatusCode;
use reqwest::{Client, ClientBuilder};

use super::link;
use super::policy::{PullPolicy, PullSettings};
use crate::proof::NotProven;
use crate::remote::{NodeAddress, NodePaths, ProofFailure, Prover, call_failure, is_open};

/// The most addresses of one node that are tried.
const MAX_PATHS: usize = 16;

/// The most proven addresses that are kept although nothing announces them any more.
const MAX_UNANNOUNCED: usize = 4;

/// The most found nodes that are remembered; more than a cluster has.
const MAX_SOURCES: usize = 64;

/// The most sockets that are remembered: an endpoint has one engine that lends.
const MAX_SOCKETS: usize = 4;

/// How long an address that failed is tried last, or is not asked for a proof again.
const AVOIDED_FOR: Duration = Duration::from_secs(5);

/// The connections to prefill nodes.
pub(super) struct Sources {
    settings: Arc<PullSettings>,
    configured: Client,
    sockets: Mutex<HashMap<PathBuf, Client>>,
    /// By [`KvSource::node`].
    found: Mutex<HashMap<String, Arc<FoundSource>>>,
}

/// A prefill node that can be asked now.
pub(super) struct ReachedSource {
    pub(super) http: Client,
    pub(super) address: NodeAddress,
}

impl Sources {
    pub(super) fn new(settings: Arc<PullSettings>) -> reqwest::Result<Sources> {
        let configured = client(&settings).build()?;
        Ok(Sources { settings, configured, sockets: Mutex::default(), found: Mutex::default() })
    }

    /// Finds a way to a node. Errors: the key must not be sent there, or none of its addresses answers.
    pub(super) async fn reach(&self, source: &KvSource) -> Result<ReachedSource, HandoffFailure> {
        let url = source.base();
        if let Some(socket) = &source.socket {
            return Ok(ReachedSource { http: self.at_socket(socket)?, address: NodeAddress::Unix(socket.clone()) });
        }
        if source.paths.is_empty() {
            return Ok(ReachedSource { http: self.configured.clone(), address: NodeAddress::Url(url.to_owned()) });
        }
        let found = self.found(source)?;
        found.prepare(&source.paths, Unproven::InBackground).await?;
        Ok(ReachedSource {
            http: found.client.clone(),
            address: NodeAddress::Paths(url.to_owned(), found.paths.clone()),
        })
    }

    /// Measures the links to a reached node: to each address of a found one, which orders them. Returns the best.
    pub(super) async fn measure(&self, source: &KvSource) -> Result<LinkMeasurement, HandoffFailure> {
        let (url, key) = (source.base(), self.settings.cluster_key.as_str());
        if let Some(socket) = &source.socket {
            return link::measure(&self.at_socket(socket)?, url, key).await.map_err(|error| failed(url, &error));
        }
        if source.paths.is_empty() {
            return link::measure(&self.configured, url, key).await.map_err(|error| failed(url, &error));
        }
        let found = self.found(source)?;
        found.prepare(&source.paths, Unproven::Now).await?;
        let mut measured = Vec::new();
        let mut failure = HandoffFailure::PrefillDown;
        for address in found.paths.addresses() {
            let only = Arc::new(NodePaths::new(vec![address]));
            let client = client(&self.settings).dns_resolver(only).build().map_err(|_| failure)?;
            match link::measure(&client, url, key).await {
                Ok(link) => measured.push((address, link)),
                Err(error) => failure = failed(url, &error),
            }
        }
        measured.sort_by(|(_, one), (_, other)| rate(other).total_cmp(&rate(one)));
        let &(address, best) = measured.first().ok_or(failure)?;
        if measured.len() > 1 {
            tracing::info!(url, %address, bytes_per_second = rate(&best), "the fastest of several links is used for KV");
        }
        let ranks = measured.into_iter().map(|(address, _)| address).collect();
        found.lock().ranks = ranks;
        found.arrange();
        Ok(best)
    }

    /// A pull from this node has failed: another of its addresses comes first for a while.
    pub(super) fn note_failure(&self, source: &KvSource) {
        let found = self.found.lock().unwrap_or_else(PoisonError::into_inner).get(&source.node()).cloned();
        if let Some(found) = found
            && let Some(&address) = found.paths.addresses().first()
        {
            found.lock().avoided.insert(address, Instant::now());
            found.arrange();
        }
    }

    /// The client of another engine of this endpoint. Errors: only an endpoint's own engine uses sockets.
    fn at_socket(&self, socket: &Path) -> Result<Client, HandoffFailure> {
        if !self.settings.policy.takes_sockets {
            tracing::warn!(socket = %socket.display(), "no KV is pulled from a socket: this node is no endpoint's own engine");
            return Err(HandoffFailure::AddressRefused);
        }
        let mut known = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = known.get(socket) {
            return Ok(client.clone());
        }
        let client = client(&self.settings).unix_socket(socket.to_owned()).build().map_err(|error| {
            tracing::warn!(%error, "no HTTP client for a socket");
            HandoffFailure::PrefillDown
        })?;
        if known.len() >= MAX_SOCKETS {
            known.clear();
        }
        known.insert(socket.to_owned(), client.clone());
        Ok(client)
    }

    fn found(&self, source: &KvSource) -> Result<Arc<FoundSource>, HandoffFailure> {
        let mut all = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        let node = source.node();
        if let Some(known) = all.get(&node) {
            return Ok(Arc::clone(known));
        }
        if all.len() >= MAX_SOURCES {
            all.clear();
        }
        let found = Arc::new(FoundSource::new(source, Arc::clone(&self.settings))?);
        all.insert(node, Arc::clone(&found));
        Ok(found)
    }
}

/// When the addresses that have not proven the key are asked for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unproven {
    /// Before anything else: all are compared.
    Now,
    /// Meanwhile, if there is another address: an address that does not answer must not delay a request.
    InBackground,
}

/// A node that was found in the network.
struct FoundSource {
    settings: Arc<PullSettings>,
    url: String,
    /// The process that must answer.
    process: u64,
    client: Client,
    /// Those that have proven the key, the best first.
    paths: NodePaths,
    tried: Mutex<TriedPaths>,
}

#[derive(Default)]
struct TriedPaths {
    /// Those that have proven the key.
    proven: Vec<SocketAddr>,
    /// Those that were measured, the fastest first.
    ranks: Vec<SocketAddr>,
    /// When an address failed last.
    avoided: HashMap<SocketAddr, Instant>,
}

impl TriedPaths {
    fn is_avoided(&self, address: &SocketAddr) -> bool {
        self.avoided.get(address).is_some_and(|at| at.elapsed() < AVOIDED_FOR)
    }

    /// Forgets failures that are old, and proven addresses that are no longer announced: those that failed, and the oldest beyond
    /// [`MAX_UNANNOUNCED`]. One that has proven the key counts until it fails, whatever is announced meanwhile.
    fn forget(&mut self, announced: &[SocketAddr]) {
        let TriedPaths { proven, avoided, .. } = self;
        proven.retain(|address| announced.contains(address) || !avoided.contains_key(address));
        let n_unannounced = proven.iter().filter(|address| !announced.contains(address)).count();
        let mut n_excess = n_unannounced.saturating_sub(MAX_UNANNOUNCED);
        proven.retain(|address| {
            let goes = n_excess > 0 && !announced.contains(address);
            n_excess -= usize::from(goes);
            !goes
        });
        avoided.retain(|_, at| at.elapsed() < AVOIDED_FOR);
    }

    /// The proven addresses: those that did not fail lately, then by their rates; the unmeasured ones last.
    fn order(&self) -> Vec<SocketAddr> {
        let rank = |address: &SocketAddr| self.ranks.iter().position(|known| known == address).unwrap_or(usize::MAX);
        let mut order = self.proven.clone();
        order.sort_by_key(|address| (self.is_avoided(address), rank(address)));
        order
    }
}

impl FoundSource {
    fn new(source: &KvSource, settings: Arc<PullSettings>) -> Result<FoundSource, HandoffFailure> {
        let paths = NodePaths::default();
        // A kept connection would stay on its path.
        let client = client(&settings).pool_max_idle_per_host(0).dns_resolver(Arc::new(paths.clone())).build();
        let client = client.map_err(|error| {
            tracing::warn!(%error, "no HTTP client for a found prefill node");
            HandoffFailure::PrefillDown
        })?;
        let (url, process) = (source.base().to_owned(), source.process);
        Ok(FoundSource { settings, url, process, client, paths, tried: Mutex::default() })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, TriedPaths> {
        self.tried.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn arrange(&self) {
        let order = self.lock().order();
        self.paths.set(order);
    }

    /// Proves new addresses, forgets those that are no longer announced and failed, and puts one that is open first.
    async fn prepare(self: &Arc<Self>, announced: &[SocketAddr], when: Unproven) -> Result<(), HandoffFailure> {
        let announced = &announced[..announced.len().min(MAX_PATHS)];
        let (unknown, has_proven): (Vec<SocketAddr>, bool) = {
            let mut tried = self.lock();
            tried.forget(announced);
            let unknown =
                announced.iter().filter(|a| !tried.proven.contains(a) && !tried.is_avoided(a)).copied().collect();
            (unknown, !tried.proven.is_empty())
        };
        let mut refused = None;
        if has_proven && when == Unproven::InBackground {
            if !unknown.is_empty() {
                // So that the next pull does not ask them, too.
                let now = Instant::now();
                self.lock().avoided.extend(unknown.iter().map(|address| (*address, now)));
                let found = Arc::clone(self);
                tokio::spawn(async move { found.prove_all(unknown).await });
            }
        } else {
            refused = self.prove_all(unknown).await;
        }
        self.arrange();
        let order = self.paths.addresses();
        // With one address there is no choice; the call itself shows whether it answers.
        if order.len() > 1 {
            for address in &order {
                if is_open(*address).await {
                    break;
                }
                self.lock().avoided.insert(*address, Instant::now());
            }
            self.arrange();
        }
        match (order.is_empty(), refused) {
            (false, _) => Ok(()),
            (true, Some(ProofFailure::PlainHttp)) => Err(HandoffFailure::AddressRefused),
            (true, Some(ProofFailure::NotProven(NotProven::OtherKey))) => Err(HandoffFailure::KeyRefused),
            (true, Some(ProofFailure::NotProven(_) | ProofFailure::Certificate(_))) => {
                Err(HandoffFailure::PrefillRefused)
            }
            (true, Some(ProofFailure::Unreachable(_) | ProofFailure::NotAsked(_)) | None) => {
                Err(HandoffFailure::PrefillDown)
            }
        }
    }

    /// Asks these addresses for a proof, at once, and notes the answers. Takes at most 2 s. Returns a failure, if there was one.
    async fn prove_all(&self, addresses: Vec<SocketAddr>) -> Option<ProofFailure> {
        let proofs = join_all(addresses.iter().map(|address| self.prove(*address))).await;
        let mut refused = None;
        let mut tried = self.lock();
        for (address, proof) in addresses.into_iter().zip(proofs) {
            match proof {
                Ok(()) => {
                    tried.avoided.remove(&address);
                    if !tried.proven.contains(&address) {
                        tried.proven.push(address);
                    }
                }
                Err(failure @ ProofFailure::NotAsked(_)) => refused = Some(failure),
                Err(failure) => {
                    refused = Some(failure);
                    tried.avoided.insert(address, Instant::now());
                }
            }
        }
        drop(tried);
        self.arrange();
        refused
    }

    async fn prove(&self, address: SocketAddr) -> Result<(), ProofFailure> {
        let (url, PullSettings { cluster_key, policy }) = (&self.url, &*self.settings);
        let proven = async { Prover::new(url, address, &policy.transport)?.prove(cluster_key).await }.await;
        match proven {
            Ok(proven) if proven.process == self.process => Ok(()),
            Ok(_) => Err(ProofFailure::Unreachable("another node answers there".into())),
            Err(error) => {
                tracing::debug!(url, %address, %error, "an address of a found prefill node is not used");
                Err(error)
            }
        }
    }
}

/// A client of prefill nodes.
fn client(settings: &PullSettings) -> ClientBuilder {
    let PullPolicy { transport, timeouts, .. } = &settings.policy;
    transport.client().connect_timeout(timeouts.connect)
}

fn failed(url: &str, error: &reqwest::Error) -> HandoffFailure {
    tracing::info!(url, %error, "measuring the link to the prefill node failed");
    match error.status() {
        Some(StatusCode::UNAUTHORIZED) => HandoffFailure::KeyRefused,
        _ if error.is_timeout() => HandoffFailure::PrefillStalled,
        // This node lacks what a connection needs, so the prefill node is not to blame.
        _ if call_failure::is_own_lack(error) => HandoffFailure::PrefillLate,
        _ => HandoffFailure::PrefillDown,
    }
}

/// Bytes in a second; 0 if it was too fast to tell.
fn rate(link: &LinkMeasurement) -> f64 {
    if link.seconds > 0.0 { link.n_bytes as f64 / link.seconds } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_an_endpoint_s_own_engine_pulls_from_a_socket() {
        let source = KvSource::at_socket("/nowhere/node.sock".into());
        for (takes_sockets, expected) in [(false, Some(HandoffFailure::AddressRefused)), (true, None)] {
            let policy = PullPolicy { takes_sockets, ..PullPolicy::default() };
            let sources = Sources::new(Arc::new(PullSettings { cluster_key: "secret".into(), policy })).unwrap();
            assert_eq!(sources.reach(&source).await.err(), expected);
            let measured = sources.measure(&source).await.err();
            assert_eq!(measured, Some(expected.unwrap_or(HandoffFailure::PrefillDown)), "nobody listens there");
        }
    }

    #[test]
    fn the_fastest_comes_first_and_one_that_failed_comes_last() {
        let [wifi, cable, new] = ["10.0.0.1:1", "10.0.1.1:1", "10.0.2.1:1"].map(|text| text.parse().unwrap());
        let mut tried =
            TriedPaths { proven: vec![new, wifi, cable], ranks: vec![cable, wifi], avoided: HashMap::new() };
        assert_eq!(tried.order(), [cable, wifi, new]);
        tried.avoided.insert(cable, Instant::now());
        assert_eq!(tried.order(), [wifi, new, cable]);
        tried.avoided.insert(cable, Instant::now().checked_sub(AVOIDED_FOR).unwrap());
        assert_eq!(tried.order(), [cable, wifi, new]);
    }

    #[test]
    fn what_is_no_longer_announced_counts_until_it_fails() {
        let [wifi, cable] = ["10.0.0.1:1", "10.0.1.1:1"].map(|text| text.parse::<SocketAddr>().unwrap());
        let mut tried = TriedPaths { proven: vec![wifi, cable], ..TriedPaths::default() };
        tried.forget(&[wifi]);
        assert_eq!(tried.proven, [wifi, cable]);
        // It failed in a pull, and the next pull comes later.
        tried.avoided.insert(cable, Instant::now().checked_sub(AVOIDED_FOR * 2).unwrap());
        tried.forget(&[wifi]);
        assert_eq!((tried.proven, tried.avoided.len()), (vec![wifi], 0));
        // IPv6 addresses for privacy change every day.
        let proven: Vec<SocketAddr> = (1..=40).map(|port| SocketAddr::new(wifi.ip(), port)).collect();
        let mut tried = TriedPaths { proven: proven.clone(), ..TriedPaths::default() };
        tried.forget(&proven[..1]);
        assert_eq!(tried.proven, [&proven[..1], &proven[40 - MAX_UNANNOUNCED..]].concat());
    }
}

//! Announced nodes and the results of their key proofs. Pure: the caller browses, asks and tells the time.
//!
//! Each address of each announced instance is asked for a proof of the cluster key (see `baton_link::proof`), and again
//! every 2 s: this notices nodes that die, come back, or get another address. Strangers are asked less and less often.
//! Nodes prove each other's addresses again before they send the key: `engines/link/src/handoff/sources.rs` says why.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use baton_link::mdns::Instance;
use baton_link::proof::{NotProven, Proven};
use baton_link::remote::{ProofFailure, Prover};
use baton_link::transport::Transport;
use baton_schemas::node::{Role, TLS_PROPERTY};
use tokio::time::Instant;

use crate::targets::found::{FoundAddress, FoundNode, FoundState};

/// The most instances that are remembered; more than a cluster has.
pub(super) const MAX_INSTANCES: usize = 64;

/// The most addresses of one node that other machines are told.
const MAX_ADDRESSES: usize = 16;

/// The most addresses that are asked in one round; and those among them that were never asked, each of which needs a
/// client of its own: a flood of announcements must not cost much.
const MAX_ASKED: usize = 32;
const MAX_NEW: usize = 4;

/// The most of those that one instance may have.
const MAX_NEW_OF_ONE: usize = 2;

/// The interval between two proofs of an address that has proven the key.
const PROVEN_INTERVAL: Duration = Duration::from_secs(2);

/// The first pause after a failure. Doubles with each failure in a row, up to [`MAX_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// Failures in a row after which an address that has proven the key counts as lost. One may be a lost packet.
const LOST_AFTER: u32 = 2;

/// An instance is forgotten after this time without an announcement. A node that has proven the key stays, unless another
/// announcement stands for it. Two searches fit into the time, and each hears every machine that is there.
const UNSEEN_FOR: Duration = Duration::from_secs(150);

/// Failures in a row after which a node that said goodbye is forgotten, at [`MAX_PAUSE`] each: a day. Until then it is used at
/// once when it comes back, even if its announcement is not heard.
const FORGOTTEN_AFTER: u32 = 2_880;

/// All announced instances.
#[derive(Default)]
pub(super) struct Sighted {
    instances: BTreeMap<String, SightedInstance>,
}

struct SightedInstance {
    instance: Instance,
    paths: BTreeMap<SocketAddr, SightedPath>,
    /// It said goodbye, or its announcement has expired: one failure is enough to lose it.
    is_gone: bool,
    has_proven: bool,
    /// When it was announced last.
    seen_at: Instant,
}

struct SightedPath {
    /// The URL to ask; `None`: what is announced makes none.
    url: Option<String>,
    /// The client, once it was asked.
    prover: Option<Arc<Prover>>,
    /// The latest answer; `None` before the first.
    latest: Option<Result<Proven, ProofFailure>>,
    proven: Option<Proven>,
    /// Since when it has proven this process.
    since: Instant,
    n_failed: u32,
    due: Instant,
    is_asked: bool,
}

impl SightedInstance {
    /// Returns true if an address of it has proven the key and is not lost.
    fn stands(&self) -> bool {
        self.process().is_some()
    }

    /// The process that has proven the key. `None`: none has, or it is lost.
    fn process(&self) -> Option<u64> {
        self.paths.values().find_map(|path| path.standing().map(|proven| proven.process))
    }

    /// Returns true if it was announced lately.
    fn is_seen(&self, now: Instant) -> bool {
        now.duration_since(self.seen_at) < UNSEEN_FOR
    }

    /// Since when its process has proven the key.
    fn since(&self) -> Option<Instant> {
        self.paths.values().filter(|path| path.standing().is_some()).map(|path| path.since).min()
    }

    /// When its next address is due. `None`: all are being asked.
    fn due(&self) -> Option<Instant> {
        self.paths.values().filter(|path| !path.is_asked).map(|path| path.due).min()
    }
}

impl SightedPath {
    /// What it has proven, unless it is lost.
    fn standing(&self) -> Option<Proven> {
        self.proven.filter(|_| self.n_failed < LOST_AFTER)
    }

    fn state(&self) -> FoundState {
        match (&self.standing(), &self.latest) {
            (Some(_), _) => FoundState::Proven,
            (None, Some(Err(failure))) => failure.into(),
            (None, Some(Ok(_)) | None) => FoundState::Asking,
        }
    }
}

/// An address that is to be asked.
pub(super) struct Ask {
    pub id: String,
    pub address: SocketAddr,
    pub prover: Arc<Prover>,
}

/// A node that has proven the key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ProvenNode {
    pub role: Role,
    /// The name that it announces.
    pub name: String,
    /// Its URL, whose host stands for `reachable`.
    pub url: String,
    /// The URLs of all announcements that stand for it, this one among them. Strangers can announce others, but end none.
    pub urls: BTreeSet<String>,
    /// The addresses that have proven the key here, those that answer first.
    pub reachable: Vec<SocketAddr>,
    /// What other machines may reach: those that have proven the key here, then all announced ones, at most 16. A stranger may
    /// announce the same instance with addresses of its own.
    pub announced: Vec<SocketAddr>,
}

impl Sighted {
    /// An instance was announced, or its announcement has changed.
    pub(super) fn found(&mut self, instance: Instance, now: Instant) {
        if !self.instances.contains_key(&instance.id) && !self.has_room(now) {
            return;
        }
        let entry = self.instances.entry(instance.id.clone()).or_insert_with(|| SightedInstance {
            instance: instance.clone(),
            paths: BTreeMap::new(),
            is_gone: false,
            has_proven: false,
            seen_at: now,
        });
        entry.seen_at = now;
        if tls_name(&entry.instance) != tls_name(&instance) {
            // A process does not change its certificate's name. If the node was started again, this is heard in the next search.
            if entry.stands() {
                return;
            }
            entry.paths.clear();
        }
        entry.is_gone = false;
        // An address that is no longer announced may still be the only way: it goes when it fails.
        entry.paths.retain(|address, path| instance.addresses.contains(address) || path.standing().is_some());
        for &address in &instance.addresses {
            let path = entry.paths.entry(address).or_insert_with(|| {
                let url = asking_url(&instance, address);
                let latest = url.is_none().then_some(Err(ProofFailure::NotProven(NotProven::NotANode)));
                SightedPath {
                    url,
                    prover: None,
                    latest,
                    proven: None,
                    since: now,
                    n_failed: 0,
                    due: now,
                    is_asked: false,
                }
            });
            // What is announced anew may have changed: its machine is back, or a firewall is open.
            path.due = path.due.min(now + FIRST_PAUSE);
        }
        entry.instance = instance;
    }

    /// An instance said goodbye, or its announcement has expired.
    pub(super) fn gone(&mut self, id: &str, now: Instant) {
        let Some(entry) = self.instances.get_mut(id) else { return };
        entry.is_gone = true;
        entry.paths.values_mut().for_each(|path| path.due = now);
        if !entry.has_proven {
            self.instances.remove(id);
        }
    }

    /// Makes room for one more by forgetting a stranger, at best one that was asked, or a node that left or has
    /// vanished.
    fn has_room(&mut self, now: Instant) -> bool {
        if self.instances.len() < MAX_INSTANCES {
            return true;
        }
        let keeping = |entry: &SightedInstance| match entry.has_proven {
            true if !entry.stands() && (entry.is_gone || !entry.is_seen(now)) => Some(2),
            true => None,
            false if entry.paths.values().all(|path| path.latest.is_some()) => Some(0),
            false => Some(1),
        };
        let forgettable = self.instances.iter().filter_map(|(id, entry)| Some((keeping(entry)?, id)));
        let id = forgettable.min().map(|(_, id)| id.clone());
        id.is_some_and(|id| self.instances.remove(&id).is_some())
    }

    /// Forgets strangers that have vanished, and what a node was called before it was started again.
    fn forget_unseen(&mut self, now: Instant) {
        let seen = self.instances.values().filter(|entry| entry.is_seen(now));
        let seen: BTreeSet<u64> = seen.filter_map(SightedInstance::process).collect();
        self.instances.retain(|_, entry| {
            entry.is_seen(now) || entry.has_proven && !entry.process().is_some_and(|process| seen.contains(&process))
        });
    }

    /// The addresses to ask now. The caller asks each, and notes the answer.
    pub(super) fn due(&mut self, transport: &Transport, now: Instant) -> Vec<Ask> {
        self.forget_unseen(now);
        let mut due = Vec::new();
        let mut n_new = 0;
        // Those that have waited for longest come first, so that no announcement keeps others from being asked.
        let mut waiting: Vec<(Instant, &String, &mut SightedInstance)> =
            self.instances.iter_mut().filter_map(|(id, entry)| Some((entry.due()?, id, entry))).collect();
        waiting.sort_by_key(|(due, ..)| *due);
        for (_, id, entry) in waiting {
            let mut n_new_here = 0;
            for (&address, path) in &mut entry.paths {
                let Some(url) = path.url.as_ref().filter(|_| !path.is_asked && path.due <= now) else { continue };
                let is_new = path.prover.is_none();
                if due.len() >= MAX_ASKED || (is_new && (n_new_here >= MAX_NEW_OF_ONE || n_new >= MAX_NEW)) {
                    continue;
                }
                n_new += usize::from(is_new);
                n_new_here += usize::from(is_new);
                let prover = match &path.prover {
                    Some(prover) => Arc::clone(prover),
                    None => match Prover::new(url, address, transport) {
                        Ok(prover) => Arc::clone(path.prover.insert(Arc::new(prover))),
                        Err(failure) => {
                            path.latest = Some(Err(failure));
                            path.due = now + MAX_PAUSE;
                            continue;
                        }
                    },
                };
                path.is_asked = true;
                due.push(Ask { id: id.clone(), address, prover });
            }
        }
        due
    }

    /// An address has answered, or not.
    pub(super) fn answered(
        &mut self,
        id: &str,
        address: SocketAddr,
        answer: Result<Proven, ProofFailure>,
        now: Instant,
    ) {
        let Some(entry) = self.instances.get_mut(id) else { return };
        let Some(path) = entry.paths.get_mut(&address) else { return };
        path.is_asked = false;
        let pause = match &answer {
            Ok(proven) => {
                entry.has_proven = true;
                if path.proven.is_none_or(|before| before.process != proven.process) {
                    path.since = now;
                }
                path.proven = Some(*proven);
                path.n_failed = 0;
                if entry.is_gone { FIRST_PAUSE } else { PROVEN_INTERVAL }
            }
            Err(_) => {
                path.n_failed = path.n_failed.saturating_add(1);
                // What had the key is asked often, so that it is used at once when it comes back.
                let most = if path.proven.is_some() && !entry.is_gone { PROVEN_INTERVAL } else { MAX_PAUSE };
                (FIRST_PAUSE * 2u32.saturating_pow(path.n_failed.min(8) - 1)).min(most)
            }
        };
        path.due = now + pause;
        path.latest = Some(answer);
        let is_announced = entry.instance.addresses.contains(&address);
        if entry.is_gone && path.n_failed > 0 {
            path.n_failed = path.n_failed.max(LOST_AFTER);
        }
        let is_forgotten = path.n_failed > 0 && !is_announced || path.n_failed > FORGOTTEN_AFTER && entry.is_gone;
        if is_forgotten {
            entry.paths.remove(&address);
        }
        if entry.paths.is_empty() {
            self.instances.remove(id);
        }
    }

    /// The nodes that have proven the key, by their processes: a node that is announced twice is one.
    pub(super) fn proven(&self) -> BTreeMap<u64, ProvenNode> {
        let mut nodes: BTreeMap<u64, ProvenNode> = BTreeMap::new();
        for entry in self.first_proven_first() {
            let mut standing: Vec<_> =
                entry.paths.iter().filter_map(|(at, path)| Some((*at, path.n_failed, path.standing()?))).collect();
            standing.sort_by_key(|(_, n_failed, _)| *n_failed);
            for (address, _, Proven { process, role }) in standing {
                let url = used_url(&entry.instance, address, process);
                let node = nodes.entry(process).or_insert_with(|| ProvenNode {
                    role,
                    name: entry.instance.name.clone(),
                    url: url.clone(),
                    urls: BTreeSet::new(),
                    reachable: Vec::new(),
                    announced: Vec::new(),
                });
                node.urls.insert(url);
                push_new(&mut node.reachable, [address]);
                push_new(&mut node.announced, entry.instance.addresses.iter().copied());
            }
        }
        for node in nodes.values_mut() {
            let claimed = std::mem::replace(&mut node.announced, node.reachable.clone());
            push_new(&mut node.announced, claimed);
            node.announced.truncate(MAX_ADDRESSES);
        }
        nodes
    }

    /// The instances, those first that proved the key first: what a stranger announces for a node later does not rename it.
    fn first_proven_first(&self) -> Vec<&SightedInstance> {
        let mut all: Vec<_> = self.instances.values().collect();
        all.sort_by_key(|entry| (entry.since().is_none(), entry.since()));
        all
    }

    /// What was found. `used` tells, for a process that has proven the key, whether it is used, and its name.
    pub(super) fn report(&self, used: impl Fn(u64) -> (FoundState, Option<String>)) -> Vec<FoundNode> {
        let mut shown = Vec::new();
        let mut found: Vec<FoundNode> = self
            .first_proven_first()
            .into_iter()
            .filter_map(|entry| {
                let proven = entry.paths.values().find_map(SightedPath::standing);
                // A lost node is no ghost: it is asked on, but not shown. A second announcement of one process is not, either.
                if proven.map_or(entry.has_proven, |proven| shown.contains(&proven.process)) {
                    return None;
                }
                let state = entry.paths.values().map(SightedPath::state).min().unwrap_or_default();
                let (state, node) = match proven {
                    Some(proven) => {
                        shown.push(proven.process);
                        used(proven.process)
                    }
                    None => (state, None),
                };
                let mut addresses: Vec<_> = entry.paths.iter().collect();
                addresses.sort_by_key(|(_, path)| path.state());
                let addresses = addresses
                    .into_iter()
                    .map(|(at, path)| FoundAddress { address: at.to_string(), state: path.state() })
                    .collect();
                let role = proven.map(|proven| proven.role);
                Some(FoundNode {
                    name: entry.instance.name.clone(),
                    state,
                    reason: state.words().to_owned(),
                    role,
                    node,
                    addresses,
                })
            })
            .collect();
        found.sort_by(|one, other| one.name.cmp(&other.name));
        found
    }

    /// Returns true if every address has been asked.
    pub(super) fn has_asked_all(&self) -> bool {
        self.instances.values().flat_map(|entry| entry.paths.values()).all(|path| path.latest.is_some())
    }
}

fn push_new(all: &mut Vec<SocketAddr>, more: impl IntoIterator<Item = SocketAddr>) {
    for address in more {
        if !all.contains(&address) {
            all.push(address);
        }
    }
}

/// The name in the certificate that the instance announces; `None`: it speaks plain HTTP.
fn tls_name(instance: &Instance) -> Option<&str> {
    instance.properties.get(TLS_PROPERTY).map(String::as_str)
}

/// The URL to ask at an address: a host name that stands for it, or the name that the certificate must have.
fn asking_url(instance: &Instance, address: SocketAddr) -> Option<String> {
    match tls_name(instance) {
        None => Some(format!("http://node.found:{}", address.port())),
        Some("") => Some(format!("https://{}", without_scope(address))),
        Some(name) => is_host_name(name).then(|| format!("https://{name}:{}", address.port())),
    }
}

/// The URL of a node that has proven the key. It stays the same when the node's addresses change.
fn used_url(instance: &Instance, address: SocketAddr, process: u64) -> String {
    match tls_name(instance) {
        None => format!("http://node-{process:016x}.found:{}", address.port()),
        Some("") => format!("https://{}", without_scope(address)),
        Some(name) => format!("https://{name}:{}", address.port()),
    }
}

/// A URL cannot have the scope of a link-local address, so such a certificate is usable only at other addresses.
fn without_scope(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip(), address.port())
}

/// A number or an address is none: it would be called as it is, whatever was announced beside it.
fn is_host_name(name: &str) -> bool {
    let is_plain = |c: u8| c.is_ascii_alphanumeric() || c == b'-' || c == b'.';
    let is_label = |label: &str| !label.is_empty() && label.len() <= 63 && !label.starts_with('-');
    let is_domain =
        |name: &str| reqwest::Url::parse(&format!("https://{name}")).is_ok_and(|url| url.domain().is_some());
    name.len() <= 253 && name.bytes().all(is_plain) && name.split('.').all(is_label) && is_domain(name)
}

#[cfg(test)]
#[path = "sighted_tests.rs"]
mod tests;

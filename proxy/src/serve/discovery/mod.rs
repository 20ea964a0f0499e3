//! Finds nodes in the local network, and uses those that prove the cluster key.

mod sighted;
mod used;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use baton_link::mdns::{self, Browser, ServiceType, Sighting};
use baton_link::proof::Proven;
use baton_link::remote::ProofFailure;
use baton_link::transport::Transport;
use tokio::sync::mpsc;
use tokio::time::Instant;

use self::sighted::{Ask, Sighted};
use self::used::UsedNodes;
use super::cluster_nodes::ClusterNodes;
use crate::targets::found::{DiscoveryState, FoundNodes, FoundState};

/// The interval between two looks at what is due. A look without due addresses costs microseconds.
const TICK: Duration = Duration::from_millis(250);

/// The pause after mDNS has failed: without a network, for example.
const BROWSE_PAUSE: Duration = Duration::from_secs(10);

/// How long one search goes on. mDNS repeats its question less and less often, and remembers what strangers announce; a new search
/// asks at once and remembers nothing.
const BROWSE_TIME: Duration = Duration::from_secs(60);

/// How long the start waits for the first nodes.
const FIRST_LOOK: Duration = Duration::from_secs(3);

/// Answers that wait to be noted; more than are asked at once.
const MAX_ANSWERS: usize = 64;

/// The search of a running endpoint.
pub(super) struct Discovery {
    pub key: String,
    pub transport: Transport,
    pub found: Arc<FoundNodes>,
    pub cluster: Arc<ClusterNodes>,
}

impl Discovery {
    /// Searches until the process ends.
    pub(super) fn keep_searching(self) {
        tokio::spawn(async move {
            let Discovery { key, transport, found, cluster } = self;
            let mut search = NodeSearch::new(Some(key.clone()), transport.clone());
            let mut used = UsedNodes::new(key, transport, cluster);
            loop {
                search.step().await;
                used.follow(&search.sighted.proven());
                let found_now = search.sighted.report(|process| used.state(process));
                found.set(DiscoveryState { problem: search.problem.clone(), found: found_now });
            }
        });
    }
}

/// Gives nodes in the network a moment to be found and to report their models, so that the ready message names them.
pub(super) async fn first_look(found: &FoundNodes) {
    let is_settled = |state: &DiscoveryState| {
        state.problem.is_some()
            || (!state.found.is_empty() && state.found.iter().all(|found| found.state != FoundState::Asking))
    };
    let look = async {
        while !is_settled(&found.state()) {
            tokio::time::sleep(TICK).await;
        }
        // More may answer in the same moment, and the found ones report their models.
        tokio::time::sleep(2 * TICK).await;
    };
    // Nobody may be there.
    let _ = tokio::time::timeout(FIRST_LOOK, look).await;
}

/// Looks around for a while without using anything. Without a key, only the announcements are listed.
pub async fn look_around(key: Option<String>, transport: Transport, time: Duration) -> DiscoveryState {
    let has_key = key.is_some();
    let mut search = NodeSearch::new(key, transport);
    let ends = Instant::now() + time;
    while Instant::now() < ends || (has_key && !search.sighted.has_asked_all() && Instant::now() < ends + time) {
        search.step().await;
    }
    let mut found = search.sighted.report(|_| (FoundState::Proven, None));
    if !has_key {
        for node in &mut found {
            node.state = FoundState::NoKey;
            node.reason = FoundState::NoKey.words().to_owned();
            node.addresses.iter_mut().for_each(|address| address.state = FoundState::NoKey);
        }
    }
    DiscoveryState { problem: search.problem, found }
}

/// An answer, and where it comes from.
type AskOutcome = (String, SocketAddr, Result<Proven, ProofFailure>);

/// Browses, and asks what it finds.
struct NodeSearch {
    key: Option<String>,
    transport: Transport,
    sighted: Sighted,
    browser: Option<Browser>,
    /// When the next search begins.
    browse_at: Instant,
    /// When addresses are asked next.
    ask_at: Instant,
    problem: Option<String>,
    answers: (mpsc::Sender<AskOutcome>, mpsc::Receiver<AskOutcome>),
}

impl NodeSearch {
    fn new(key: Option<String>, transport: Transport) -> NodeSearch {
        NodeSearch {
            key,
            transport,
            sighted: Sighted::default(),
            browser: None,
            browse_at: Instant::now(),
            ask_at: Instant::now(),
            problem: None,
            answers: mpsc::channel(MAX_ANSWERS),
        }
    }

    /// Waits for an event or a tick, and asks what is due.
    async fn step(&mut self) {
        if self.browse_at <= Instant::now() {
            self.browser = None;
            match mdns::browse(ServiceType::NODE) {
                Ok(browser) => {
                    self.browser = Some(browser);
                    self.browse_at = Instant::now() + BROWSE_TIME;
                    self.problem = None;
                }
                Err(error) => {
                    if self.problem.is_none() {
                        tracing::warn!(%error, "nodes in the network cannot be found; this is tried again");
                    }
                    self.problem = Some(error.to_string());
                    self.browse_at = Instant::now() + BROWSE_PAUSE;
                }
            }
        }
        let browser = &mut self.browser;
        let next = async {
            match browser {
                Some(browser) => browser.next().await,
                None => std::future::pending().await,
            }
        };
        let answers = &mut self.answers.1;
        tokio::select! {
            sighting = next => match sighting {
                Some(Sighting::Found(instance)) => self.sighted.found(instance, Instant::now()),
                Some(Sighting::Gone(id)) => self.sighted.gone(&id, Instant::now()),
                // Nodes that are known stay known.
                None => {
                    self.browser = None;
                    self.browse_at = Instant::now() + TICK;
                }
            },
            Some((id, address, answer)) = answers.recv() => {
                self.sighted.answered(&id, address, answer, Instant::now());
            }
            () = tokio::time::sleep(TICK) => {}
        }
        // Not after each event: a flood of announcements must not ask more often.
        let now = Instant::now();
        let Some(key) = self.key.as_ref().filter(|_| self.ask_at <= now) else { return };
        self.ask_at = now + TICK;
        for Ask { id, address, prover } in self.sighted.due(&self.transport, now) {
            let (key, answers) = (key.clone(), self.answers.0.clone());
            tokio::spawn(async move {
                let mut answer = prover.prove(&key).await;
                // An address that this process could not ask stays what it is.
                while matches!(answer, Err(ProofFailure::NotAsked(_))) && !answers.is_closed() {
                    tokio::time::sleep(TICK).await;
                    answer = prover.prove(&key).await;
                }
                // If nobody waits for it, the search has ended.
                let _ = answers.send((id, address, answer)).await;
            });
        }
    }
}

//! The found nodes that an endpoint uses.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use baton_link::Engine;
use baton_link::remote::{ClientError, NodeAddress, NodePaths, RemoteEngine};
use baton_link::transport::Transport;
use baton_schemas::node::Role;

use super::super::cluster_nodes::{ClusterNodes, NodeLists};
use super::super::lending;
use super::sighted::ProvenNode;
use crate::targets::found::FoundState;
use crate::targets::nodes::{FoundPaths, Node, NodeState, info_watch};

/// The longest name of a found node in `x-baton-route`.
const MAX_NAME_CHARS: usize = 32;

/// The found nodes that are in use.
pub(super) struct UsedNodes {
    key: String,
    transport: Transport,
    cluster: Arc<ClusterNodes>,
    nodes: BTreeMap<u64, UsedNode>,
    /// Processes that have ended, and that still count as proven for some seconds.
    ended: BTreeSet<u64>,
}

struct UsedNode {
    node: Arc<Node>,
    found: FoundPaths,
    /// Where this endpoint reaches it.
    reachable: NodePaths,
    url: String,
    proven: ProvenNode,
}

impl UsedNode {
    /// It has proven the key at these addresses.
    fn is_at(&mut self, proven: &ProvenNode) {
        self.reachable.set(proven.reachable.clone());
        self.found.paths.set(proven.announced.clone());
        self.proven = proven.clone();
    }
}

impl UsedNodes {
    pub(super) fn new(key: String, transport: Transport, cluster: Arc<ClusterNodes>) -> UsedNodes {
        UsedNodes { key, transport, cluster, nodes: BTreeMap::new(), ended: BTreeSet::new() }
    }

    /// Whether the node of this process is used, and its name.
    pub(super) fn state(&self, process: u64) -> (FoundState, Option<String>) {
        match self.nodes.get(&process) {
            Some(used) => (FoundState::Used, Some(used.node.name.clone())),
            None if self.cluster.configured_processes().contains(&process) => (FoundState::Configured, None),
            None => (FoundState::Asking, None),
        }
    }

    /// Uses exactly these nodes, except those that are configured, and those whose machines sleep. A node whose addresses change
    /// stays the same node.
    pub(super) fn follow(&mut self, proven: &BTreeMap<u64, ProvenNode>) {
        let configured = self.cluster.configured_processes();
        let is_wanted = |process: &u64, url: &str| {
            !configured.contains(process) && proven.get(process).is_some_and(|node| node.urls.contains(url))
        };
        let n_before = self.nodes.len();
        self.ended.retain(|process| proven.contains_key(process));
        self.take_back_restarted(proven, &configured);
        let announced: Vec<(String, Role)> = proven
            .iter()
            .filter(|(process, _)| self.nodes.contains_key(*process))
            .map(|(_, node)| (node.name.clone(), node.role))
            .collect();
        self.nodes.retain(|process, used| {
            let may_sleep = !proven.contains_key(process) && !configured.contains(process) && used.node.can_be_woken();
            // Another node may have its place.
            let sleeps = may_sleep && !announced.contains(&(used.proven.name.clone(), used.proven.role));
            let stays = sleeps || is_wanted(process, &used.url);
            if !stays {
                tracing::warn!(node = used.node.name, "a node in the network is gone");
            }
            stays
        });
        let mut has_changed = self.nodes.len() != n_before;
        for (process, node) in proven.iter().filter(|(process, _)| !configured.contains(process)) {
            if self.ended.contains(process) || self.may_take_back(*process, node) {
                continue;
            }
            match self.nodes.get_mut(process) {
                Some(used) if used.proven.reachable == node.reachable && used.proven.announced == node.announced => {}
                Some(used) => {
                    tracing::info!(node = used.node.name, addresses = ?node.reachable, "a found node is reached elsewhere");
                    used.is_at(node);
                }
                None => match self.connect(*process, node) {
                    Ok(used) => {
                        tracing::info!(node = used.node.name, role = ?node.role, addresses = ?node.reachable, "a node in the network has proven the cluster key and is used");
                        self.nodes.insert(*process, used);
                        has_changed = true;
                    }
                    Err(error) => tracing::warn!(%error, "a found node cannot be used"),
                },
            }
        }
        if has_changed {
            let of = |has_task: fn(&ProvenNode) -> bool| -> Vec<Arc<Node>> {
                self.nodes.values().filter(|used| has_task(&used.proven)).map(|used| Arc::clone(&used.node)).collect()
            };
            let decode = of(|node| node.role.decodes());
            self.cluster
                .set_found(NodeLists { decode, prefill: of(|node| node.role.prefills() || node.role.drafts()) });
        }
    }

    /// A node whose machine slept, and that was started again meanwhile, goes on as the node that it was: requests wait for that
    /// one. It is known by the name that it announces, and has proven the key as every other.
    fn take_back_restarted(&mut self, proven: &BTreeMap<u64, ProvenNode>, configured: &[u64]) {
        for (process, node) in proven.iter().filter(|(process, _)| !configured.contains(process)) {
            let Some(before) = self.silent_as(*process, node).filter(|before| {
                let is_lost = self.nodes.get(before).is_some_and(|used| used.node.is_asleep());
                is_lost || !proven.contains_key(before)
            }) else {
                continue;
            };
            let Some(mut used) = self.nodes.remove(&before) else { continue };
            tracing::info!(node = used.node.name, addresses = ?node.reachable, "a node that slept was started again");
            self.ended.insert(before);
            used.found.set_process(*process);
            used.url.clone_from(&node.url);
            used.is_at(node);
            self.nodes.insert(*process, used);
        }
    }

    /// Returns true if this new process will perhaps go on as a node that does not answer any more.
    fn may_take_back(&self, process: u64, node: &ProvenNode) -> bool {
        self.silent_as(process, node).is_some()
    }

    /// The process of a node that announced itself as this new one does, and that is not ready. Only one whose machine can be woken.
    fn silent_as(&self, process: u64, node: &ProvenNode) -> Option<u64> {
        if self.nodes.contains_key(&process) || self.ended.contains(&process) {
            return None;
        }
        let was_it = |used: &UsedNode| used.proven.name == node.name && used.proven.role == node.role;
        let is_silent = |used: &UsedNode| used.node.can_be_woken() && used.node.health.state() != NodeState::Ready;
        let silent = self.nodes.iter().find(|(_, used)| was_it(used) && is_silent(used));
        silent.map(|(before, _)| *before)
    }

    fn connect(&self, process: u64, proven: &ProvenNode) -> Result<UsedNode, ClientError> {
        let ProvenNode { name, url, reachable, announced, .. } = proven;
        let reachable = NodePaths::new(reachable.clone());
        let announced = NodePaths::new(announced.clone());
        let address = NodeAddress::Paths(url.clone(), reachable.clone());
        let engine: Arc<dyn Engine> = Arc::new(RemoteEngine::with_transport(&address, &self.key, &self.transport)?);
        let name = self.free_name(name);
        let health = info_watch::watch(Arc::clone(&engine), &name).health;
        let found = FoundPaths::new(process, announced, reachable.clone());
        let node = Node::found(name, url.clone(), found.clone(), engine, health);
        Ok(UsedNode { node, found, reachable, url: url.clone(), proven: proven.clone() })
    }

    /// The announced name as a word for headers, which no other node has.
    fn free_name(&self, announced: &str) -> String {
        let word: String = announced
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' })
            .take(MAX_NAME_CHARS)
            .collect();
        let word = match word.trim_matches('-') {
            "" => "node",
            word => word,
        };
        let is_free = |name: &String| {
            name != "local"
                && name != lending::LENDING_ENGINE
                && !self.cluster.has_name(name)
                && !self.nodes.values().any(|used| used.node.name == *name)
        };
        let names = std::iter::once(word.to_owned()).chain((2..).map(|n| format!("{word}-{n}")));
        names.into_iter().find(is_free).unwrap_or_default()
    }
}

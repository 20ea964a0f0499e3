//! The found nodes that an endpoint uses.

use std::collections::BTreeMap;
use std::sync::Arc;

use baton_link::Engine;
use baton_link::remote::{ClientError, NodeAddress, NodePaths, RemoteEngine};
use baton_link::transport::Transport;

use super::super::cluster_nodes::{ClusterNodes, NodeLists};
use super::sighted::ProvenNode;
use crate::targets::found::FoundState;
use crate::targets::nodes::{FoundPaths, Node, info_watch};

/// The longest name of a found node in `x-baton-route`.
const MAX_NAME_CHARS: usize = 32;

/// The found nodes that are in use.
pub(super) struct UsedNodes {
    key: String,
    transport: Transport,
    cluster: Arc<ClusterNodes>,
    nodes: BTreeMap<u64, UsedNode>,
}

struct UsedNode {
    node: Arc<Node>,
    /// Where this endpoint reaches it.
    reachable: NodePaths,
    /// Where others may reach it.
    announced: NodePaths,
    url: String,
    proven: ProvenNode,
}

impl UsedNodes {
    pub(super) fn new(key: String, transport: Transport, cluster: Arc<ClusterNodes>) -> UsedNodes {
        UsedNodes { key, transport, cluster, nodes: BTreeMap::new() }
    }

    /// Whether the node of this process is used, and its name.
    pub(super) fn state(&self, process: u64) -> (FoundState, Option<String>) {
        match self.nodes.get(&process) {
            Some(used) => (FoundState::Used, Some(used.node.name.clone())),
            None if self.cluster.configured_processes().contains(&process) => (FoundState::Configured, None),
            None => (FoundState::Asking, None),
        }
    }

    /// Uses exactly these nodes, except those that are configured. A node whose addresses change stays the same node.
    pub(super) fn follow(&mut self, proven: &BTreeMap<u64, ProvenNode>) {
        let configured = self.cluster.configured_processes();
        let is_wanted = |process: &u64, url: &str| {
            !configured.contains(process) && proven.get(process).is_some_and(|node| node.urls.contains(url))
        };
        let n_before = self.nodes.len();
        self.nodes.retain(|process, used| {
            let stays = is_wanted(process, &used.url);
            if !stays {
                tracing::warn!(node = used.node.name, "a node in the network is gone");
            }
            stays
        });
        let mut has_changed = self.nodes.len() != n_before;
        for (process, node) in proven.iter().filter(|(process, _)| !configured.contains(process)) {
            match self.nodes.get_mut(process) {
                Some(used) if used.proven.reachable == node.reachable && used.proven.announced == node.announced => {}
                Some(used) => {
                    tracing::info!(node = used.node.name, addresses = ?node.reachable, "a found node is reached elsewhere");
                    used.reachable.set(node.reachable.clone());
                    used.announced.set(node.announced.clone());
                    used.proven = node.clone();
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
            self.cluster.set_found(NodeLists { decode, prefill: of(|node| node.role.prefills()) });
        }
    }

    fn connect(&self, process: u64, proven: &ProvenNode) -> Result<UsedNode, ClientError> {
        let ProvenNode { name, url, reachable, announced, .. } = proven;
        let reachable = NodePaths::new(reachable.clone());
        let announced = NodePaths::new(announced.clone());
        let address = NodeAddress::Paths(url.clone(), reachable.clone());
        let engine: Arc<dyn Engine> = Arc::new(RemoteEngine::with_transport(&address, &self.key, &self.transport)?);
        let name = self.free_name(name);
        let health = info_watch::watch(Arc::clone(&engine), &name).health;
        let found = FoundPaths { process, paths: announced.clone() };
        let node = Node::found(name, url.clone(), found, engine, health);
        Ok(UsedNode { node, reachable, announced, url: url.clone(), proven: proven.clone() })
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
            name != "local" && !self.cluster.has_name(name) && !self.nodes.values().any(|used| used.node.name == *name)
        };
        let names = std::iter::once(word.to_owned()).chain((2..).map(|n| format!("{word}-{n}")));
        names.into_iter().find(is_free).unwrap_or_default()
    }
}

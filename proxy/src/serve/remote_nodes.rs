//! The nodes of `model.decode` and `model.prefill`, which run elsewhere.

use std::sync::Arc;

use baton_link::Engine;
use baton_link::remote::{NodeAddress, RemoteEngine};
use baton_schemas::node::{KEY_VARIABLE, NodeInfo};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::oneshot;

use super::failure::CommandFailure;
use super::first_start::FirstStart;
use crate::config::RoutingConfig;
use crate::config::transport_args::TransportArgs;
use crate::log_target::NOTICE;
use crate::targets::nodes::Node;
use crate::targets::nodes::info_watch::{self, RefusedKey, WatchedNode};

/// The cluster's key, if there are nodes to present it to.
pub(super) fn cluster_key<'a>(
    urls: impl IntoIterator<Item = &'a String>,
    transport: &TransportArgs,
) -> Result<Option<String>, CommandFailure> {
    let Some(url) = urls.into_iter().next() else { return Ok(None) };
    match transport.cluster_key()? {
        Some(key) => Ok(Some(key)),
        None => Err(CommandFailure(format!(
            "the node {url} needs the cluster key: pair the machines with `baton pair`, or set {KEY_VARIABLE} to its secret"
        ))),
    }
}

/// The cluster's key, which found nodes must prove.
pub(super) fn key_to_discover(transport: &TransportArgs) -> Result<String, CommandFailure> {
    transport.cluster_key()?.ok_or_else(|| {
        CommandFailure(format!(
            "nodes in the network are recognised by the cluster key: pair the machines with `baton pair`, or set \
             {KEY_VARIABLE} to its secret"
        ))
    })
}

/// Nodes that run elsewhere, each watched from now on.
pub(super) struct RemoteNodes {
    pub decode: Vec<Arc<Node>>,
    /// A node that is named for both tasks is in both lists.
    pub prefill: Vec<Arc<Node>>,
    /// The decode nodes that were not known before.
    first_answers: Vec<FirstInfo>,
}

type FirstInfo = BoxFuture<'static, Result<Arc<NodeInfo>, CommandFailure>>;

impl RemoteNodes {
    /// Connects to the configured nodes. A node of `known` at a configured address is kept.
    pub(super) fn connect(
        routing: &RoutingConfig,
        transport: &TransportArgs,
        known: &[Arc<Node>],
    ) -> Result<RemoteNodes, CommandFailure> {
        let urls: Vec<&String> = routing.decode.iter().chain(&routing.prefill).collect();
        let key = cluster_key(urls.iter().copied(), transport)?.unwrap_or_default();
        if !urls.is_empty()
            && let Some(folder) = transport.pairing()
        {
            tracing::info!(target: NOTICE, "nodes are reached with the pairing in {}", folder.path().display());
        }
        let transport = &transport.transport()?;
        let stays = |node: &&Arc<Node>| node.url.as_ref().is_some_and(|url| urls.contains(&url));
        let mut connected: Vec<Arc<Node>> = known.iter().filter(stays).map(Arc::clone).collect();
        let mut first_answers = Vec::new();
        let mut connect = |task: &str, first: usize, url: &String| -> Result<Arc<Node>, CommandFailure> {
            // A node that is named for both tasks is connected once.
            if let Some(node) = connected.iter().find(|node| node.url.as_ref() == Some(url)) {
                return Ok(Arc::clone(node));
            }
            let client = RemoteEngine::with_transport(&NodeAddress::Url(url.clone()), &key, transport)?;
            let engine: Arc<dyn Engine> = Arc::new(client);
            let WatchedNode { health, first_answer } = info_watch::watch(Arc::clone(&engine), url);
            first_answers.push(or_failure(first_answer, url.clone()));
            // Named by its place in the list, unless an older node has that name.
            let mut names = (first..).map(|n| format!("{task}-{n}"));
            let name = names.find(|name| !connected.iter().any(|node| node.name == *name)).unwrap_or_default();
            let node = Node::new(name, Some(url.clone()), engine, health);
            connected.push(Arc::clone(&node));
            Ok(node)
        };
        let mut all = |task: &str, urls: &[String]| -> Result<Vec<_>, CommandFailure> {
            (1..).zip(urls).map(|(i, url)| connect(task, i, url)).collect()
        };
        let decode = all("decode", &routing.decode)?;
        let prefill = all("prefill", &routing.prefill)?;
        first_answers.truncate(decode.len());
        Ok(RemoteNodes { decode, prefill, first_answers })
    }

    /// Decode nodes, then prefill nodes; a node with both tasks comes twice.
    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Node>> {
        self.decode.iter().chain(&self.prefill)
    }

    /// Returns true if [`RemoteNodes::first_start`] has decode nodes to wait for.
    pub(super) fn has_first_answers(&self) -> bool {
        !self.first_answers.is_empty()
    }

    /// Resolves with the first answer of any decode node. Takes the answers: a second call has none to wait for.
    pub(super) fn first_start(&mut self) -> FirstStart {
        let answers = std::mem::take(&mut self.first_answers);
        if answers.is_empty() {
            // Upstreams alone.
            return futures::future::ready(Ok(None)).boxed();
        }
        futures::future::select_all(answers).map(|(first, ..)| first.map(Some)).boxed()
    }
}

fn or_failure(first: oneshot::Receiver<Result<Arc<NodeInfo>, RefusedKey>>, url: String) -> FirstInfo {
    let answer = first.map(move |first| match first {
        Ok(Err(RefusedKey)) => Err(CommandFailure(format!(
            "the node at {url} refused the cluster key: set {KEY_VARIABLE} to the secret that the node was started with"
        ))),
        Ok(Ok(info)) => Ok(info),
        Err(_) => Err(CommandFailure(format!("the watch of the node at {url} has ended"))),
    });
    answer.boxed()
}

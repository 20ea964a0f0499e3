//! An endpoint in front of two prefill nodes and two decode nodes, each behind a relay.

use std::time::Duration;

use harness::relay::{FaultyRelay, LinkFault};
use harness::{BatonNode, BatonServer, TempConfigFile, eventually_async};
use rustix::process::Signal;
use serde_json::Value;

use super::service::{Service, WhenFull};

/// A node and its link.
pub(crate) struct ChaosNode {
    /// The endpoint's name for it.
    pub(crate) name: String,
    /// Its link.
    pub(crate) relay: FaultyRelay,
    args: Vec<String>,
    is_real: bool,
    node: Option<BatonNode>,
}

impl ChaosNode {
    async fn start(name: &str, is_real: bool, args: &[&str]) -> ChaosNode {
        let args = args.iter().map(|&arg| arg.to_owned()).collect();
        let mut node = ChaosNode {
            name: name.to_owned(),
            relay: FaultyRelay::start("http://127.0.0.1:1").await,
            args,
            is_real,
            node: None,
        };
        node.start_process().await;
        node
    }

    /// Starts the node's process on a free port and points the link at it.
    pub(crate) async fn start_process(&mut self) {
        let args = self.args.clone();
        let is_real = self.is_real;
        let start = move || {
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            if is_real { BatonNode::start(&args) } else { BatonNode::with(&args) }
        };
        let node = tokio::task::spawn_blocking(start).await.unwrap();
        self.relay.lead_to(&node.url);
        self.node = Some(node);
    }

    /// Kills the process.
    pub(crate) fn kill(&mut self) {
        self.node = None;
    }

    /// Asks the process to end and gives it two seconds.
    pub(crate) async fn stop_process(&mut self) {
        // Taken out first, so that `heal` starts a new process if this is interrupted.
        let Some(node) = self.node.take() else { return };
        node.signal(Signal::TERM);
        tokio::time::sleep(Duration::from_secs(2)).await;
    }

    /// Sends the process a signal, if there is one.
    pub(crate) fn signal(&self, signal: Signal) {
        self.node.iter().for_each(|node| node.signal(signal));
    }

    /// The node's own address, not its link's.
    pub(crate) fn url(&self) -> String {
        self.node.as_ref().unwrap().url.clone()
    }
}

/// The nodes are behind locks because a fault holds one of them for a while.
pub(crate) struct ChaosCluster {
    pub(crate) server: BatonServer,
    pub(crate) service: Service,
    config: TempConfigFile,
    config_text: String,
    pub(crate) prefill: [tokio::sync::Mutex<ChaosNode>; 2],
    pub(crate) decode: [tokio::sync::Mutex<ChaosNode>; 2],
}

impl ChaosCluster {
    /// Starts all nodes with these arguments, with the real model or simulated.
    pub(crate) async fn start(is_real: bool, args: &[&str], when_full: WhenFull) -> ChaosCluster {
        let start = async |name: &str, role| {
            tokio::sync::Mutex::new(ChaosNode::start(name, is_real, &[args, &["--role", role]].concat()).await)
        };
        let prefill = [start("prefill-1", "prefill").await, start("prefill-2", "prefill").await];
        let decode = [start("decode-1", "decode").await, start("decode-2", "decode").await];
        // Round robin gives every node and every link work all the time.
        let mut config_text = "[model]\npolicy = \"round_robin\"\ncalibrate = false\n".to_owned();
        for (key, nodes) in [("prefill", &prefill), ("decode", &decode)] {
            let urls = [nodes[0].lock().await.relay.url.clone(), nodes[1].lock().await.relay.url.clone()];
            config_text += &format!("{key} = {urls:?}\n");
        }
        let config = TempConfigFile::new(&config_text);
        let (server, config) = tokio::task::spawn_blocking(move || (config.serve(), config)).await.unwrap();
        let service = Service::new(&server.base, when_full);
        let cluster = ChaosCluster { server, service, config, config_text, prefill, decode };
        cluster.all_ready().await;
        cluster
    }

    /// Has the endpoint read its configuration again, each time with another limit that nobody reaches.
    pub(crate) fn reload(&self, n: u64) {
        let text = format!("max_requests = {}\n{}", 1_000 + n % 2, self.config_text);
        self.config.reload(&self.server, &text);
    }

    /// The processes of the first node of each task.
    pub(crate) async fn first_nodes_pids(&self) -> Vec<u32> {
        let mut pids = Vec::new();
        for node in [&self.prefill[0], &self.decode[0]] {
            pids.extend(node.lock().await.node.as_ref().map(BatonNode::pid));
        }
        pids
    }

    /// `/baton/state`.
    pub(crate) async fn state(&self) -> Value {
        reqwest::get(format!("{}/baton/state", self.server.base)).await.unwrap().json().await.unwrap()
    }

    /// Waits until the endpoint reports every node as ready.
    pub(crate) async fn all_ready(&self) {
        eventually_async("all nodes to be ready", || async {
            let state = self.state().await;
            let nodes = state["models"][0]["nodes"].as_array().cloned().unwrap_or_default();
            nodes.len() == 4 && nodes.iter().all(|node| node["life"] == "ready")
        })
        .await;
    }

    /// Undoes an interrupted fault.
    pub(crate) async fn heal(&self) {
        for node in self.prefill.iter().chain(&self.decode) {
            let mut node = node.lock().await;
            node.relay.set(LinkFault::None);
            node.signal(Signal::CONT);
            if node.node.is_none() {
                node.start_process().await;
            }
        }
    }

    /// Waits until no request, slot or place in a queue is held.
    pub(crate) async fn all_idle(&self) {
        eventually_async("everything to be given back", || async {
            let state = self.state().await;
            let nodes = state["models"][0]["nodes"].as_array().cloned().unwrap_or_default();
            let is_idle = |node: &Value| node["active_slots"] == 0 && node["queued"] == 0;
            state["requests"]["running"] == 0 && state["requests"]["waiting"] == 0 && nodes.iter().all(is_idle)
        })
        .await;
    }
}

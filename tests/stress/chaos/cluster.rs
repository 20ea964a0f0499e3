//! Two prefill nodes and two decode nodes behind relays, and an endpoint in front of them: real processes all.

use std::time::Duration;

use harness::relay::{Fault, Relay};
use harness::{Node, Server, eventually_async};
use rustix::process::Signal;
use serde_json::Value;

/// A node with the link that leads to it.
pub(crate) struct Member {
    /// As the endpoint calls it.
    pub(crate) name: String,
    /// Its link.
    pub(crate) relay: Relay,
    args: Vec<String>,
    is_real: bool,
    node: Option<Node>,
}

impl Member {
    async fn start(name: &str, is_real: bool, args: &[&str]) -> Member {
        let args = args.iter().map(|&arg| arg.to_owned()).collect();
        let mut member = Member {
            name: name.to_owned(),
            relay: Relay::start("http://127.0.0.1:1").await,
            args,
            is_real,
            node: None,
        };
        member.start_process().await;
        member
    }

    /// Starts the node's process, on a port of its own; the link leads there.
    pub(crate) async fn start_process(&mut self) {
        let (args, is_real) = (self.args.clone(), self.is_real);
        let start = move || {
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            if is_real { Node::start(&args) } else { Node::with(&args) }
        };
        let node = tokio::task::spawn_blocking(start).await.unwrap();
        self.relay.lead_to(&node.url);
        self.node = Some(node);
    }

    /// Kills the process.
    pub(crate) fn kill(&mut self) {
        self.node = None;
    }

    /// Asks the process to end, and lets it for two seconds.
    pub(crate) async fn stop_process(&mut self) {
        // Taken out first: whoever interrupts this finds no process, and starts one.
        let Some(node) = self.node.take() else { return };
        node.signal(Signal::TERM);
        tokio::time::sleep(Duration::from_secs(2)).await;
    }

    /// Sends the process a signal, if there is one.
    pub(crate) fn signal(&self, signal: Signal) {
        self.node.iter().for_each(|node| node.signal(signal));
    }

    /// The node's own address, around its link.
    pub(crate) fn url(&self) -> String {
        self.node.as_ref().unwrap().url.clone()
    }
}

/// See the module. The lists are behind locks because a fault works on one node while others go on.
pub(crate) struct Cluster {
    pub(crate) server: Server,
    pub(crate) prefill: [tokio::sync::Mutex<Member>; 2],
    pub(crate) decode: [tokio::sync::Mutex<Member>; 2],
}

impl Cluster {
    /// Nodes with these arguments each, of the real model or simulated.
    pub(crate) async fn start(is_real: bool, args: &[&str]) -> Cluster {
        let member = async |name: &str, role| {
            tokio::sync::Mutex::new(Member::start(name, is_real, &[args, &["--role", role]].concat()).await)
        };
        let prefill = [member("prefill-1", "prefill").await, member("prefill-2", "prefill").await];
        let decode = [member("decode-1", "decode").await, member("decode-2", "decode").await];
        let mut nodes = Vec::new();
        for (flag, members) in [("--prefill", &prefill), ("--decode", &decode)] {
            for member in members {
                nodes.extend([flag.to_owned(), member.lock().await.relay.url.clone()]);
            }
        }
        let server = tokio::task::spawn_blocking(move || {
            let nodes: Vec<&str> = nodes.iter().map(String::as_str).collect();
            // Takes turns among all handoffs: every node and every link has work all the time.
            Server::with(&[&nodes[..], &["--policy", "round_robin", "--no-calibration"]].concat())
        });
        let cluster = Cluster { server: server.await.unwrap(), prefill, decode };
        cluster.all_ready().await;
        cluster
    }

    /// `/baton/state` as the endpoint tells it.
    pub(crate) async fn state(&self) -> Value {
        reqwest::get(format!("{}/baton/state", self.server.base)).await.unwrap().json().await.unwrap()
    }

    /// Waits until the endpoint knows every node as ready.
    pub(crate) async fn all_ready(&self) {
        eventually_async("all nodes to be ready", || async {
            let state = self.state().await;
            let nodes = state["models"][0]["nodes"].as_array().cloned().unwrap_or_default();
            nodes.len() == 4 && nodes.iter().all(|node| node["life"] == "ready")
        })
        .await;
    }

    /// Ends what a fault that was interrupted has left.
    pub(crate) async fn heal(&self) {
        for member in self.prefill.iter().chain(&self.decode) {
            let mut member = member.lock().await;
            member.relay.set(Fault::None);
            member.signal(Signal::CONT);
            if member.node.is_none() {
                member.start_process().await;
            }
        }
    }

    /// Waits until nothing is held any more: no request, no slot, no place in a queue.
    pub(crate) async fn all_idle(&self) {
        eventually_async("everything to be given back", || async {
            let state = self.state().await;
            let nodes = state["models"][0]["nodes"].as_array().cloned().unwrap_or_default();
            let is_idle = |node: &Value| node["active_slots"] == 0 && node["queued"] == 0;
            state["requests"]["admitted"] == 0 && state["requests"]["waiting"] == 0 && nodes.iter().all(is_idle)
        })
        .await;
    }
}

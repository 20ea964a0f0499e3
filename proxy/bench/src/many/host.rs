//! The process of the nodes: simulated engines behind node servers, each at a port of its own.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use baton_engines::sim::{SimConfig, SimEngine};
use baton_link::Engine;
use baton_link::node::{ClusterKey, ListenAddress, Listener, router};
use baton_link::remote::{NodeAddress, RemoteEngine};
use baton_process::{ChildCommand, ChildProcess, parent};
use baton_proxy::serve::CommandFailure;
use baton_schemas::node::{KEY_VARIABLE, Role};
use futures::future::try_join_all;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

/// The longest start.
const START_DEADLINE: Duration = Duration::from_secs(60);

/// The line that the process prints once all nodes listen.
#[derive(Serialize, Deserialize)]
struct HostedAddresses {
    addresses: Vec<SocketAddr>,
}

/// Hosts nodes until the parent ends.
#[allow(clippy::print_stdout, reason = "the addresses are for the parent")]
pub(super) async fn serve(n_nodes: u32, n_slots: u32, token_every_ms: u32) -> Result<(), CommandFailure> {
    parent::tie_to(Signal::KILL);
    let key = std::env::var(KEY_VARIABLE).map_err(|_| CommandFailure(format!("{KEY_VARIABLE} is not set")))?;
    let mut addresses = Vec::new();
    let mut serving = tokio::task::JoinSet::new();
    for _ in 0..n_nodes {
        let config = SimConfig {
            n_slots,
            decode_tps: 1e3 / f64::from(token_every_ms),
            // Prompts take no time: this measures what streams cost.
            prefill_tps: 1e9,
            ..SimConfig::default()
        };
        let listener = Listener::bind(&ListenAddress::Tcp("127.0.0.1:0".to_owned())).await?;
        addresses.extend(listener.tcp_address());
        let app = router(Arc::new(SimEngine::new(config)), Role::Both, ClusterKey::new(&key));
        serving.spawn(listener.serve(app, CancellationToken::new()));
    }
    println!("{}", serde_json::to_string(&HostedAddresses { addresses })?);
    match serving.join_next().await {
        Some(Ok(Err(error))) => Err(error.into()),
        _ => Err(CommandFailure("a node has ended".into())),
    }
}

/// The running nodes. Dropping this ends them.
pub(super) struct HostedNodes {
    pub(super) urls: Vec<String>,
    engines: Vec<RemoteEngine>,
    _process: ChildProcess,
}

impl HostedNodes {
    /// Starts the process. Errors: it does not answer in time.
    pub(super) async fn start(
        key: &str,
        n_nodes: u32,
        n_slots: u32,
        token_every_ms: u32,
    ) -> Result<HostedNodes, CommandFailure> {
        let numbers = [n_nodes, n_slots, token_every_ms].map(|n| n.to_string());
        let options = ["--host-nodes", "--host-slots", "--token-every"];
        let args = options.into_iter().zip(&numbers).flat_map(|(option, n)| [option, n.as_str()]);
        let command = ChildCommand::of_this_program("the nodes' process")?.args(["many"]).args(args);
        let mut process = command.envs([(KEY_VARIABLE, key)]).spawn()?;
        let late = |_| CommandFailure("the nodes do not start".into());
        let HostedAddresses { addresses } =
            tokio::time::timeout(START_DEADLINE, process.answer()).await.map_err(late)??;
        let urls: Vec<String> = addresses.iter().map(|address| format!("http://{address}")).collect();
        let engines = urls.iter().map(|url| RemoteEngine::new(&NodeAddress::Url(url.clone()), key));
        Ok(HostedNodes { engines: engines.collect::<Result<_, _>>()?, urls, _process: process })
    }

    /// Streams of each node now.
    pub(super) async fn n_active(&self) -> Result<Vec<u32>, CommandFailure> {
        let loads = try_join_all(self.engines.iter().map(|engine| engine.load())).await?;
        Ok(loads.iter().map(|load| load.active_slots).collect())
    }
}

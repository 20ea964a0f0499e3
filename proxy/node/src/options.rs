//! The options of a node, and the mistakes in them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_engines::engine_options::WrittenOptions;
use baton_link::node::ListenAddress;
use baton_proxy::config::engine_options;
use baton_proxy::config::transport_args::TransportArgs;
use baton_schemas::node::Role;

use super::failure::NodeFailure;
use super::sleep::SleepSettings;

/// A slow name server must not delay the start.
const RESOLVE_DEADLINE: Duration = Duration::from_secs(2);

/// Who has started this process, and who starts it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WayToRun {
    /// For an operator or a service manager.
    Alone,
    /// The same, but a child serves: ggml ends the process when a worker is lost.
    Keeper,
    /// The child of a keeper.
    Kept,
    /// The child of an endpoint, which starts it again.
    Child,
}

impl WayToRun {
    /// Returns true if another process of Baton has started this one, and speaks for it.
    pub(crate) fn has_parent(self) -> bool {
        matches!(self, WayToRun::Kept | WayToRun::Child)
    }
}

/// What a node is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeTask {
    /// It has an engine with this role.
    Engine(Role),
    /// It has none: it lends its devices to another node.
    Worker,
}

/// The files of a certificate and its key, PEM.
#[derive(Debug, Clone)]
pub struct CertificateFiles {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

/// The options of a node.
#[derive(Debug, Clone)]
pub struct NodeOptions {
    pub way: WayToRun,
    pub task: NodeTask,
    /// A file, a folder, or a name that `baton serve` knows.
    pub model: Option<PathBuf>,
    /// The model's name for endpoints.
    pub name: Option<String>,
    pub listen: ListenAddress,
    pub tls: Option<CertificateFiles>,
    pub transport: TransportArgs,
    /// It announces itself in the local network, unless only this machine can reach it.
    pub announces: bool,
    /// When its machine is sent to sleep, if it is.
    pub sleep: Option<SleepSettings>,
    /// MiB of each device that a worker lends at most.
    pub lend_memory: Option<u32>,
    pub engine: WrittenOptions,
}

/// An engine's options, and its model's file if it has one.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "llama"), allow(dead_code, reason = "only llama.cpp has workers"))]
pub(crate) struct WantedEngine<'a> {
    pub(crate) options: &'a WrittenOptions,
    pub(crate) model: Option<&'a Path>,
}

impl NodeOptions {
    /// Finds mistakes in the options alone.
    pub(crate) async fn check_options(&self) -> Result<(), NodeFailure> {
        let problem = match self.task {
            NodeTask::Worker => self.worker_problem(),
            NodeTask::Engine(_) => self.engine_problem(),
        };
        match problem {
            Some(message) => Err(NodeFailure::setup(message)),
            None => self.refuse_itself().await,
        }
    }

    fn engine_problem(&self) -> Option<String> {
        if self.lend_memory.is_some() {
            return Some("--lend-memory is for --role worker".to_owned());
        }
        if self.sleep.as_ref().is_some_and(|sleep| sleep.command.trim().is_empty()) {
            return Some("--sleep-command must not be empty".to_owned());
        }
        let only_prefills = self.task == NodeTask::Engine(Role::Prefill);
        if self.engine.lend_layers.is_some() && !only_prefills {
            return Some("--lend-layers is for --role prefill: such a node only computes prompts".to_owned());
        }
        let problem = engine_options::problems(&self.engine).into_iter().next();
        problem.map(|(key, message)| format!("{} {message}", engine_options::flag(key)))
    }

    fn worker_problem(&self) -> Option<String> {
        if cfg!(not(feature = "llama")) {
            let message = "this build of baton has no llama.cpp, so it lends no devices. Use the full build";
            return Some(message.to_owned());
        }
        let WrittenOptions { device, threads, .. } = self.engine.clone();
        let of_worker = WrittenOptions { device, threads, ..WrittenOptions::default() };
        let has_others =
            self.model.is_some() || self.name.is_some() || self.sleep.is_some() || self.engine != of_worker;
        let message = "a worker has no engine: of the options of models and engines, it takes --device and --threads";
        has_others.then(|| message.to_owned())
    }

    /// Refuses this node as its own worker, for which it would wait for ever.
    async fn refuse_itself(&self) -> Result<(), NodeFailure> {
        let ListenAddress::Tcp(listen) = &self.listen else { return Ok(()) };
        let own = resolved(listen).await;
        for worker in engine_options::workers::remote(&self.engine) {
            let address = worker.split_once("://").map_or(&**worker, |(_, address)| address).trim_end_matches('/');
            let address = resolved(address).await;
            if own.iter().any(|own| address.iter().any(|address| reaches(*address, *own))) {
                return Err(NodeFailure::setup(format!("--workers has {worker:?}, where this node itself listens")));
            }
        }
        Ok(())
    }
}

/// The addresses of a name, if it has any now. A worker's name may be unknown until its machine is there.
async fn resolved(address: &str) -> Vec<SocketAddr> {
    let found = tokio::time::timeout(RESOLVE_DEADLINE, tokio::net::lookup_host(address)).await;
    found.ok().and_then(Result::ok).map(Iterator::collect).unwrap_or_default()
}

/// Returns true if a connection to `address` reaches who listens on `own`.
fn reaches(address: SocketAddr, own: SocketAddr) -> bool {
    let ip = match address.ip().to_canonical() {
        // The system connects to loopback.
        ip if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        ip => ip,
    };
    let own_ip = own.ip().to_canonical();
    let is_reached = ip == own_ip || own_ip.is_unspecified() && is_of_this_machine(ip);
    address.port() == own.port() && is_reached
}

/// Only an address of this machine can be bound.
fn is_of_this_machine(ip: IpAddr) -> bool {
    UdpSocket::bind((ip, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(listen: &str, workers: &[&str]) -> NodeOptions {
        let workers = Some(workers.iter().map(|worker| (*worker).to_owned()).collect());
        NodeOptions {
            way: WayToRun::Keeper,
            task: NodeTask::Engine(Role::Both),
            model: None,
            name: None,
            listen: listen.parse().unwrap(),
            tls: None,
            transport: TransportArgs::default(),
            announces: false,
            sleep: None,
            lend_memory: None,
            engine: WrittenOptions { workers, ..WrittenOptions::default() },
        }
    }

    #[tokio::test]
    async fn a_node_is_not_its_own_worker() {
        let is_refused = async |listen, worker| options(listen, &[worker]).refuse_itself().await.is_err();
        assert!(is_refused("127.0.0.1:9000", "127.0.0.1:9000").await);
        assert!(is_refused("127.0.0.1:9000", "http://localhost:9000/").await);
        assert!(is_refused("0.0.0.0:9000", "127.0.0.1:9000").await);
        assert!(is_refused("127.0.0.1:9000", "0.0.0.0:9000").await);
        assert!(!is_refused("127.0.0.1:9000", "127.0.0.1:9001").await);
        assert!(!is_refused("127.0.0.1:9000", "local").await);
        assert!(!is_refused("0.0.0.0:9000", "192.0.2.1:9000").await, "another machine's address");
        assert!(!is_refused("127.0.0.1:9000", "no-such-machine.invalid:9000").await, "it may come later");
        assert!(!is_refused("unix:/tmp/s", "127.0.0.1:9000").await);
    }
}

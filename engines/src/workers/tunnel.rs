//! The end of a session at the engine: a port of loopback whose bytes reach a worker.
//!
//! ggml's client connects to the port. Only connections of this process are accepted, because the port is open to
//! everybody on this machine. If the worker is lost, the engine's process must end and start again: ggml has no other
//! way, and an engine that waits to be used would notice too late.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use baton_link::awake;
use baton_link::remote::call_failure::describe;
use baton_link::transport::{AddressError, ShortBodyError, Transport, short_body};
use baton_model::options::WorkerEndpoint;
use baton_schemas::node::BASE_PATH;
use baton_schemas::worker::{
    LOCAL_WORKER, LentDevice, MAX_WORKERS, SESSION_UPGRADE, VERSION_HEADER, WORKER_VERSION, WorkerDescription,
};
use reqwest::{Client, Response, StatusCode, header};
use serde::Deserialize;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio_util::sync::CancellationToken;

use super::pipe::{SessionEnd, carry};
pub use super::rpc_exchange::Refusals;
use super::rpc_exchange::{ReportedMemory, RpcExchange};
use super::session::{LendError, Lender};
use crate::llama::rpc::OwnSockets;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The deadline of a worker's description, for which it computes nothing.
const DESCRIBE_TIMEOUT: Duration = Duration::from_secs(5);

/// The deadline of opening a session, in which the worker starts a process.
const OPEN_TIMEOUT: Duration = Duration::from_secs(75);

/// How often a worker is asked for its description, to notice that its machine is frozen or gone.
const PROBE_INTERVAL: Duration = Duration::from_secs(2);

/// Descriptions in a row that may be missing.
const MISSED_PROBES: u32 = 2;

/// Characters of a device's name that are shown.
const MAX_NAME_CHARS: usize = 100;

/// The longest description, bytes.
const MAX_DESCRIPTION_BYTES: usize = 64 << 10;

/// OwnSockets that may wait. The engine has one at a time.
const BACKLOG: u32 = 2;

/// Where a worker is.
#[derive(Debug, Clone)]
pub enum WorkerSource {
    /// A node with the role worker.
    Node {
        /// As the operator wrote it.
        name: String,
        /// `http://host:port` or `https://host:port`.
        url: String,
    },
    /// A process of this machine.
    Local(Arc<Lender>),
}

impl WorkerSource {
    /// The name for people.
    pub fn name(&self) -> &str {
        match self {
            WorkerSource::Node { name, .. } => name,
            WorkerSource::Local(_) => LOCAL_WORKER,
        }
    }
}

/// Why a worker cannot be used. For the operator.
#[derive(Debug, thiserror::Error)]
pub enum WorkerFailure {
    #[error(transparent)]
    Address(#[from] AddressError),
    #[error("no HTTP client: {0}")]
    Client(String),
    #[error("it cannot be reached: {0}")]
    Unreachable(String),
    #[error("it refuses the cluster key")]
    Key,
    #[error("what answers there is no worker: start it with `baton node --role worker`")]
    NotAWorker,
    #[error(
        "it has version {worker} of the workers' protocol and this node has version {WORKER_VERSION}: update the older"
    )]
    Version { worker: u16 },
    #[error("another node uses it, or its devices cannot be used: its log says more")]
    Busy,
    #[error("it answers with status {0}")]
    Status(u16),
    #[error(transparent)]
    Local(#[from] LendError),
    #[error("no port of loopback: {0}")]
    Port(#[from] std::io::Error),
}

impl WorkerFailure {
    /// The failure in words for clients: no addresses.
    pub fn summary(&self) -> &'static str {
        match self {
            WorkerFailure::Address(_) | WorkerFailure::Client(_) | WorkerFailure::Port(_) => "it cannot be called",
            WorkerFailure::Unreachable(_) => "it cannot be reached",
            WorkerFailure::Key => "it refuses the cluster key",
            WorkerFailure::NotAWorker => "what answers there is no worker",
            WorkerFailure::Version { .. } => "it has another version of the workers' protocol",
            WorkerFailure::Busy => "another node uses it, or its devices cannot be used",
            WorkerFailure::Status(_) => "it answers with an error",
            WorkerFailure::Local(_) => "its process does not start",
        }
    }
}

/// Is called with a worker's name and the reason.
pub type OnLost = Arc<dyn Fn(&str, &str) + Send + Sync>;

/// The settings of all tunnels to workers.
#[derive(Clone)]
pub struct TunnelSetup {
    pub key: String,
    pub transport: Transport,
    /// Called with the worker's name and the reason when a worker is lost. It should end the process.
    pub on_lost: OnLost,
    /// Where it is noted that a worker refuses memory.
    pub refusals: Refusals,
}

impl TunnelSetup {
    /// Bytes of memory that a worker lends.
    pub async fn memory(&self, source: &WorkerSource) -> Result<u64, WorkerFailure> {
        Ok(lent_memory(&self.describe(source).await?.1))
    }

    async fn describe(&self, source: &WorkerSource) -> Result<(Worker, WorkerDescription), WorkerFailure> {
        match source {
            WorkerSource::Node { url, .. } => {
                self.transport.check(url)?;
                let client = self.transport.client().connect_timeout(CONNECT_TIMEOUT).build();
                let client = client.map_err(|error| WorkerFailure::Client(describe(&error)))?;
                let calls = WorkerCalls { client, url: url.clone(), key: self.key.clone() };
                let description = calls.describe().await?;
                Ok((Worker::Node(calls), description))
            }
            WorkerSource::Local(lender) => {
                let description = WorkerDescription {
                    version: WORKER_VERSION,
                    devices: lender.devices(),
                    max_memory: lender.max_memory(),
                    is_busy: lender.is_busy(),
                };
                Ok((Worker::Local(Arc::clone(lender)), description))
            }
        }
    }

    /// Asks a worker what it lends, and opens a port whose connections reach it. `told`: bytes of free memory that
    /// llama.cpp is told of the worker, by which it divides the layers. The port is open until the runtime ends.
    pub async fn open(&self, source: &WorkerSource, told: Option<u64>) -> Result<WorkerEndpoint, WorkerFailure> {
        let (worker, description) = self.describe(source).await?;
        if description.is_busy {
            return Err(WorkerFailure::Busy);
        }
        let most = description.max_memory.unwrap_or(u64::MAX);
        let n_devices = description.devices.len().max(1) as u64;
        let reported = told.map_or(ReportedMemory::AtMost(most), |bytes| ReportedMemory::Told(bytes / n_devices));
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        let listener = socket.listen(BACKLOG)?;
        let endpoint = listener.local_addr()?;
        let name = source.name().to_owned();
        let tunnel = Tunnel {
            port: endpoint,
            name: name.clone(),
            worker,
            reported,
            devices: description.devices.clone(),
            on_lost: Arc::clone(&self.on_lost),
            refusals: self.refusals.clone(),
        };
        tokio::spawn(tunnel.run(listener));
        let memory = lent_memory(&description);
        let has_processor = description.devices.iter().any(|device| device.is_processor);
        let is_local = matches!(source, WorkerSource::Local(_));
        let devices = description.devices.into_iter().map(|device| device.name).collect();
        Ok(WorkerEndpoint { name, endpoint, devices, memory, is_local, has_processor })
    }
}

fn lent_memory(description: &WorkerDescription) -> u64 {
    let most = description.max_memory.unwrap_or(u64::MAX);
    description.devices.iter().map(|device| device.memory.min(most)).fold(0, u64::saturating_add)
}

enum Worker {
    Node(WorkerCalls),
    Local(Arc<Lender>),
}

/// A port and the worker behind it.
struct Tunnel {
    port: SocketAddr,
    name: String,
    worker: Worker,
    reported: ReportedMemory,
    /// As the worker has described itself.
    devices: Vec<LentDevice>,
    on_lost: OnLost,
    refusals: Refusals,
}

impl Tunnel {
    /// Serves one connection after another. ggml opens a short one to count the devices, then one that stays.
    async fn run(self, listener: TcpListener) {
        loop {
            let (mut engine, peer) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => return (self.on_lost)(&self.name, &error.to_string()),
            };
            if !OwnSockets::now().is_ok_and(|open| open.has_connection(peer, self.port)) {
                tracing::warn!(
                    worker = self.name,
                    "another process has connected to the port of a worker, and is refused"
                );
                continue;
            }
            let lost = match engine.set_nodelay(true) {
                Ok(()) => self.serve(&mut engine).await,
                Err(error) => Some(error.to_string()),
            };
            // The connection is still open: when it closes, ggml ends the process without saying which worker was lost.
            if let Some(reason) = lost {
                return (self.on_lost)(&self.name, &reason);
            }
        }
    }

    fn exchange(&self) -> RpcExchange {
        RpcExchange::new(self.reported, &self.devices).noting(&self.name, self.refusals.clone())
    }

    /// Serves one connection. Returns why the worker is lost, or nothing if the engine has closed the connection.
    async fn serve(&self, engine: &mut TcpStream) -> Option<String> {
        match &self.worker {
            Worker::Local(lender) => match lender.open().await {
                Ok(session) => session.serve(engine, CancellationToken::new(), self.exchange()).await,
                Err(error) => Some(error.to_string()),
            },
            Worker::Node(calls) => {
                let session = match calls.open().await {
                    Ok(session) => session,
                    Err(error) => return Some(error.to_string()),
                };
                tokio::select! {
                    end = carry(engine, session, self.exchange()) => match end {
                        SessionEnd::EngineLeft => None,
                        end => Some(end.to_string()),
                    },
                    failure = calls.until_silent() => Some(format!("it no longer answers: {failure}")),
                }
            }
        }
    }
}

/// The part of a description that all versions have in common.
#[derive(Deserialize)]
struct Versioned {
    version: u16,
}

/// Calls to a worker's node.
struct WorkerCalls {
    client: Client,
    url: String,
    key: String,
}

impl WorkerCalls {
    async fn describe(&self) -> Result<WorkerDescription, WorkerFailure> {
        let call = self.client.get(format!("{}{BASE_PATH}/worker", self.url)).bearer_auth(&self.key);
        let answered = async {
            let reply = accepted(call.send().await)?;
            let reply = if reply.status().is_success() { reply } else { return Err(status(reply.status())) };
            let body = short_body(reply, MAX_DESCRIPTION_BYTES).await.map_err(|error| match error {
                ShortBodyError::TooLong(_) => WorkerFailure::NotAWorker,
                ShortBodyError::Lost(error) => WorkerFailure::Unreachable(describe(&error)),
            })?;
            // First the number: other versions may describe themselves in another way.
            let described = serde_json::from_slice::<Versioned>(&body).map_err(|_| WorkerFailure::NotAWorker)?;
            if described.version != WORKER_VERSION {
                return Err(WorkerFailure::Version { worker: described.version });
            }
            let mut description: WorkerDescription =
                serde_json::from_slice(&body).map_err(|_| WorkerFailure::NotAWorker)?;
            for device in &mut description.devices {
                device.name = device.name.chars().filter(|c| !c.is_control()).take(MAX_NAME_CHARS).collect();
            }
            let is_usable = (1..=MAX_WORKERS).contains(&description.devices.len());
            is_usable.then_some(description).ok_or(WorkerFailure::NotAWorker)
        };
        let answered = awake::timeout(DESCRIBE_TIMEOUT, answered).await;
        answered.unwrap_or_else(|_| Err(WorkerFailure::Unreachable("no answer in time".into())))
    }

    async fn open(&self) -> Result<reqwest::Upgraded, WorkerFailure> {
        let call = self.client.get(format!("{}{BASE_PATH}/worker/session", self.url)).bearer_auth(&self.key);
        let call = call.header(header::CONNECTION, "upgrade").header(header::UPGRADE, SESSION_UPGRADE);
        let opened = async {
            let reply = accepted(call.header(VERSION_HEADER, WORKER_VERSION).send().await)?;
            match reply.status() {
                StatusCode::SWITCHING_PROTOCOLS => {
                    reply.upgrade().await.map_err(|error| WorkerFailure::Unreachable(describe(&error)))
                }
                refused => Err(status(refused)),
            }
        };
        let opened = awake::timeout(OPEN_TIMEOUT, opened).await;
        opened.unwrap_or_else(|_| Err(WorkerFailure::Unreachable("no session in time".into())))
    }

    /// Returns once the worker has not answered several times in a row.
    async fn until_silent(&self) -> WorkerFailure {
        let mut n_missed = 0;
        loop {
            tokio::time::sleep(PROBE_INTERVAL).await;
            match self.describe().await {
                Ok(_) => n_missed = 0,
                Err(failure) => {
                    n_missed += 1;
                    if n_missed >= MISSED_PROBES {
                        return failure;
                    }
                }
            }
        }
    }
}

fn accepted(sent: reqwest::Result<Response>) -> Result<Response, WorkerFailure> {
    sent.map_err(|error| WorkerFailure::Unreachable(describe(&error)))
}

/// Translates the status of a refusal.
fn status(status: StatusCode) -> WorkerFailure {
    match status {
        StatusCode::UNAUTHORIZED => WorkerFailure::Key,
        StatusCode::NOT_FOUND => WorkerFailure::NotAWorker,
        StatusCode::SERVICE_UNAVAILABLE => WorkerFailure::Busy,
        status => WorkerFailure::Status(status.as_u16()),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::Mutex;

    use baton_schemas::worker::LentDevice;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// A worker's node that describes itself and opens no session. Returns its URL and the requests that it gets.
    async fn worker() -> (String, Arc<Mutex<Vec<String>>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&requests);
        let device = LentDevice { name: "CPU".into(), memory: 1 << 30, is_processor: true };
        let description =
            WorkerDescription { version: WORKER_VERSION, devices: vec![device], max_memory: None, is_busy: false };
        let body = serde_json::to_string(&description).unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut head = vec![0; 4_096];
                let n = stream.read(&mut head).await.unwrap();
                let line = String::from_utf8_lossy(&head[..n]).lines().next().unwrap_or_default().to_owned();
                let status = if line.contains("/session ") { "503 Busy" } else { "200 OK" };
                seen.lock().unwrap().push(line);
                let length = body.len();
                let head = format!("HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n");
                stream.write_all((head + &body).as_bytes()).await.unwrap();
            }
        });
        (url, requests)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_tunnel_is_open_to_its_own_process_alone() {
        let (url, requests) = worker().await;
        let (lost, mut reasons) = tokio::sync::mpsc::unbounded_channel();
        let on_lost = Arc::new(move |worker: &str, reason: &str| {
            lost.send(format!("{worker}: {reason}")).unwrap();
        });
        let setup = TunnelSetup {
            key: "a key".into(),
            transport: Transport::default(),
            on_lost,
            refusals: Refusals::default(),
        };
        let endpoint = setup.open(&WorkerSource::Node { name: "spark".into(), url }, None).await.unwrap();
        assert_eq!((endpoint.devices.len(), endpoint.memory), (1, 1 << 30));

        // Another process reads until the connection is closed.
        let read = format!("exec 3<>/dev/tcp/127.0.0.1/{} && timeout 20 cat <&3 | wc -c", endpoint.endpoint.port());
        let stranger = tokio::task::spawn_blocking(move || Command::new("bash").args(["-c", &read]).output().unwrap());
        assert_eq!(String::from_utf8(stranger.await.unwrap().stdout).unwrap().trim(), "0");
        assert_eq!(requests.lock().unwrap().len(), 1, "no session was asked for: {requests:?}");

        let _engine = TcpStream::connect(endpoint.endpoint).await.unwrap();
        assert_eq!(reasons.recv().await.unwrap(), format!("spark: {}", WorkerFailure::Busy));
        assert!(requests.lock().unwrap()[1].contains("/worker/session "), "{requests:?}");
    }
}

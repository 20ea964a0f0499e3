//! The child of one session, which `baton lend` runs: ggml's RPC server on a port of loopback, for the one caller that
//! its parent names.
//!
//! ```text
//! child                                parent
//! {"ready": address}        ─────────►  connects to the address
//!                           ◄─────────  the address that it has connected from
//! {"ready"}                 ─────────►  uses the connection
//! a byte a second           ─────────►
//! ```

use std::collections::HashSet;
use std::io::{BufRead, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use baton_process::parent;
use baton_schemas::node::ChildEvent;
use baton_schemas::worker::LentDevice;
use rustix::process::{Resource, Rlimit, setrlimit};

use crate::llama::{devices, rpc};
use crate::serving::LoadError;

/// Time for the server to accept the parent's connection.
const ACCEPT_DEADLINE: Duration = Duration::from_secs(10);

/// How often the server's connections are looked at until the parent's is there. A stranger that comes and leaves between two
/// looks is not seen.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// How often the child shows that it is alive.
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);

/// The longest address, bytes.
const MAX_ADDRESS_BYTES: u64 = 64;

/// Memory that a child takes beside what it lends for weights and KV, bytes: the program, its threads, the buffers that
/// it computes in.
const OVERHEAD: u64 = 256 << 20;

/// The server keeps the bytes of a whole tensor until it has them all. The largest tensors of models have less than this part
/// of their weights.
const LARGEST_TENSOR: u64 = 8;

/// The devices and the memory that a child lends.
#[derive(Debug, Clone)]
pub struct Lent {
    /// The one device, by its name; by default every GPU, or else the processor.
    pub device: Option<String>,
    /// Threads of the processor.
    pub n_threads: usize,
    /// Bytes of memory.
    pub max_memory: Option<u64>,
}

/// Why a child cannot lend.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The parent has left, or wrote something else than an address.
    #[error("the process that has started this one names no address")]
    NoCaller,
    /// Somebody else on this machine was faster.
    #[error("{0} has connected to the RPC server, which is for another process: the session is closed")]
    Stranger(SocketAddr),
    #[error("the RPC server does not accept its one connection in time")]
    NotAccepted,
}

/// The devices that would be lent.
pub fn describe(lent: &Lent) -> Result<Vec<LentDevice>, ChildError> {
    let indices = devices::lendable(lent.device.as_deref())?;
    Ok(devices::lent(&indices)?)
}

/// Serves until the process ends. `before_serving` is called once the parent has written what it writes, so the
/// standard input can be watched from then on. Returns only with an error; the process must then end.
pub fn run(lent: &Lent, before_serving: impl FnOnce()) -> Result<(), ChildError> {
    if let Some(bytes) = lent.max_memory {
        let most = Some(bytes.saturating_add(bytes / LARGEST_TENSOR).saturating_add(OVERHEAD));
        setrlimit(Resource::Data, Rlimit { current: most, maximum: most }).map_err(std::io::Error::from)?;
    }
    let indices = devices::lendable(lent.device.as_deref())?;
    // The server takes a number. The port is free again for a moment; if another program takes it, the server cannot
    // listen.
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let n_threads = lent.n_threads;
    let server =
        std::thread::Builder::new().name("rpc".into()).spawn(move || rpc::serve(address, n_threads, &indices))?;
    parent::tell(&ChildEvent::Ready { address: Some(address) });
    let (named, named_caller) = mpsc::channel();
    std::thread::Builder::new().name("caller".into()).spawn(move || named.send(caller()))?;
    let deadline = Instant::now() + ACCEPT_DEADLINE;
    let mut callers = HashSet::new();
    // Also a caller that has left again must not have been another one.
    let caller = loop {
        callers.extend(rpc::OwnSockets::now()?.callers(address));
        match named_caller.recv_timeout(LOOK_INTERVAL) {
            Ok(caller) => break caller?,
            Err(RecvTimeoutError::Timeout) if Instant::now() < deadline => {}
            Err(_) => return Err(ChildError::NoCaller),
        }
    };
    before_serving();
    loop {
        callers.extend(rpc::OwnSockets::now()?.callers(address));
        if let Some(stranger) = callers.iter().find(|address| **address != caller) {
            return Err(ChildError::Stranger(*stranger));
        }
        if callers.contains(&caller) {
            break;
        }
        if server.is_finished() || Instant::now() > deadline {
            return Err(ChildError::NotAccepted);
        }
        std::thread::sleep(LOOK_INTERVAL);
    }
    parent::tell(&ChildEvent::Ready { address: None });
    loop {
        std::thread::sleep(SIGN_OF_LIFE);
        // Later callers wait behind the parent's connection, which ends only with this process.
        if server.is_finished() {
            return Err(ChildError::NotAccepted);
        }
        let mut output = std::io::stdout().lock();
        output.write_all(b"\n")?;
        output.flush()?;
    }
}

/// The address that the parent has connected from.
fn caller() -> Result<SocketAddr, ChildError> {
    let mut line = String::new();
    std::io::stdin().lock().take(MAX_ADDRESS_BYTES).read_line(&mut line)?;
    line.trim_end().parse().map_err(|_| ChildError::NoCaller)
}

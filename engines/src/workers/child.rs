//! The child of one session, which `baton lend` runs: ggml's RPC server on a port of loopback, for the one caller that
//! started this process.
//!
//! ```text
//! parent                               child
//! the address where it listens ──────► connects to its own server before anybody else can, then to the parent
//!                              ◄────── {"ready": address}: from where it has connected
//! accepts that connection      ◄─────► bytes of both connections
//!                              ◄────── a byte a second
//! ```
//!
//! The server trusts whoever connects, and serves one connection after another. So its first caller is this process itself. Others,
//! who see the port once it is open, wait behind that connection, which ends with this process.

use std::io::{BufRead, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use baton_process::parent;
use baton_schemas::node::ChildEvent;
use baton_schemas::worker::LentDevice;
use rustix::process::Resource;
use socket2::{Domain, Socket, Type};

use crate::llama::{devices, rpc};
use crate::serving::LoadError;

/// Time for the server to listen and to accept.
const ACCEPT_DEADLINE: Duration = Duration::from_secs(10);

/// How often the child shows that it is alive.
const SIGN_OF_LIFE: Duration = Duration::from_secs(1);

/// Bytes that are carried at once.
const PIECE_BYTES: usize = 256 << 10;

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
        parent::limit(Resource::Data, bytes.saturating_add(bytes / LARGEST_TENSOR).saturating_add(OVERHEAD))?;
    }
    let indices = devices::lendable(lent.device.as_deref())?;
    let parent = caller()?;
    before_serving();
    let address = free_address()?;
    let n_threads = lent.n_threads;
    let server =
        std::thread::Builder::new().name("rpc".into()).spawn(move || rpc::serve(address, n_threads, &indices))?;
    let own = first_caller(address, || server.is_finished())?;
    let up = TcpStream::connect(parent)?;
    parent::tell(&ChildEvent::Ready { address: Some(up.local_addr()?) });
    carry(&up, &own)?;
    carry(&own, &up)?;
    loop {
        std::thread::sleep(SIGN_OF_LIFE);
        if server.is_finished() {
            return Err(ChildError::NotAccepted);
        }
        let mut output = std::io::stdout().lock();
        output.write_all(b"\n")?;
        output.flush()?;
    }
}

/// An address for the server. It is free again for a moment, and nothing listens there: nobody sees it before the server does.
fn free_address() -> std::io::Result<SocketAddr> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
    socket.local_addr()?.as_socket().ok_or_else(|| std::io::Error::other("a socket without an address"))
}

/// Connects to the server of this process before others do, and waits until it has accepted that. Errors: another one was first.
fn first_caller(address: SocketAddr, has_ended: impl Fn() -> bool) -> Result<TcpStream, ChildError> {
    let deadline = Instant::now() + ACCEPT_DEADLINE;
    let is_late = || has_ended() || Instant::now() > deadline;
    // All looks are without a pause: others look for open ports, too, and may come and leave between two looks. A call before the
    // socket is bound would show them the port.
    while !rpc::OwnSockets::now()?.has_bound(address) {
        if is_late() {
            return Err(ChildError::NotAccepted);
        }
        std::thread::yield_now();
    }
    let own = loop {
        match TcpStream::connect(address) {
            Ok(own) => break own,
            Err(error) if is_late() => return Err(error.into()),
            Err(_) => {}
        }
    };
    own.set_nodelay(true)?;
    let caller = own.local_addr()?;
    loop {
        let callers: Vec<SocketAddr> = rpc::OwnSockets::now()?.callers(address).collect();
        if let Some(stranger) = callers.iter().find(|address| **address != caller) {
            return Err(ChildError::Stranger(*stranger));
        }
        if callers.contains(&caller) {
            return Ok(own);
        }
        if is_late() {
            return Err(ChildError::NotAccepted);
        }
        std::thread::yield_now();
    }
}

/// Carries the bytes of one connection to another on a thread. Its end is the end of this process.
fn carry(from: &TcpStream, to: &TcpStream) -> std::io::Result<()> {
    let (mut from, mut to) = (from.try_clone()?, to.try_clone()?);
    to.set_nodelay(true)?;
    let carry = move || {
        let mut piece = vec![0; PIECE_BYTES];
        while let Ok(n @ 1..) = from.read(&mut piece) {
            if to.write_all(&piece[..n]).is_err() {
                break;
            }
        }
        parent::end_at_once()
    };
    std::thread::Builder::new().name("carrier".into()).spawn(carry).map(drop)
}

/// The address where the parent listens.
fn caller() -> Result<SocketAddr, ChildError> {
    let mut line = String::new();
    std::io::stdin().lock().take(MAX_ADDRESS_BYTES).read_line(&mut line)?;
    line.trim_end().parse().map_err(|_| ChildError::NoCaller)
}

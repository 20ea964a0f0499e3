//! A session: one user of a worker's devices. It runs in a child process that ends with it, so nothing is left over: no
//! memory, no tensors, and no damage.
//!
//! The child runs ggml's RPC server, which serves whoever connects to its port of loopback first: that is the child itself, which
//! then connects here. Who connects to this process's port instead of the child is refused.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_process::{ChildCommand, ChildProcess, StartFailure};
use baton_schemas::worker::{LentDevice, MAX_WORKERS};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use super::pipe::{SessionEnd, carry};
use super::rpc_exchange::RpcExchange;

/// How long a session waits for the end of the one before it. An engine that starts opens two, one after the other.
const TURN_DEADLINE: Duration = Duration::from_secs(5);

/// The start of a child: the driver of a GPU takes seconds.
const START_DEADLINE: Duration = Duration::from_secs(60);

/// The longest silence of a child, which shows each second that it is alive. After it, the child is frozen.
const SILENCE_DEADLINE: Duration = Duration::from_secs(5);

/// The age at which a description of free memory is made again, when a node asks for it.
const REFRESH_AFTER: Duration = Duration::from_secs(30);

/// Children that are started for a session. Somebody else on this machine may be the first caller of one's server.
const MAX_STARTS: usize = 3;

/// Connections that may wait while the child's is looked for: more than a stranger opens before the child connects.
const BACKLOG: u32 = 1_024;

/// The devices to lend, and the program that lends them.
#[derive(Debug, Clone)]
pub struct LenderOptions {
    /// `baton`, whose hidden command `lend` is the child.
    pub program: PathBuf,
    /// The one device, by its name; by default every GPU, or else the processor.
    pub device: Option<String>,
    /// Threads of the processor; by default one per core.
    pub threads: Option<u32>,
    /// Bytes of memory that a child may take.
    pub max_memory: Option<u64>,
}

impl LenderOptions {
    /// It gets no secret: the child trusts the bytes that it gets.
    fn command(&self) -> ChildCommand {
        let mut args: Vec<OsString> = vec!["lend".into()];
        args.extend(self.device.iter().flat_map(|device| ["--device".into(), device.into()]));
        args.extend(self.threads.iter().flat_map(|n| ["--threads".into(), n.to_string().into()]));
        args.extend(self.max_memory.iter().flat_map(|n| ["--max-memory".into(), n.to_string().into()]));
        ChildCommand::new("the process that lends the devices", &self.program).args(args)
    }

    async fn describe(&self) -> Result<LentDevices, LendError> {
        let mut child = self.command().args(["--describe"]).spawn()?;
        let devices = tokio::time::timeout(START_DEADLINE, child.answer::<Vec<LentDevice>>()).await;
        let devices = devices.map_err(|_| LendError::TimedOut)??;
        let is_usable = (1..=MAX_WORKERS).contains(&devices.len());
        is_usable.then_some(LentDevices { devices, at: Instant::now() }).ok_or(LendError::NumberOfDevices)
    }
}

/// Why no session begins.
#[derive(Debug, thiserror::Error)]
pub enum LendError {
    #[error("another node uses this worker")]
    Busy,
    #[error(transparent)]
    Child(#[from] StartFailure),
    #[error("the process that lends the devices cannot be called: {0}")]
    Call(#[from] std::io::Error),
    #[error("the process that lends the devices does not become ready in time")]
    TimedOut,
    #[error("the process that lends the devices names no address")]
    NoAddress,
    #[error("this machine has no device to lend, or more than {MAX_WORKERS}")]
    NumberOfDevices,
}

/// The devices as a child has described them.
#[derive(Debug)]
struct LentDevices {
    devices: Vec<LentDevice>,
    at: Instant,
}

/// Lends this machine's devices to one user at a time.
#[derive(Debug)]
pub struct Lender {
    options: LenderOptions,
    described: Mutex<LentDevices>,
    turn: Arc<Semaphore>,
}

impl Lender {
    /// Asks a child for the devices. Errors: there are none as configured.
    pub async fn start(options: LenderOptions) -> Result<Lender, LendError> {
        let described = Mutex::new(options.describe().await?);
        Ok(Lender { options, described, turn: Arc::new(Semaphore::new(1)) })
    }

    /// Returns the lent devices. Their free memory is that of the last description.
    pub fn devices(&self) -> Vec<LentDevice> {
        self.lock().devices.clone()
    }

    /// Asks a child again, unless the last description is recent or somebody uses the devices: other programs take and free
    /// memory, too.
    pub async fn refresh(&self) -> Result<(), LendError> {
        if self.is_busy() || self.lock().at.elapsed() < REFRESH_AFTER {
            return Ok(());
        }
        // Others need not ask meanwhile.
        self.lock().at = Instant::now();
        let described = self.options.describe().await?;
        // A session that has begun meanwhile has taken memory.
        if !self.is_busy() {
            *self.lock() = described;
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, LentDevices> {
        self.described.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes that are lent of each device's memory.
    pub fn max_memory(&self) -> Option<u64> {
        self.options.max_memory
    }

    /// True while somebody uses the devices.
    pub fn is_busy(&self) -> bool {
        self.turn.available_permits() == 0
    }

    /// Starts a child for one user. Dropping the session kills it. Errors: another one uses the devices, or it does not
    /// start.
    pub async fn open(&self) -> Result<DeviceSession, LendError> {
        let turn = tokio::time::timeout(TURN_DEADLINE, Arc::clone(&self.turn).acquire_owned()).await;
        let turn = turn.ok().and_then(Result::ok).ok_or(LendError::Busy)?;
        let mut n_started = 0;
        loop {
            let mut child = self.options.command().spawn()?;
            let begun = tokio::time::timeout(START_DEADLINE, connected(&mut child)).await;
            n_started += 1;
            match begun.unwrap_or(Err(LendError::TimedOut)) {
                Ok(stream) => return Ok(DeviceSession { stream, child, _turn: turn }),
                Err(error) => {
                    child.kill().await;
                    if n_started == MAX_STARTS || !matches!(error, LendError::Child(StartFailure::Refused { .. })) {
                        return Err(error);
                    }
                    tracing::warn!(%error, "a session's process ended before it began; another one is started");
                }
            }
        }
    }
}

/// One user's hold of the devices.
#[derive(Debug)]
pub struct DeviceSession {
    stream: TcpStream,
    child: ChildProcess,
    _turn: OwnedSemaphorePermit,
}

impl DeviceSession {
    /// Carries the user's bytes until the user leaves, `closing` is cancelled, or the child ends, freezes or is sent
    /// something else than ggml's protocol. Then the child is gone, and the devices are free. Returns why the user has
    /// lost the devices, or nothing if the user has left.
    pub(super) async fn serve(
        self,
        user: impl AsyncRead + AsyncWrite,
        closing: CancellationToken,
        exchange: RpcExchange,
    ) -> Option<String> {
        let DeviceSession { stream, mut child, _turn } = self;
        let lost = tokio::select! {
            end = carry(user, stream, exchange) => match end {
                SessionEnd::EngineLeft => None,
                end => Some(end.to_string()),
            },
            lost = until_lost(&mut child) => Some(lost),
            () = closing.cancelled() => Some("the worker stops".to_owned()),
        };
        child.kill().await;
        lost
    }
}

/// Returns once the child has ended or is silent, and says which.
async fn until_lost(child: &mut ChildProcess) -> String {
    loop {
        // Time in which this process is stopped does not count.
        match baton_link::awake::timeout(SILENCE_DEADLINE, child.sign_of_life()).await {
            Ok(Ok(())) => {}
            Ok(Err(ended)) => return ended,
            Err(_) => return "the process that lends the devices is frozen".to_owned(),
        }
    }
}

/// Has the child connect to this process. The caller has a deadline.
async fn connected(child: &mut ChildProcess) -> Result<TcpStream, LendError> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
    let listener = socket.listen(BACKLOG)?;
    child.tell(&listener.local_addr()?.to_string()).await?;
    let of_child = child.report().await?.ok_or(LendError::NoAddress)?;
    loop {
        // Whoever else has connected is a stranger, and its connection ends here.
        let (stream, caller) = listener.accept().await?;
        if caller == of_child {
            stream.set_nodelay(true)?;
            return Ok(stream);
        }
    }
}

//! A session: one user of a worker's devices. It runs in a child process that ends with it, so nothing is left over: no
//! memory, no tensors, and no damage.
//!
//! The child runs ggml's RPC server, which serves whoever connects to its port of loopback. So the child is told from
//! which port this process has connected, and ends at once if it was anybody else.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_schemas::node::{ChildEvent, KEY_VARIABLE, PULL_KEY_VARIABLE, WORKERS_KEY_VARIABLE};
use baton_schemas::worker::{LentDevice, MAX_WORKERS};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
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

/// The end of a child that has closed its output.
const END_GRACE: Duration = Duration::from_secs(1);

/// The end of a killed child.
const END_DEADLINE: Duration = Duration::from_secs(10);

/// The age at which a description of free memory is made again, when a node asks for it.
const REFRESH_AFTER: Duration = Duration::from_secs(30);

/// How often a connection to the child is tried until its server listens.
const CONNECT_INTERVAL: Duration = Duration::from_millis(5);

/// Bytes that a child may write before it is ready; its events have some hundred.
const MAX_EVENT_BYTES: u64 = 64 << 10;

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
    fn command(&self) -> Command {
        let mut args: Vec<OsString> = vec!["lend".into()];
        args.extend(self.device.iter().flat_map(|device| ["--device".into(), device.into()]));
        args.extend(self.threads.iter().flat_map(|n| ["--threads".into(), n.to_string().into()]));
        args.extend(self.max_memory.iter().flat_map(|n| ["--max-memory".into(), n.to_string().into()]));
        let mut command = Command::new(&self.program);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        // Ctrl-C in the terminal is for this process, whose user may still need the child.
        command.process_group(0).env_remove("NOTIFY_SOCKET");
        // It trusts the bytes that it gets, so it must know no secret.
        for variable in [KEY_VARIABLE, PULL_KEY_VARIABLE, WORKERS_KEY_VARIABLE] {
            command.env_remove(variable);
        }
        command
    }

    async fn describe(&self) -> Result<Described, LendError> {
        let mut child = self.command().arg("--describe").spawn()?;
        let output = child.stdout.take().ok_or(LendError::Ended)?;
        let devices = tokio::time::timeout(START_DEADLINE, described(output)).await;
        Ok(Described { devices: devices.map_err(|_| LendError::TimedOut)??, at: Instant::now() })
    }
}

/// Why no session begins.
#[derive(Debug, thiserror::Error)]
pub enum LendError {
    #[error("another node uses this worker")]
    Busy,
    /// The child says why.
    #[error("{0}")]
    Refused(String),
    #[error("the process that lends the devices does not start: {0}")]
    Start(#[from] std::io::Error),
    #[error("the process that lends the devices does not become ready in time")]
    TimedOut,
    #[error("the process that lends the devices has ended while starting")]
    Ended,
}

/// The devices as a child has described them.
#[derive(Debug)]
struct Described {
    devices: Vec<LentDevice>,
    at: Instant,
}

/// Lends this machine's devices to one user at a time.
#[derive(Debug)]
pub struct Lender {
    options: LenderOptions,
    described: Mutex<Described>,
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

    fn lock(&self) -> MutexGuard<'_, Described> {
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
    pub async fn open(&self) -> Result<Session, LendError> {
        let turn = tokio::time::timeout(TURN_DEADLINE, Arc::clone(&self.turn).acquire_owned()).await;
        let turn = turn.ok().and_then(Result::ok).ok_or(LendError::Busy)?;
        let mut child = self.options.command().spawn()?;
        let output = child.stdout.take().ok_or(LendError::Ended)?;
        let mut input = child.stdin.take().ok_or(LendError::Ended)?;
        let begin = async {
            let mut output = BufReader::new(output);
            let address = next_event(&mut output).await?.ok_or(LendError::Ended)?;
            let stream = connected(address).await?;
            let own = stream.local_addr()?;
            input.write_all(format!("{own}\n").as_bytes()).await?;
            input.flush().await?;
            next_event(&mut output).await?;
            Ok::<_, LendError>((stream, output))
        };
        let begun = tokio::time::timeout(START_DEADLINE, begin).await;
        match begun.unwrap_or(Err(LendError::TimedOut)) {
            Ok((stream, output)) => Ok(Session { stream, child, output, _lifeline: input, _turn: turn }),
            Err(error) => {
                end(child).await;
                Err(error)
            }
        }
    }
}

/// One user's hold of the devices.
#[derive(Debug)]
pub struct Session {
    stream: TcpStream,
    child: Child,
    output: BufReader<ChildStdout>,
    /// The child ends when this is closed.
    _lifeline: ChildStdin,
    _turn: OwnedSemaphorePermit,
}

impl Session {
    /// Carries the user's bytes until the user leaves, `closing` is cancelled, or the child ends, freezes or is sent
    /// something else than ggml's protocol. Then the child is gone, and the devices are free. Returns why the user has
    /// lost the devices, or nothing if the user has left.
    pub(super) async fn serve(
        self,
        user: impl AsyncRead + AsyncWrite,
        closing: CancellationToken,
        exchange: RpcExchange,
    ) -> Option<String> {
        let Session { stream, mut child, output, _lifeline, _turn } = self;
        let lost = tokio::select! {
            end = carry(user, stream, exchange) => match end {
                SessionEnd::EngineLeft => None,
                end => Some(end.to_string()),
            },
            exited = child.wait() => Some(match exited {
                Ok(status) => format!("the process that lends the devices has ended ({status})"),
                Err(error) => error.to_string(),
            }),
            () = until_silent(output) => Some("the process that lends the devices is frozen".to_owned()),
            () = closing.cancelled() => Some("the worker stops".to_owned()),
        };
        end(child).await;
        lost
    }
}

/// Kills a child and waits for its end, since only then its memory is free.
async fn end(mut child: Child) {
    match tokio::time::timeout(END_DEADLINE, child.kill()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::error!(%error, "the process that lends the devices cannot be killed"),
        Err(_) => tracing::error!("the process that lends the devices was killed but has not ended"),
    }
}

/// Returns once the child is silent. A child that closes its output ends, which is noticed by itself.
async fn until_silent(mut output: BufReader<ChildStdout>) {
    let mut bytes = [0; 256];
    // Time in which this process is stopped does not count.
    while let Ok(Ok(1..)) = crate::awake::timeout(SILENCE_DEADLINE, output.read(&mut bytes)).await {}
    tokio::time::sleep(END_GRACE).await;
}

async fn connected(address: SocketAddr) -> Result<TcpStream, LendError> {
    // The caller has a deadline. A server that cannot listen ends its process, whose port then refuses.
    loop {
        match TcpStream::connect(address).await {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(_) => tokio::time::sleep(CONNECT_INTERVAL).await,
        }
    }
}

/// The address in the next event on a child's output; other lines, which ggml writes, are passed over. Errors: the
/// child says why it cannot start, or it has ended.
async fn next_event(output: &mut BufReader<ChildStdout>) -> Result<Option<SocketAddr>, LendError> {
    let mut left = MAX_EVENT_BYTES;
    loop {
        let mut line = Vec::new();
        let n = (&mut *output).take(left).read_until(b'\n', &mut line).await?;
        left = left.saturating_sub(n as u64);
        if n == 0 || left == 0 {
            return Err(LendError::Ended);
        }
        match serde_json::from_slice(&line) {
            Ok(ChildEvent::Ready { address }) => return Ok(address),
            Ok(ChildEvent::Failed { message, .. }) => return Err(LendError::Refused(message)),
            Err(_) => {}
        }
    }
}

/// The devices that a child describes, or why it cannot lend them.
async fn described(output: ChildStdout) -> Result<Vec<LentDevice>, LendError> {
    let mut text = Vec::new();
    output.take(MAX_EVENT_BYTES).read_to_end(&mut text).await?;
    for line in text.split(|byte| *byte == b'\n') {
        if let Ok(devices) = serde_json::from_slice::<Vec<LentDevice>>(line) {
            return if (1..=MAX_WORKERS).contains(&devices.len()) { Ok(devices) } else { Err(LendError::Ended) };
        }
        if let Ok(ChildEvent::Failed { message, .. }) = serde_json::from_slice(line) {
            return Err(LendError::Refused(message));
        }
    }
    Err(LendError::Ended)
}

//! Keeps a local engine's process alive.
//!
//! The engine runs as `baton node` on a private Unix socket. The child reports on standard output that it is ready, or
//! why it cannot start. Its standard input is its lifeline: when this process ends for any reason, the pipe closes and
//! the child exits.
//!
//! ```text
//!            ready             exit, or silence and a kill, after a stable run
//! Starting ─────────► Ready ──────────────────────────────────────────────────► Starting
//!    ▲  │ cannot start  │ ends again and again
//!    │  ▼               ▼
//!    └── Down (backs off: 0.25 s doubling to 30 s)
//! ```
//!
//! From each state it becomes Unloaded when it is no longer wanted, and Starting when it is wanted again.
//!
//! A frozen child (stopped, stuck in a driver) would block its streams forever. So the supervisor probes it, and kills
//! it when it no longer answers: its streams end with an error, and a new child is started.

use std::ffi::OsString;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use baton_engines::Engine;
use baton_engines::remote::{NodeAddress, RemoteEngine};
use baton_schemas::EngineError;
use baton_schemas::node::{ChildEvent, KEY_VARIABLE, NodeInfo, PULL_KEY_VARIABLE, WORKERS_KEY_VARIABLE};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::socket_folder::{SocketFolder, SocketFolderError};
use crate::observe::telemetry::ENDPOINT_VARIABLES;
use crate::targets::nodes::probe;
use crate::targets::nodes::{Health, StateChange, StateReason};

/// How long OpenMP's idle threads spin before they sleep, for libgomp (loop turns) and LLVM's runtime (milliseconds).
/// Endless spinning starves a shared machine (decode fell from 127 to 6 tokens/s next to two busy processes). No spinning
/// pays a wake-up per operation (127 to 48 on an idle machine). This keeps most of both.
pub(super) const THREAD_WAIT: [(&str, &str); 2] = [("GOMP_SPINCOUNT", "5000"), ("KMP_BLOCKTIME", "1")];

/// A large model on a slow disk takes minutes; longer than this is a hang.
const START_DEADLINE: Duration = Duration::from_secs(600);

/// The same with workers, to which the weights travel, and which may be started later.
const WORKERS_START_DEADLINE: Duration = Duration::from_secs(4 * 3600);

/// The end of a child that ran this long does not count as a quick exit.
const STABLE_AFTER: Duration = Duration::from_secs(10);

/// Quick exits in a row before the engine counts as failed.
const FORGIVEN_EXITS: u32 = 3;

const FIRST_BACKOFF: Duration = Duration::from_millis(250);
const MAX_BACKOFF: Duration = Duration::from_secs(30);

/// How long a child may take to end after its lifeline is cut.
const STOP_DEADLINE: Duration = Duration::from_secs(5);

/// Bytes that a child may write before it is ready; the event has a few hundred.
const MAX_EVENT_BYTES: u64 = 64 << 10;

/// The reason why a start failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum StartError {
    /// The child said why.
    #[error("{message}")]
    Refused {
        /// For the operator: may name files.
        message: String,
        /// For clients.
        summary: String,
    },
    /// The child ended without a report.
    #[error("the engine's process ended while starting ({status})")]
    Ended {
        /// How it ended.
        status: ExitStatus,
    },
    /// The child is silent.
    #[error("the engine's process did not become ready within {} s", .0.as_secs())]
    TimedOut(Duration),
    /// The socket's folder cannot be created.
    #[error(transparent)]
    Folder(#[from] SocketFolderError),
    /// The process could not be started, or its socket does not answer.
    #[error("the engine's process cannot be started: {0}")]
    Spawn(String),
}

impl StartError {
    fn summary(&self) -> String {
        match self {
            StartError::Refused { summary, .. } => summary.clone(),
            StartError::Ended { .. } => "the engine ended while it was starting".into(),
            StartError::TimedOut(_) => "the engine does not become ready".into(),
            StartError::Folder(_) | StartError::Spawn(_) => "the engine's process cannot be started".into(),
        }
    }
}

/// For a child that runs as long as this process.
pub(super) fn always() -> watch::Receiver<bool> {
    watch::channel(true).1
}

pub(super) struct Supervised {
    pub(super) engine: Arc<RemoteEngine>,
    pub(super) health: Arc<Health>,
    /// Its process's id; 0 while there is none.
    pub(super) pid: Arc<AtomicU32>,
    /// Ends the child when cancelled.
    pub(super) stop: CancellationToken,
    /// Finishes when the child is gone.
    pub(super) tracker: TaskTracker,
}

pub(super) type FirstStartResult = Result<Arc<NodeInfo>, StartError>;

/// The program and arguments of a child process.
pub(super) struct ChildSpec {
    pub(super) log_name: String,
    /// Arguments after `node --child --listen unix:…`.
    pub(super) args: Vec<OsString>,
    /// The cluster's key, for a child that pulls KV from other nodes.
    pub(super) pull_key: Option<String>,
    /// The cluster's key, for a child whose engine has workers.
    pub(super) workers_key: Option<String>,
    /// The collector of its traces.
    pub(super) traces_to: Option<String>,
}

/// Starts supervising a child, which runs while `wanted` is true. The receiver resolves once the first start has succeeded
/// or failed.
pub(super) fn supervise(
    spec: ChildSpec,
    wanted: watch::Receiver<bool>,
) -> Result<(Supervised, oneshot::Receiver<FirstStartResult>), StartError> {
    let spawn = |e: &dyn std::fmt::Display| StartError::Spawn(e.to_string());
    let folder = SocketFolder::create()?;
    let socket = folder.socket();
    let key = uuid::Uuid::new_v4().to_string();
    let engine = RemoteEngine::new(&NodeAddress::Unix(socket.clone()), &key).map_err(|e| spawn(&e))?;
    let engine = Arc::new(engine);

    let mut listen = OsString::from("unix:");
    listen.push(&socket);
    let mut command = Command::new(std::env::current_exe().map_err(|e| spawn(&e))?);
    command.args(["node", "--child", "--listen"]).arg(listen).args(spec.args);
    command.env(KEY_VARIABLE, &key).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
    command.env_remove(PULL_KEY_VARIABLE).envs(spec.pull_key.map(|key| (PULL_KEY_VARIABLE, key)));
    let start_deadline = if spec.workers_key.is_some() { WORKERS_START_DEADLINE } else { START_DEADLINE };
    command.env_remove(WORKERS_KEY_VARIABLE).envs(spec.workers_key.map(|key| (WORKERS_KEY_VARIABLE, key)));
    command.envs(spec.traces_to.map(|endpoint| (ENDPOINT_VARIABLES[0], endpoint)));
    // Only this process reports to the service manager.
    command.env_remove("NOTIFY_SOCKET");
    // A group of its own: Ctrl-C in the terminal is for this process, whose streams still need the child to drain.
    command.process_group(0);

    command.envs(THREAD_WAIT.iter().filter(|(name, _)| std::env::var_os(name).is_none()).copied());

    let health = Health::supervised(spec.log_name);
    if !*wanted.borrow() {
        health.note_unloaded();
    }
    let (first, first_rx) = oneshot::channel();
    let stop = CancellationToken::new();
    let tracker = TaskTracker::new();
    let pid = Arc::new(AtomicU32::new(0));
    let keeper = Keeper {
        command,
        engine: Arc::clone(&engine),
        health: Arc::clone(&health),
        pid: Arc::clone(&pid),
        wanted,
        starting: None,
        failures: 0,
        start_deadline,
    };
    let stopped = stop.clone();
    tracker.spawn(async move {
        let _folder = folder;
        keeper.run(first, stopped).await;
    });
    tracker.close();
    Ok((Supervised { engine, health, pid, stop, tracker }, first_rx))
}

struct Keeper {
    command: Command,
    engine: Arc<RemoteEngine>,
    health: Arc<Health>,
    pid: Arc<AtomicU32>,
    wanted: watch::Receiver<bool>,
    /// A child that is not ready yet.
    starting: Option<Child>,
    /// Failed starts and quick exits in a row.
    failures: u32,
    start_deadline: Duration,
}

impl Keeper {
    async fn run(mut self, first: oneshot::Sender<FirstStartResult>, stop: CancellationToken) {
        let mut first = Some(first);
        let mut wanted = self.wanted.clone();
        while !stop.is_cancelled() {
            if !*wanted.borrow() {
                self.pid.store(0, Ordering::Relaxed);
                self.health.note_unloaded();
                self.failures = 0;
                tokio::select! {
                    () = until(&mut wanted, true) => {}
                    () = stop.cancelled() => return,
                }
            }
            self.health.note_loading(StateReason::Starts);
            let started = tokio::select! {
                started = self.start() => Some(started),
                () = until(&mut wanted, false) => None,
                () = stop.cancelled() => None,
            };
            // Its memory is free only after the process has ended.
            self.discard().await;
            let Some(started) = started else { continue };
            let mut report = |result| first.take().is_some_and(|first| first.send(result).is_ok());
            match started {
                Ok((running, info)) => {
                    report(Ok(Arc::clone(&info)));
                    if self.watch_over(running, &info, &stop).await {
                        return;
                    }
                }
                Err(error) => {
                    let summary = error.summary();
                    let message = error.to_string();
                    self.failures += 1;
                    // The first failure goes to the caller that waits for the first start; later ones go to the log.
                    if !report(Err(error)) {
                        tracing::error!(error = message, "the engine did not start; retrying");
                    }
                    if self.back_off(summary, &stop).await {
                        return;
                    }
                }
            }
        }
    }

    /// Spawns a child and waits until it reports that it is ready, or why it cannot start.
    async fn start(&mut self) -> Result<(RunningChild, Arc<NodeInfo>), StartError> {
        let child = self.command.spawn().map_err(|e| StartError::Spawn(e.to_string()))?;
        self.pid.store(child.id().unwrap_or(0), Ordering::Relaxed);
        let child = self.starting.insert(child);
        let stdout = child.stdout.take().ok_or_else(|| StartError::Spawn("no standard output".into()))?;
        // Taken out of the child, because waiting for a child closes the input it still holds.
        let lifeline = child.stdin.take().ok_or_else(|| StartError::Spawn("no standard input".into()))?;
        match tokio::time::timeout(self.start_deadline, first_event(stdout)).await {
            Err(_) => return Err(StartError::TimedOut(self.start_deadline)),
            Ok(Some(ChildEvent::Ready { .. })) => {}
            Ok(Some(ChildEvent::Failed { message, summary })) => return Err(StartError::Refused { message, summary }),
            Ok(None) => {
                // The child closed its output, so it has ended or is about to.
                let ended = tokio::time::timeout(STOP_DEADLINE, child.wait()).await;
                let status = ended.map_err(|_| StartError::Spawn("it closed its output".into()))?;
                let status = status.map_err(|e| StartError::Spawn(e.to_string()))?;
                return Err(StartError::Ended { status });
            }
        }
        let info = self.engine.info().await.map_err(|e: EngineError| StartError::Spawn(e.to_string()))?;
        let info = Arc::new(info);
        let child = self.starting.take().ok_or_else(|| StartError::Spawn("the child is lost".into()))?;
        self.health.note_answer(Arc::clone(&info));
        Ok((RunningChild { child, lifeline }, info))
    }

    /// Kills a child that is not ready.
    async fn discard(&mut self) {
        let Some(mut child) = self.starting.take() else { return };
        match tokio::time::timeout(STOP_DEADLINE, child.kill()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!(%error, "the engine's process cannot be killed"),
            Err(_) => tracing::error!("the engine's process was killed but has not ended"),
        }
    }

    /// Waits for the end of the child, and kills a child that is frozen. Returns true if supervision is over.
    async fn watch_over(&mut self, mut running: RunningChild, info: &Arc<NodeInfo>, stop: &CancellationToken) -> bool {
        let since = Instant::now();
        let note = |answer: Result<(), EngineError>| match answer {
            Ok(()) => self.health.note_answer(Arc::clone(info)),
            Err(error) => self.health.note_missed_answer(&StateChange::from(&error), probe::INTERVAL),
        };
        let exited = tokio::select! {
            exited = running.child.wait() => Some(exited),
            () = probe::until_frozen(&*self.engine, note) => None,
            () = until(&mut self.wanted, false) => {
                self.health.note_unloading();
                running.end().await;
                return false;
            }
            () = stop.cancelled() => {
                self.health.note_unloading();
                running.end().await;
                return true;
            }
        };
        // Set this before the kill: a request that the kill fails must not retry on this engine.
        self.health.note_loading(StateReason::Ended);
        let exited = match exited {
            Some(exited) => exited,
            None => {
                tracing::warn!("the engine's process no longer answers and is killed");
                match running.child.start_kill() {
                    Ok(()) => running.child.wait().await,
                    Err(error) => Err(error),
                }
            }
        };
        match &exited {
            Ok(status) => tracing::warn!(%status, "the engine's process has ended; restarting it"),
            Err(error) => tracing::warn!(%error, "the engine's process is lost; restarting it"),
        }
        self.failures = if since.elapsed() >= STABLE_AFTER { 0 } else { self.failures + 1 };
        if self.failures <= FORGIVEN_EXITS {
            return false;
        }
        self.back_off("the engine keeps ending soon after its start".into(), stop).await
    }

    /// Waits before the next attempt. Returns true if supervision is over.
    async fn back_off(&mut self, reason: String, stop: &CancellationToken) -> bool {
        let doublings = self.failures.saturating_sub(1).min(16);
        let retry_in = FIRST_BACKOFF.saturating_mul(1 << doublings).min(MAX_BACKOFF);
        let cause = format!("{reason}; it is started again in {} s", retry_in.as_secs_f32());
        self.health.note_failure(&StateChange { reason: StateReason::StartFailed, words: reason, cause }, retry_in);
        tokio::select! {
            () = tokio::time::sleep(retry_in) => false,
            () = until(&mut self.wanted, false) => false,
            () = stop.cancelled() => true,
        }
    }
}

/// Returns once the child is wanted, or no longer wanted. If the sender is gone, its last decision stays.
async fn until(wanted: &mut watch::Receiver<bool>, value: bool) {
    if wanted.wait_for(|now| *now == value).await.is_err() {
        std::future::pending().await
    }
}

/// The first event on a child's output; other lines, which a library may have written, are passed over.
async fn first_event(stdout: impl AsyncRead + Unpin) -> Option<ChildEvent> {
    let mut lines = BufReader::new(stdout.take(MAX_EVENT_BYTES)).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        match serde_json::from_str(&line) {
            Ok(event) => return Some(event),
            Err(_) => tracing::debug!(line, "the engine's process wrote a line that is not an event; it is ignored"),
        }
    }
    None
}

/// A child that is ready.
struct RunningChild {
    child: Child,
    /// Its standard input. The child ends when this is closed.
    lifeline: ChildStdin,
}

impl RunningChild {
    /// Cuts the lifeline, and kills a child that does not end by itself.
    async fn end(self) {
        let RunningChild { mut child, lifeline } = self;
        drop(lifeline);
        if tokio::time::timeout(STOP_DEADLINE, child.wait()).await.is_err() {
            tracing::warn!("the engine's process did not end by itself and is killed");
            if let Err(error) = child.kill().await {
                tracing::error!(%error, "the engine's process cannot be killed");
            }
        }
    }
}

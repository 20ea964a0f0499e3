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
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use baton_engines::engine_options::StoreSecret;
use baton_link::remote::{ClientError, NodeAddress, RemoteEngine};
use baton_process::{ChildCommand, ChildProcess, Restarts, StartFailure};
use baton_schemas::EngineError;
use baton_schemas::node::{KEY_VARIABLE, NodeInfo, PULL_KEY_VARIABLE, STORE_SECRET_VARIABLE, WORKERS_KEY_VARIABLE};
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
pub const THREAD_WAIT: [(&str, &str); 2] = [("GOMP_SPINCOUNT", "5000"), ("KMP_BLOCKTIME", "1")];

/// A large model on a slow disk takes minutes; longer than this is a hang.
const START_DEADLINE: Duration = Duration::from_secs(600);

/// The same with workers, to which the weights travel, and which may be started later.
const WORKERS_START_DEADLINE: Duration = Duration::from_secs(4 * 3600);

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub(super) enum StartError {
    /// Its process did not become ready.
    #[error(transparent)]
    Process(#[from] StartFailure),
    /// The socket's folder cannot be created.
    #[error(transparent)]
    Folder(#[from] SocketFolderError),
    /// No client can be made for its socket.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Its process is ready, but its socket does not answer.
    #[error("the engine's process cannot be called: {0}")]
    Call(#[from] EngineError),
    /// It was unloaded before it started.
    #[error("the engine is not wanted any more")]
    Unwanted,
}

impl StartError {
    /// For clients.
    fn summary(&self) -> String {
        match self {
            StartError::Process(StartFailure::Refused { summary, .. } | StartFailure::Hindered { summary, .. }) => {
                summary.clone()
            }
            StartError::Process(StartFailure::Ended { .. }) => "the engine ended while it was starting".into(),
            StartError::Process(StartFailure::TimedOut { .. }) => "the engine does not become ready".into(),
            StartError::Process(StartFailure::Spawn { .. } | StartFailure::NoReport { .. })
            | StartError::Folder(_)
            | StartError::Client(_)
            | StartError::Call(_)
            | StartError::Unwanted => "the engine's process cannot be started".into(),
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
    /// The socket at which it listens.
    pub(super) socket: PathBuf,
    /// How its next process is started.
    pub(super) next_start: NextStart,
}

/// How the next process of a child is started. Other arguments count from its next start on.
#[derive(Clone)]
pub(super) struct NextStart {
    spec: Arc<ChildSpec>,
    socket: PathBuf,
    key: String,
    command: Arc<Mutex<ChildCommand>>,
}

impl NextStart {
    fn new(spec: ChildSpec, socket: PathBuf, key: String) -> Result<NextStart, StartError> {
        let command = Arc::new(Mutex::new(command(&spec, spec.args.clone(), &socket, &key)?));
        Ok(NextStart { spec: Arc::new(spec), socket, key, command })
    }

    /// Replaces all arguments of [`ChildSpec::args`].
    pub(super) fn set_args(&self, args: Vec<OsString>) -> Result<(), StartError> {
        let next = command(&self.spec, args, &self.socket, &self.key)?;
        *self.command.lock().unwrap_or_else(PoisonError::into_inner) = next;
        Ok(())
    }

    fn spawn(&self) -> Result<ChildProcess, StartFailure> {
        self.command.lock().unwrap_or_else(PoisonError::into_inner).spawn()
    }
}

fn command(spec: &ChildSpec, args: Vec<OsString>, socket: &Path, key: &str) -> Result<ChildCommand, StartError> {
    let mut listen = OsString::from("unix:");
    listen.push(socket);
    let secret = spec.store_secret.as_ref().map(|StoreSecret(secret)| (STORE_SECRET_VARIABLE, secret));
    let command = ChildCommand::of_this_program("the engine's process")?
        .args(["node", "--child", "--listen"])
        .args([listen])
        .args(args)
        .envs([(KEY_VARIABLE, key)])
        .envs(spec.pull_key.iter().map(|key| (PULL_KEY_VARIABLE, key)))
        .envs(spec.workers_key.iter().map(|key| (WORKERS_KEY_VARIABLE, key)))
        .envs(secret)
        .envs(spec.traces_to.iter().map(|endpoint| (ENDPOINT_VARIABLES[0], endpoint)))
        .envs(THREAD_WAIT.iter().filter(|(name, _)| std::env::var_os(name).is_none()).copied());
    Ok(command)
}

pub(super) type FirstStartResult = Result<Arc<NodeInfo>, StartError>;

/// The program and arguments of a child process.
pub(super) struct ChildSpec {
    pub(super) log_name: String,
    /// Arguments after `node --child --listen unix:…`.
    pub(super) args: Vec<OsString>,
    /// The key that its callers present. `None`: one for this endpoint alone.
    pub(super) key: Option<String>,
    /// The cluster's key, for a child that pulls KV from other nodes.
    pub(super) pull_key: Option<String>,
    /// The cluster's key, for a child whose engine has workers.
    pub(super) workers_key: Option<String>,
    /// The secret of its KV store on disk.
    pub(super) store_secret: Option<StoreSecret>,
    /// The collector of its traces.
    pub(super) traces_to: Option<String>,
}

/// Starts supervising a child, which runs while `wanted` is true. The receiver resolves once the first start has succeeded
/// or failed.
pub(super) fn supervise(
    spec: ChildSpec,
    wanted: watch::Receiver<bool>,
) -> Result<(Supervised, oneshot::Receiver<FirstStartResult>), StartError> {
    let folder = SocketFolder::create()?;
    let socket = folder.socket();
    let key = spec.key.clone().unwrap_or_else(|| uuid::Uuid::new_v4().to_string());
    let engine = Arc::new(RemoteEngine::new(&NodeAddress::Unix(socket.clone()), &key)?);
    let has_workers = spec.workers_key.is_some();
    let start_deadline = if has_workers { WORKERS_START_DEADLINE } else { START_DEADLINE };
    let health = Health::supervised(spec.log_name.clone());
    let next_start = NextStart::new(spec, socket.clone(), key)?;
    if !*wanted.borrow() {
        health.note_unloaded();
    }
    let (first, first_rx) = oneshot::channel();
    let stop = CancellationToken::new();
    let tracker = TaskTracker::new();
    let pid = Arc::new(AtomicU32::new(0));
    let keeper = KeptEngine {
        next_start: next_start.clone(),
        engine: Arc::clone(&engine),
        health: Arc::clone(&health),
        pid: Arc::clone(&pid),
        wanted,
        starting: None,
        restarts: Restarts::default(),
        start_deadline,
        has_workers,
    };
    let stopped = stop.clone();
    tracker.spawn(async move {
        let _folder = folder;
        keeper.run(first, stopped).await;
    });
    tracker.close();
    Ok((Supervised { engine, health, pid, stop, tracker, socket, next_start }, first_rx))
}

struct KeptEngine {
    next_start: NextStart,
    engine: Arc<RemoteEngine>,
    health: Arc<Health>,
    pid: Arc<AtomicU32>,
    wanted: watch::Receiver<bool>,
    /// A child that is not ready yet.
    starting: Option<ChildProcess>,
    restarts: Restarts,
    start_deadline: Duration,
    /// Its engine computes with other machines.
    has_workers: bool,
}

impl KeptEngine {
    async fn run(mut self, first: oneshot::Sender<FirstStartResult>, stop: CancellationToken) {
        let mut first = Some(first);
        let mut wanted = self.wanted.clone();
        while !stop.is_cancelled() {
            if !*wanted.borrow() {
                self.pid.store(0, Ordering::Relaxed);
                self.health.note_unloaded();
                self.restarts = Restarts::default();
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
            if let Some(child) = self.starting.take() {
                child.kill().await;
            }
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
                    let pause = self.restarts.after_failed_start();
                    // An engine whose worker is lost ends without a report. It may start the next time.
                    let is_elsewhere = match &error {
                        StartError::Process(StartFailure::Hindered { .. }) => true,
                        StartError::Process(StartFailure::Ended { .. }) => self.has_workers,
                        _ => false,
                    };
                    // The first failure goes to the caller that waits for the first start; later ones go to the log.
                    if is_elsewhere || !report(Err(error)) {
                        tracing::error!(error = message, "the engine did not start; retrying");
                    }
                    if self.wait_out(pause, summary, &stop).await {
                        return;
                    }
                }
            }
        }
    }

    /// Spawns a child and waits until it reports that it is ready, or why it cannot start.
    async fn start(&mut self) -> Result<(ChildProcess, Arc<NodeInfo>), StartError> {
        let child = self.starting.insert(self.next_start.spawn()?);
        self.pid.store(child.id().unwrap_or(0), Ordering::Relaxed);
        child.ready_after_waits(self.start_deadline, |why| self.health.note_waiting(&why)).await?;
        let info = Arc::new(probe::first_info(&*self.engine, self.start_deadline).await?);
        let child = self.starting.take().ok_or(StartError::Unwanted)?;
        self.health.note_answer(Arc::clone(&info));
        Ok((child, info))
    }

    /// Waits for the end of the child, and kills a child that is frozen. Returns true if supervision is over.
    async fn watch_over(&mut self, mut running: ChildProcess, info: &Arc<NodeInfo>, stop: &CancellationToken) -> bool {
        let since = Instant::now();
        let note = |answer: Result<(), EngineError>| match answer {
            Ok(()) => self.health.note_answer(Arc::clone(info)),
            // The engine was not asked.
            Err(error @ EngineError::NoResources { .. }) => tracing::warn!(%error, "the engine could not be probed"),
            Err(error) => self.health.note_missed_answer(&StateChange::from(&error), probe::INTERVAL),
        };
        let exited = tokio::select! {
            exited = running.wait() => Some(exited),
            () = probe::until_frozen(&*self.engine, note) => None,
            () = until(&mut self.wanted, false) => {
                self.health.note_unloading();
                running.stop().await;
                return false;
            }
            () = stop.cancelled() => {
                self.health.note_unloading();
                running.stop().await;
                return true;
            }
        };
        // Set this before the kill: a request that the kill fails must not retry on this engine.
        self.health.note_loading(StateReason::Ended);
        match exited {
            Some(Ok(status)) => tracing::warn!(%status, "the engine's process has ended; restarting it"),
            Some(Err(error)) => tracing::warn!(%error, "the engine's process is lost; restarting it"),
            None => {
                tracing::warn!("the engine's process no longer answers; it is killed and started again");
                running.kill().await;
            }
        }
        let pause = self.restarts.after_end(since.elapsed());
        if pause.is_zero() {
            return false;
        }
        self.wait_out(pause, "the engine keeps ending soon after its start".into(), stop).await
    }

    /// Waits before the next attempt. Returns true if supervision is over.
    async fn wait_out(&mut self, pause: Duration, reason: String, stop: &CancellationToken) -> bool {
        let cause = format!("{reason}; it is started again in {} s", pause.as_secs_f32());
        self.health.note_failure(&StateChange { reason: StateReason::StartFailed, words: reason, cause }, pause);
        tokio::select! {
            () = tokio::time::sleep(pause) => false,
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

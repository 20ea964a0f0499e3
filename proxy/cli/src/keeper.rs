//! Keeps a node alive whose engine may end its process: this process runs the same command in a child, and starts it
//! again.
//!
//! ```text
//!            ready              ends abnormally
//! Starting ─────────► Serving ──────────────────► Starting, after 0.25 s, doubling to 30 s
//!    │ fails by itself    │ ends after a signal
//!    ▼                    ▼
//!  the mistake is shown   end
//! ```

use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use baton_engines::node::ListenAddress;
use baton_proxy::serve::{CommandFailure, service_manager};
use baton_schemas::node::ChildEvent;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::signal::unix::{self, SignalKind};

const FIRST_BACKOFF: Duration = Duration::from_millis(250);
const MAX_BACKOFF: Duration = Duration::from_secs(30);

/// The end of a child that was ready this long does not count as a quick exit.
const STABLE_AFTER: Duration = Duration::from_secs(10);

/// Bytes that a child may write before it is ready.
const MAX_EVENT_BYTES: u64 = 64 << 10;

/// Runs this command in a child until the child ends after a signal, or by a mistake of the operator.
pub(super) async fn keep(listen: &ListenAddress) -> Result<(), CommandFailure> {
    let address = fixed(listen)?;
    let mut signals = Signals::listen()?;
    let mut has_served = false;
    let mut backoff = FIRST_BACKOFF;
    loop {
        let mut ready_at = None;
        let (mut child, _lifeline, output) = start(&address)?;
        let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        let mut is_stopping = false;
        let mut becomes_ready = std::pin::pin!(ready(output));
        let mut is_ready = false;
        let status = loop {
            tokio::select! {
                status = child.wait() => break status?,
                reported = &mut becomes_ready, if !is_ready => {
                    is_ready = true;
                    ready_at = reported.then(Instant::now);
                    if reported && !has_served {
                        service_manager::report_ready();
                    }
                    has_served |= reported;
                }
                signal = signals.next() => {
                    // It drains. A second signal ends it at once, as without a keeper.
                    is_stopping |= signal != Signal::HUP;
                    if let Some(pid) = pid {
                        kill_process(pid, signal).map_err(std::io::Error::from)?;
                    }
                }
            }
        };
        // A child that is not ready yet does not handle SIGHUP, which ends it.
        if is_stopping || status.success() || status.signal() == Some(Signal::HUP.as_raw()) {
            service_manager::report_stopping();
            return Ok(());
        }
        // A process that a signal ended has lost a worker, or crashed. One that ended itself has said why.
        if !has_served && status.signal().is_none() {
            std::process::exit(status.code().unwrap_or(1));
        }
        if ready_at.is_some_and(|at| at.elapsed() >= STABLE_AFTER) {
            backoff = FIRST_BACKOFF;
        }
        let pause = backoff;
        backoff = backoff.saturating_mul(2).min(MAX_BACKOFF);
        say_restart(status, pause);
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            signal = signals.next() => if signal != Signal::HUP {
                return Ok(());
            },
        }
    }
}

fn say_restart(status: ExitStatus, pause: Duration) {
    let seconds = pause.as_secs_f32();
    tracing::warn!(%status, "the node's process has ended; it is started again in {seconds} s");
}

/// The address, with a port that stays the same when the child starts again.
fn fixed(listen: &ListenAddress) -> Result<String, CommandFailure> {
    match listen {
        ListenAddress::Tcp(address) if address.ends_with(":0") => {
            let bound = TcpListener::bind(address.as_str())?.local_addr()?;
            Ok(bound.to_string())
        }
        address => Ok(address.to_string()),
    }
}

fn start(address: &str) -> Result<(Child, ChildStdin, ChildStdout), CommandFailure> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(std::env::args_os().skip(1)).args(["--kept", address]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
    // Ctrl-C in the terminal is for this process, which passes it on once. Only this process reports to the service
    // manager.
    command.process_group(0).env_remove("NOTIFY_SOCKET");
    // When ggml ends the process, it would first start a debugger.
    command.env("GGML_NO_BACKTRACE", "1");
    let mut child = command.spawn()?;
    let no_pipe = || CommandFailure("the node's process has no pipes".into());
    let input = child.stdin.take().ok_or_else(no_pipe)?;
    let output = child.stdout.take().ok_or_else(no_pipe)?;
    Ok((child, input, output))
}

/// Waits until a child reports that it is ready. Returns false if it does not.
async fn ready(output: ChildStdout) -> bool {
    let mut lines = BufReader::new(output.take(MAX_EVENT_BYTES)).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        if matches!(serde_json::from_str(&line), Ok(ChildEvent::Ready { .. })) {
            return true;
        }
    }
    false
}

/// The signals that the child gets, too.
struct Signals {
    terminate: unix::Signal,
    interrupt: unix::Signal,
    hangup: unix::Signal,
}

impl Signals {
    fn listen() -> std::io::Result<Signals> {
        Ok(Signals {
            terminate: unix::signal(SignalKind::terminate())?,
            interrupt: unix::signal(SignalKind::interrupt())?,
            hangup: unix::signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.terminate.recv() => Signal::TERM,
            _ = self.interrupt.recv() => Signal::INT,
            _ = self.hangup.recv() => Signal::HUP,
        }
    }
}

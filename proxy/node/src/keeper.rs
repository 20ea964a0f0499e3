//! Keeps a node alive whose engine may end its process: the same command runs in a child, which is started again.

use std::process::ExitStatus;
use std::time::{Duration, Instant};

use baton_link::node::{ListenAddress, Listener};
use baton_process::{ChildCommand, ChildProcess, Restarts, StartFailure};
use baton_proxy::serve::signals::{OnHangup, Signals};
use baton_proxy::serve::{CommandFailure, service_manager};
use rustix::process::Signal;

use super::options::NodeOptions;

/// Runs this command in a child until a signal stops the child, or until it finds a mistake of the operator at its first
/// start.
pub async fn keep(options: &NodeOptions) -> Result<(), CommandFailure> {
    options.check_options().await?;
    let address = fixed(&options.listen).await?;
    // A certificate is read again by the child, if it runs, and by the next one anyway.
    let on_hangup = match options.tls.is_some() || options.transport.clone().or_paired().pairing().is_some() {
        true => OnHangup::Rereads,
        false => OnHangup::Stops,
    };
    let signals = Signals::listen(OnHangup::Stops);
    let signals = signals.ok_or_else(|| CommandFailure("a node with workers needs signals".into()))?;
    let mut keeper = Keeper { signals, on_hangup, has_served: false };
    let mut restarts = Restarts::default();
    let mut command = ChildCommand::of_this_program("the node's process")?
        .with_secrets()
        .args(std::env::args_os().skip(1))
        .args(["--kept", &address])
        // When ggml ends the process, it would first start a debugger.
        .envs([("GGML_NO_BACKTRACE", "1")]);
    loop {
        let end = keeper.run(command.spawn()?).await?;
        let pause = match end {
            ChildEnd::Stopped => break,
            ChildEnd::NotReady(StartFailure::Refused { message, .. }) if !keeper.has_served => {
                return Err(CommandFailure(message));
            }
            ChildEnd::NotReady(failure) => {
                let pause = restarts.after_failed_start();
                tracing::warn!(%failure, seconds = pause.as_secs_f32(), "the node did not start; it is started again");
                pause
            }
            ChildEnd::Ended { status, ran } => {
                let pause = restarts.after_end(ran);
                tracing::warn!(%status, seconds = pause.as_secs_f32(), "the node has ended; it is started again");
                pause
            }
        };
        if tokio::time::timeout(pause, keeper.stopped()).await.is_ok() {
            break;
        }
    }
    service_manager::report_stopping();
    Ok(())
}

struct Keeper {
    signals: Signals,
    /// What SIGHUP does to a node that serves.
    on_hangup: OnHangup,
    has_served: bool,
}

/// What became of a child.
enum ChildEnd {
    /// A signal has stopped it.
    Stopped,
    NotReady(StartFailure),
    /// It ended after it was ready for this time.
    Ended {
        status: ExitStatus,
        ran: Duration,
    },
}

impl Keeper {
    /// Passes signals on to a child until it ends. A second one ends it at once, as without a keeper.
    async fn run(&mut self, mut child: ChildProcess) -> std::io::Result<ChildEnd> {
        let mut is_stopping = false;
        let ready = loop {
            tokio::select! {
                ready = child.ready() => break ready,
                signal = self.signals.next() => {
                    is_stopping |= self.stops(signal);
                    child.signal(signal)?;
                }
            }
        };
        match ready {
            Err(_) if is_stopping => return Ok(ChildEnd::Stopped),
            Err(StartFailure::Ended { status, .. }) if status.success() => return Ok(ChildEnd::Stopped),
            Err(failure) => {
                child.kill().await;
                return Ok(ChildEnd::NotReady(failure));
            }
            Ok(_) if !self.has_served => {
                self.has_served = true;
                service_manager::report_ready();
            }
            Ok(_) => {}
        }
        let since = Instant::now();
        let status = loop {
            tokio::select! {
                status = child.wait() => break status?,
                signal = self.signals.next() => {
                    is_stopping |= self.stops(signal);
                    child.signal(signal)?;
                }
            }
        };
        match is_stopping || status.success() {
            true => Ok(ChildEnd::Stopped),
            false => Ok(ChildEnd::Ended { status, ran: since.elapsed() }),
        }
    }

    fn stops(&self, signal: Signal) -> bool {
        signal != Signal::HUP || self.on_hangup == OnHangup::Stops
    }

    /// Waits for a signal that stops the node.
    async fn stopped(&mut self) {
        loop {
            let signal = self.signals.next().await;
            if self.stops(signal) {
                return;
            }
        }
    }
}

/// The address, with a port that stays the same when the child starts again.
async fn fixed(listen: &ListenAddress) -> Result<String, CommandFailure> {
    match listen {
        ListenAddress::Tcp(address) => match address.strip_suffix(":0") {
            // The host stays a name: that of `localhost` is two addresses.
            Some(host) => {
                let bound = Listener::bind(listen).await?;
                Ok(bound.tcp_address().map_or_else(|| address.clone(), |bound| format!("{host}:{}", bound.port())))
            }
            None => Ok(address.clone()),
        },
        ListenAddress::Unix(_) => Ok(listen.to_string()),
    }
}

//! SIGTERM, Ctrl-C and SIGHUP.

use rustix::process::Signal;
use tokio::signal::unix::{self, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::http::edge::server::Shutdown;
use crate::log_queue;

/// The effect of SIGHUP, which a terminal sends, too, when it is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnHangup {
    /// It stops the process as SIGTERM does: there is nothing to read again.
    Stops,
    /// It has files read again, elsewhere.
    Rereads,
}

/// Begins the shutdown on the first signal, after calling `on_first`; ends streams on the second signal and the process
/// on the third.
pub(super) fn drain_on_signal(mut signals: Signals, shutdown: Shutdown, on_first: impl FnOnce() + Send + 'static) {
    tokio::spawn(async move {
        signals.next().await;
        on_first();
        shutdown.begin.cancel();
        signals.next().await;
        shutdown.now.cancel();
        signals.next().await;
        log_queue::exit(130);
    });
}

/// Cancels `stop` on the first signal. A second one ends the process at once.
pub fn stop_on_signal(stop: CancellationToken, on_hangup: OnHangup) {
    let Some(mut signals) = Signals::listen(on_hangup) else { return };
    tokio::spawn(async move {
        signals.next().await;
        stop.cancel();
        signals.next().await;
        log_queue::exit(130);
    });
}

/// Waits for a signal. A caller that drops the future leaves no handler behind, but the process goes on ignoring signals: tokio
/// does not restore what they do by themselves. See [`end_process_meanwhile`].
pub async fn first(on_hangup: OnHangup) {
    match Signals::listen(on_hangup) {
        Some(mut signals) => drop(signals.next().await),
        None => std::future::pending().await,
    }
}

/// Does this work; SIGTERM or Ctrl-C meanwhile ends the process, as if they had never been listened to. SIGHUP keeps its effect.
pub async fn end_process_meanwhile<T>(work: impl Future<Output = T>) -> T {
    let Some(mut signals) = Signals::listen(OnHangup::Rereads) else { return work.await };
    tokio::select! {
        biased;
        done = work => done,
        _ = signals.next() => log_queue::exit(130),
    }
}

/// Ignores SIGTERM, Ctrl-C and SIGHUP. For a child process, which ends when its standard input closes: its parent drains first.
/// A signal to the whole process group must not end the engine of running streams.
pub fn ignore() {
    let Some(mut signals) = Signals::listen(OnHangup::Stops) else { return };
    tokio::spawn(async move {
        loop {
            signals.next().await;
        }
    });
}

/// Calls `act` on every SIGHUP, which by itself would end the process.
pub fn on_hangup(act: impl Fn() + Send + 'static) {
    match signal(SignalKind::hangup()) {
        Ok(mut hangups) => drop(tokio::spawn(async move {
            while hangups.recv().await.is_some() {
                act();
            }
        })),
        Err(error) => tracing::warn!(%error, "SIGHUP cannot be handled: files are not read again on it"),
    }
}

/// The signals that stop a process.
pub struct Signals {
    terminate: unix::Signal,
    interrupt: unix::Signal,
    /// If it stops the process.
    hangup: Option<unix::Signal>,
}

impl Signals {
    /// Listens from now on. `None`: the system refuses it, which the log says.
    pub fn listen(on_hangup: OnHangup) -> Option<Signals> {
        let listen = || {
            Ok(Signals {
                terminate: signal(SignalKind::terminate())?,
                interrupt: signal(SignalKind::interrupt())?,
                hangup: match on_hangup {
                    OnHangup::Stops => Some(signal(SignalKind::hangup())?),
                    OnHangup::Rereads => None,
                },
            })
        };
        let log = |error: &std::io::Error| {
            tracing::warn!(%error, "signals cannot be handled: a stop ends running requests at once");
        };
        listen().inspect_err(log).ok()
    }

    /// Waits for the next one. Dropping the future loses none.
    pub async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.terminate.recv() => Signal::TERM,
            _ = self.interrupt.recv() => Signal::INT,
            Some(_) = async { self.hangup.as_mut()?.recv().await } => Signal::HUP,
        }
    }
}

//! SIGTERM, Ctrl-C and SIGHUP.

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::http::server::Shutdown;

/// Begins the shutdown on the first signal, after calling `on_first`; ends streams on the second signal and the process
/// on the third.
pub(super) fn drain_on_signal(shutdown: Shutdown, on_first: impl FnOnce() + Send + 'static) {
    let Some(mut signals) = Signals::listen() else { return };
    tokio::spawn(async move {
        signals.next().await;
        on_first();
        shutdown.begin.cancel();
        signals.next().await;
        shutdown.now.cancel();
        signals.next().await;
        std::process::exit(130);
    });
}

/// Cancels `stop` on the first signal. A second one ends the process at once.
pub fn stop_on_signal(stop: CancellationToken) {
    let Some(mut signals) = Signals::listen() else { return };
    tokio::spawn(async move {
        signals.next().await;
        stop.cancel();
        signals.next().await;
        std::process::exit(130);
    });
}

/// Ignores SIGTERM and Ctrl-C. For a child process, which ends when its standard input closes: its parent drains first,
/// and a signal to the whole process group must not end the engine of running streams.
pub fn ignore() {
    let Some(mut signals) = Signals::listen() else { return };
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

struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn listen() -> Option<Signals> {
        let signals = signal(SignalKind::terminate())
            .and_then(|terminate| Ok(Signals { terminate, interrupt: signal(SignalKind::interrupt())? }));
        let log = |error: &std::io::Error| {
            tracing::warn!(%error, "signals cannot be handled: a stop ends running requests at once");
        };
        signals.inspect_err(log).ok()
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

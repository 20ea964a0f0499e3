//! SIGTERM, Ctrl-C and SIGHUP.

use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::terminal;
use crate::http::server::Shutdown;

/// Begins the shutdown on the first signal, ends it at once on the second, and the process on the third. Tells who
/// sent the first how many requests it will wait for.
pub(super) fn drain_on_signal(shutdown: Shutdown, deadline: Duration, n_running: impl Fn() -> usize + Send + 'static) {
    let Some(mut signals) = Signals::listen() else { return };
    tokio::spawn(async move {
        signals.next().await;
        let n = n_running();
        if n > 0 {
            let requests = if n == 1 { "request" } else { "requests" };
            let seconds = deadline.as_secs();
            let line = format!("baton: finishing {n} {requests}, for {seconds} s at most; signal again to stop now");
            terminal::note(line);
        }
        shutdown.begin.cancel();
        signals.next().await;
        shutdown.now.cancel();
        signals.next().await;
        std::process::exit(130);
    });
}

/// Cancels `stop` on the first signal. A second one ends the process at once.
pub(super) fn stop_on_signal(stop: CancellationToken) {
    let Some(mut signals) = Signals::listen() else { return };
    tokio::spawn(async move {
        signals.next().await;
        stop.cancel();
        signals.next().await;
        std::process::exit(130);
    });
}

/// Lets signals pass. For a child, which lives as long as its lifeline: its parent drains first, and a signal to the
/// whole group (Ctrl-C, a service manager's stop) must not take the engine from under running streams.
pub(super) fn ignore() {
    let Some(mut signals) = Signals::listen() else { return };
    tokio::spawn(async move {
        loop {
            signals.next().await;
        }
    });
}

/// Calls `act` on every SIGHUP, which by itself would end the process.
pub(super) fn on_hangup(act: impl Fn() + Send + 'static) {
    match signal(SignalKind::hangup()) {
        Ok(mut hangups) => drop(tokio::spawn(async move {
            while hangups.recv().await.is_some() {
                act();
            }
        })),
        Err(error) => tracing::warn!(%error, "SIGHUP cannot be handled"),
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
        signals.inspect_err(|error| tracing::warn!(%error, "signals cannot be handled: stopping will be abrupt")).ok()
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

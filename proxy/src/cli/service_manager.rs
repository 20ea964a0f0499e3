//! What a service manager that asks for it (systemd's `Type=notify`) is told. Without one this does nothing.

use std::sync::Arc;
use std::time::Duration;

use sd_notify::NotifyState;

use crate::app::App;
use crate::http::Backend;
use crate::http::server::Shutdown;
use crate::observe::readiness::Readiness;

/// Between looks at the endpoint's health until it is well.
const INTERVAL: Duration = Duration::from_millis(200);

/// Tells that the endpoint is ready once `/health` would say so, and that it stops once it begins to.
pub(super) fn keep_informed(app: Arc<App>, shutdown: Shutdown) {
    tokio::spawn(async move {
        let ready = async {
            while app.readiness() != Readiness::Ok {
                tokio::time::sleep(INTERVAL).await;
            }
        };
        if shutdown.begin.run_until_cancelled(ready).await.is_some() {
            is_ready();
            shutdown.begin.cancelled().await;
        }
        tell(&NotifyState::Stopping);
    });
}

/// Tells that this process can be used.
pub(super) fn is_ready() {
    tell(&NotifyState::Ready);
}

/// Tells that this process is about to end.
pub(super) fn is_stopping() {
    tell(&NotifyState::Stopping);
}

fn tell(state: &NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(std::slice::from_ref(state)) {
        tracing::warn!(%error, "the service manager cannot be told: {state}");
    }
}

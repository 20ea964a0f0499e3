//! Reports readiness to a service manager that asks for it (systemd's `Type=notify`). Without one this does nothing.

use std::sync::Arc;
use std::time::Duration;

use sd_notify::NotifyState;

use super::request_service::RequestService;
use crate::http::HttpBackend;
use crate::http::edge::server::Shutdown;
use crate::observe::readiness::Readiness;

/// How often the endpoint's health is checked until it is good.
const INTERVAL: Duration = Duration::from_millis(200);

/// Reports ready once `/health` answers 200, and stopping once the shutdown begins.
pub(super) fn keep_informed(service: Arc<RequestService>, shutdown: Shutdown) {
    tokio::spawn(async move {
        let ready = async {
            while service.readiness() != Readiness::Ok {
                tokio::time::sleep(INTERVAL).await;
            }
        };
        if shutdown.begin.run_until_cancelled(ready).await.is_some() {
            report_ready();
            shutdown.begin.cancelled().await;
        }
        report_stopping();
    });
}

/// Reports that this process can be used.
pub fn report_ready() {
    notify(&NotifyState::Ready);
}

/// Reports that this process is about to end.
pub fn report_stopping() {
    notify(&NotifyState::Stopping);
}

fn notify(state: &NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(std::slice::from_ref(state)) {
        tracing::warn!(%error, "the service manager cannot be notified of {state}");
    }
}

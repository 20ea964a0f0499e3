//! Takes a changed configuration into force while streams run: on SIGHUP, and when the file changes.
//!
//! Keys, limits, hosts, origins and upstreams change at once; running requests keep what they were let in with. What needs other
//! processes or sockets is named in the log and waits for a restart. A file with a mistake changes nothing.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::signal::unix::{SignalKind, signal};

use super::serve::ServeArgs;
use crate::app::App;
use crate::config::ServeConfig;
use crate::http::{SharedAccess, access};
use crate::upstream::UpstreamPool;

/// How often the file is looked at. Asking for its time of change costs microseconds.
const INTERVAL: Duration = Duration::from_secs(2);

/// What a reload needs.
pub(super) struct Reload {
    /// The command line, whose flags are laid over every version of the file.
    pub args: ServeArgs,
    /// What is in force.
    pub config: ServeConfig,
    /// Where keys, hosts and origins go.
    pub access: SharedAccess,
    /// Where limits go.
    pub app: Arc<App>,
}

impl Reload {
    /// Reloads until the process ends. Without a file there is nothing to reload.
    pub(super) fn watch(mut self) {
        let Some(path) = self.args.config.clone() else { return };
        let Ok(mut hangup) = signal(SignalKind::hangup()) else { return };
        tokio::spawn(async move {
            let mut in_force = stamp(&path).await;
            let mut last = in_force;
            loop {
                let is_asked = tokio::select! {
                    asked = hangup.recv() => asked.is_some(),
                    () = tokio::time::sleep(INTERVAL) => false,
                };
                let now = stamp(&path).await;
                // A file that is being written is not read: it has to have been the same twice.
                if is_asked || (now != in_force && now == last) {
                    in_force = now;
                    self.reload();
                }
                last = now;
            }
        });
    }

    fn reload(&mut self) {
        let new = match self.args.clone().into_config() {
            Ok(config) => config,
            Err(error) => {
                tracing::error!("the configuration was not reloaded, and stays as it was: {}", error.0);
                return;
            }
        };
        // A file that was cut short is a valid one, and would open the endpoint to everybody.
        if self.config.needs_key() && !new.needs_key() {
            tracing::error!(
                "the configuration was not reloaded, and stays as it was: it has no keys any more, and an endpoint that \
                 asks for none has to be started so"
            );
            return;
        }
        let waiting = needs_restart(&self.config, &new);
        if !waiting.is_empty() {
            tracing::warn!("these changes take a restart: {}", waiting.join(", "));
        }
        let before = self.app.upstreams.load_full();
        let transport = self.config.transport.transport().map_err(|error| error.to_string());
        let upstreams = transport.and_then(|transport| UpstreamPool::new(&new.upstreams, &transport, &before));
        match upstreams {
            Ok(upstreams) => self.app.upstreams.store(Arc::new(upstreams)),
            Err(error) => {
                tracing::error!("the configuration was not reloaded, and stays as it was: {error}");
                return;
            }
        }
        access::renew(&self.access, &new.access());
        self.app.admission.set_bounds(new.bounds);
        tracing::info!("the configuration was reloaded");
        self.config = new;
    }
}

/// The keys whose new value is not taken into force.
fn needs_restart(old: &ServeConfig, new: &ServeConfig) -> Vec<&'static str> {
    let changes = [
        ("listen", old.listen != new.listen),
        ("ollama_listen", old.ollama_listen != new.ollama_listen),
        ("tls_ca or allow_plain_http", old.transport != new.transport),
        ("model.source", old.source != new.source),
        ("model.name", old.name != new.name),
        ("model.aliases", old.aliases != new.aliases),
        ("model.prefill", old.prefill != new.prefill),
        ("model.decode", old.decode != new.decode || old.has_own_engine != new.has_own_engine),
        ("model.policy", old.policy.name() != new.policy.name()),
        ("deadlines", old.deadlines != new.deadlines),
        ("model.calibrate", old.calibrate != new.calibrate),
        ("model.engine", old.engine != new.engine),
        ("tracing.otlp_endpoint", old.otlp_endpoint != new.otlp_endpoint),
    ];
    changes.into_iter().filter(|(_, has_changed)| *has_changed).map(|(key, _)| key).collect()
}

/// What tells one version of a file from the next.
async fn stamp(path: &Path) -> Option<(SystemTime, u64)> {
    let metadata = tokio::fs::metadata(path).await.ok()?;
    Some((metadata.modified().ok()?, metadata.len()))
}

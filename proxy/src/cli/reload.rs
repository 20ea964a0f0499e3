//! Takes a changed configuration into force while streams run: on SIGHUP, and when the file changes.
//!
//! Keys, limits, hosts, origins, upstreams, nodes and `[[models]]` change at once; running requests keep what they were let
//! in with, a model's process or node included. What needs other sockets, or another engine for `[model]`, is named in the
//! log and waits for a restart. A file with a mistake changes nothing; what fails later, such as a model whose file is not
//! there, leaves that part as it was.

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use tokio::signal::unix::{SignalKind, signal};

use super::own_models::{self, Own};
use super::serve::{self, Planning, ServeArgs};
use super::{Failure, backend};
use crate::app::App;
use crate::config::ServeConfig;
use crate::http::{SharedAccess, access};
use crate::pool::{Node, ServedModel};
use crate::residency::Limits;
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
    /// Own models that come and go.
    pub own: Vec<Own>,
    /// Names that they may not have.
    pub taken: Vec<String>,
    /// How models are planned for that nodes run.
    pub planning: Arc<ArcSwap<Planning>>,
    /// Nodes that run elsewhere.
    pub known_nodes: Vec<Arc<Node>>,
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
                    self.reload().await;
                }
                last = now;
            }
        });
    }

    async fn reload(&mut self) {
        let mut new = match self.args.clone().into_config() {
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
        // What can fail no more, and must not wait for what can: a key that was taken back is void at once.
        access::renew(&self.access, &new.access());
        self.app.admission.set_bounds(new.bounds);
        let before = self.app.upstreams.load_full();
        let transport = self.config.transport.transport().map_err(|error| error.to_string());
        let others = transport.and_then(|transport| {
            let upstreams = UpstreamPool::new(&new.upstreams, &transport, &before)?;
            let nodes = takes_nodes(&self.config, &new).then(|| backend::nodes(&new, &transport, &self.known_nodes));
            Ok((upstreams, nodes.transpose().map_err(|error| error.0)?))
        });
        let mut takes_nodes = takes_nodes(&self.config, &new);
        match others {
            Ok((upstreams, nodes)) => {
                self.app.upstreams.store(Arc::new(upstreams));
                if let Some(nodes) = nodes {
                    self.take_nodes(&new, nodes).await;
                }
            }
            Err(error) => {
                tracing::error!("upstreams and nodes were not reloaded, and stay as they were: {error}");
                takes_nodes = false;
            }
        }
        // Last: a model's file may have to be fetched first.
        match self.own_models(&new).await {
            Ok((own, limits)) => {
                // Found no more before they are told to go.
                self.app.pool.replace_residents(own.iter().map(|own| Arc::clone(&own.served)).collect());
                let residents: Vec<_> = own.iter().map(|own| Arc::clone(&own.resident)).collect();
                self.app.residency.replace(limits, &residents);
                self.own = own;
                tracing::info!("the configuration was reloaded");
            }
            Err(error) => {
                tracing::error!("the models of [[models]] were not reloaded, and stay as they were: {}", error.0);
            }
        }
        self.keep_what_waits(&mut new, takes_nodes);
        self.config = new;
    }

    /// What was not taken into force is still what it was.
    fn keep_what_waits(&self, new: &mut ServeConfig, takes_nodes: bool) {
        let old = &self.config;
        (new.listen, new.ollama_listen) = (old.listen.clone(), old.ollama_listen.clone());
        (new.transport, new.otlp_endpoint) = (old.transport.clone(), old.otlp_endpoint.clone());
        (new.source, new.name, new.aliases) = (old.source.clone(), old.name.clone(), old.aliases.clone());
        (new.engine, new.sampling) = (old.engine.clone(), old.sampling);
        if !takes_nodes {
            (new.decode, new.prefill) = (old.decode.clone(), old.prefill.clone());
            new.has_own_engine = old.has_own_engine;
            (new.policy, new.deadlines, new.calibrate) = (old.policy, old.deadlines, old.calibrate);
        }
    }

    /// Other nodes, or planned for otherwise.
    async fn take_nodes(&mut self, new: &ServeConfig, nodes: backend::Nodes) {
        let backend::Nodes { decode, prefill, .. } = nodes;
        let old = &self.config;
        if is_planned_alike(old, new) && old.decode == new.decode && old.prefill == new.prefill {
            return;
        }
        // Those before serve until these have said what they run.
        serve::hear_from(decode.iter().chain(&prefill)).await;
        self.planning.store(Arc::new(Planning::of(new)));
        let first = || {
            let name = new.name.clone().map_or_else(OnceLock::new, OnceLock::from);
            ServedModel::new(name, new.aliases.clone(), decode.clone(), prefill.clone())
        };
        let planning = self.planning.load();
        self.app.pool.replace_nodes(&decode, &prefill, first, |model| planning.in_service(model));
        self.known_nodes = decode.iter().chain(&prefill).map(Arc::clone).collect();
    }
}

impl Reload {
    /// The models of a new configuration, and what holds for them.
    async fn own_models(&self, new: &ServeConfig) -> Result<(Vec<Own>, Limits), Failure> {
        // What is not taken into force of it does not count here either.
        let new = ServeConfig {
            has_own_engine: self.config.has_own_engine,
            source: self.config.source.clone(),
            engine: self.config.engine.clone(),
            transport: self.config.transport.clone(),
            otlp_endpoint: self.config.otlp_endpoint.clone(),
            ..new.clone()
        };
        Ok((own_models::start(&new, &self.own, &self.taken).await?, own_models::limits(&new)?))
    }
}

/// Whether other nodes can be taken into force. An own engine that was started without prefill nodes cannot take KV, and
/// whether there is an own engine does not change.
fn takes_nodes(old: &ServeConfig, new: &ServeConfig) -> bool {
    let can_pull = !old.prefill.is_empty() || new.prefill.is_empty() || !old.has_own_engine;
    old.has_own_engine == new.has_own_engine && can_pull
}

fn is_planned_alike(old: &ServeConfig, new: &ServeConfig) -> bool {
    old.policy.name() == new.policy.name() && old.deadlines == new.deadlines && old.calibrate == new.calibrate
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
        ("model.prefill", old.prefill != new.prefill && !takes_nodes(old, new)),
        (
            "model.decode",
            old.has_own_engine != new.has_own_engine || old.decode != new.decode && !takes_nodes(old, new),
        ),
        ("policy, deadlines or calibrate", !takes_nodes(old, new) && !is_planned_alike(old, new)),
        ("model.engine", old.engine != new.engine),
        ("model.sampling", old.sampling != new.sampling),
        ("tracing.otlp_endpoint", old.otlp_endpoint != new.otlp_endpoint),
    ];
    changes.into_iter().filter(|(_, has_changed)| *has_changed).map(|(key, _)| key).collect()
}

/// What tells one version of a file from the next.
async fn stamp(path: &Path) -> Option<(SystemTime, u64)> {
    let metadata = tokio::fs::metadata(path).await.ok()?;
    Some((metadata.modified().ok()?, metadata.len()))
}

//! Takes a changed configuration into force while streams run: on SIGHUP, and when the file changes.
//!
//! Keys, limits, hosts, origins, upstreams, nodes, `[[models]]`, and `[model]`'s names and sampling change at once; running
//! requests keep what they were let in with, a model's process or node included. What needs other sockets, or another
//! engine for `[model]`, is named in the log and waits for a restart.
//!
//! All that can be found out without waiting is found out first, and a file with a mistake changes nothing. Models whose
//! files have to be fetched come behind the rest, and nothing waits for them: a newer file takes the place of one whose
//! models are still on their way.

use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::task::AbortOnDropHandle;

use super::own_models::{self, Own};
use super::serve::{self, Planning, ServeArgs};
use super::{Failure, backend, pull};
use crate::app::App;
use crate::config::ServeConfig;
use crate::http::{SharedAccess, access};
use crate::targets::model_loading::Limits;
use crate::targets::nodes::{Node, ServedModel};
use crate::targets::upstreams::UpstreamPool;

/// How often the file is looked at. Asking for its time of change costs microseconds.
const INTERVAL: Duration = Duration::from_secs(1);

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
            let mut fetching = None;
            loop {
                let is_asked = tokio::select! {
                    asked = hangup.recv() => asked.is_some(),
                    (new, fetched) = fetched(&mut fetching) => {
                        self.take_fetched(&new, fetched).await;
                        continue;
                    }
                    () = tokio::time::sleep(INTERVAL) => false,
                };
                let now = stamp(&path).await;
                // A file that is being written is not read: it has to have been the same twice.
                if is_asked || (now != in_force && now == last) {
                    in_force = now;
                    match self.reload().await {
                        // What an older file wanted is not wanted any more.
                        Ok(wanted) => fetching = wanted,
                        Err(Failure(error)) => {
                            tracing::error!("the configuration was not reloaded, and stays as it was: {error}");
                        }
                    }
                }
                last = now;
            }
        });
    }

    /// Reads the file and takes it into force. Errors: a mistake in it; nothing has changed then. Returns the models that it
    /// has to wait for.
    async fn reload(&mut self) -> Result<Option<Fetching>, Failure> {
        let args = self.args.clone();
        // Models' files are opened.
        let mut new = tokio::task::spawn_blocking(move || args.into_config()).await??;
        // A file that was cut short is a valid one, and would open the endpoint to everybody.
        if self.config.needs_key() && !new.needs_key() {
            let problem = "it has no keys any more, and an endpoint that asks for none has to be started so";
            return Err(Failure(problem.to_owned()));
        }
        let waiting = needs_restart(&self.config, &new);
        if !waiting.is_empty() {
            tracing::warn!("these changes take a restart: {}", waiting.join(", "));
        }
        let takes_nodes = takes_nodes(&self.config, &new);
        self.keep_what_waits(&mut new, takes_nodes);
        // What can fail.
        let transport = new.transport.transport()?;
        let before = self.app.upstreams.load_full();
        let upstreams = UpstreamPool::new(&new.upstreams, &transport, &before).map_err(Failure)?;
        let nodes = takes_nodes.then(|| backend::nodes(&new, &transport, &self.known_nodes)).transpose()?;
        let called = backend::names_of(&new)?;
        let taken = called.0.iter().chain(&called.1).cloned().collect::<Vec<_>>();
        let missing = own_models::missing(&new)?;
        let own = match missing.is_empty() {
            true => Some((own_models::start(&new, &self.own, &taken).await?, own_models::limits_of(&new)?)),
            false => None,
        };
        // What cannot.
        access::renew(&self.access, &new.access());
        self.app.admission.set_bounds(new.bounds);
        self.app.upstreams.store(Arc::new(upstreams));
        self.taken = taken;
        if let Some((own, limits)) = own {
            self.take_own(own, limits);
        }
        if let Some(nodes) = nodes {
            self.take_nodes(&new, nodes).await;
        }
        self.call(&new, called);
        self.config = new.clone();
        if missing.is_empty() {
            tracing::info!("the configuration was reloaded");
            return Ok(None);
        }
        tracing::info!("the configuration was reloaded but for [[models]], which wait for {}", missing.join(", "));
        Ok(Some(Fetching { config: new, fetch: AbortOnDropHandle::new(tokio::spawn(fetch(missing))) }))
    }

    /// Takes the models into force that their files were waited for.
    async fn take_fetched(&mut self, new: &ServeConfig, fetched: Result<(), Failure>) {
        let started = match fetched {
            Ok(()) => own_models::start(new, &self.own, &self.taken).await,
            Err(error) => Err(error),
        };
        match started.and_then(|own| Ok((own, own_models::limits_of(new)?))) {
            Ok((own, limits)) => {
                self.take_own(own, limits);
                tracing::info!("the models of [[models]] were reloaded");
            }
            Err(Failure(error)) => {
                tracing::error!("the models of [[models]] were not reloaded, and stay as they were: {error}");
            }
        }
    }

    fn take_own(&mut self, own: Vec<Own>, limits: Limits) {
        own.iter().for_each(Own::take_into_force);
        // Found no more before they are told to go.
        self.app.pool.replace_residents(own.iter().map(|own| Arc::clone(&own.served)).collect());
        let residents: Vec<_> = own.iter().map(|own| Arc::clone(&own.resident)).collect();
        self.app.residency.replace(limits, &residents);
        self.own = own;
    }

    /// Calls `[model]` as it is called now, and draws its tokens so.
    fn call(&self, new: &ServeConfig, (name, aliases): (Option<String>, Vec<String>)) {
        let old = &self.config;
        if (&old.name, &old.aliases, old.sampling) == (&new.name, &new.aliases, new.sampling) {
            return;
        }
        let planning = self.planning.load();
        self.app.pool.replace_first(|model| {
            // What a node has told stays where nobody says otherwise.
            let name = name.map_or_else(|| model.name.clone(), OnceLock::from);
            planning.in_service(model.under(name, aliases, new.sampling))
        });
    }

    /// What was not taken into force is still what it was.
    fn keep_what_waits(&self, new: &mut ServeConfig, takes_nodes: bool) {
        let old = &self.config;
        (new.listen, new.ollama_listen) = (old.listen.clone(), old.ollama_listen.clone());
        (new.transport, new.otlp_endpoint) = (old.transport.clone(), old.otlp_endpoint.clone());
        (new.source, new.engine) = (old.source.clone(), old.engine.clone());
        if !takes_name(old, new) {
            new.name = old.name.clone();
        }
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
            let mut model = ServedModel::new(name, new.aliases.clone(), decode.clone(), prefill.clone());
            model.sampling = new.sampling;
            model
        };
        let planning = self.planning.load();
        self.app.pool.replace_nodes(&decode, &prefill, first, |model| planning.in_service(model));
        self.known_nodes = decode.iter().chain(&prefill).map(Arc::clone).collect();
    }
}

/// Models that a configuration in force waits for. Dropping it gives them up.
struct Fetching {
    config: ServeConfig,
    fetch: AbortOnDropHandle<Result<(), Failure>>,
}

/// Fetches what is not here.
async fn fetch(missing: Vec<String>) -> Result<(), Failure> {
    for source in missing {
        pull::model_file(&source).await?;
    }
    Ok(())
}

/// What came of it, once; for ever pending if nothing is fetched. Dropping the future loses nothing.
async fn fetched(fetching: &mut Option<Fetching>) -> (ServeConfig, Result<(), Failure>) {
    let Some(Fetching { fetch, .. }) = fetching else { return std::future::pending().await };
    let outcome = fetch.await.unwrap_or_else(|panic| Err(panic.into()));
    match fetching.take() {
        Some(Fetching { config, .. }) => (config, outcome),
        None => std::future::pending().await,
    }
}

/// Whether another name can be taken into force. One that a node has told is not forgotten.
fn takes_name(old: &ServeConfig, new: &ServeConfig) -> bool {
    old.has_own_engine || new.name.is_some() || old.name.is_none()
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
        ("model.name", old.name != new.name && !takes_name(old, new)),
        ("model.prefill", old.prefill != new.prefill && !takes_nodes(old, new)),
        (
            "model.decode",
            old.has_own_engine != new.has_own_engine || old.decode != new.decode && !takes_nodes(old, new),
        ),
        ("policy, deadlines or calibrate", !takes_nodes(old, new) && !is_planned_alike(old, new)),
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

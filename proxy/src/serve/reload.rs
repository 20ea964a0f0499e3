//! Applies a changed configuration while streams run: on SIGHUP, and when the file changes.
//!
//! Keys, limits, hosts, origins, upstreams, nodes, `[[models]]`, and `[model]`'s names and sampling change at once. Running
//! requests keep the settings, processes and nodes that they started with. A change that needs other sockets, or another
//! engine for `[model]`, waits for a restart; the log names it.
//!
//! Every check that needs no waiting comes first, and a file with a mistake changes nothing. Own models whose files must
//! be fetched are applied after the rest; a newer file ends the fetch.

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use baton_schemas::CacheScope;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::task::AbortOnDropHandle;

use super::adoption::Adoption;
use super::cluster_nodes::{ClusterNodes, NodeLists};
use super::config_in_force::{ConfigInForce, needs_restart, takes_name, takes_routing};
use super::config_source::ConfigSource;
use super::failure::CommandFailure;
use super::first_start::wait_for_nodes;
use super::model_files;
use super::on_demand_models::{self, MissingModel};
use super::own_models::{OwnModels, OwnModelsChange, PreparedModels};
use super::planning::plan_by;
use super::primary_model::PrimaryNames;
use super::remote_nodes::RemoteNodes;
use super::removed_keys;
use super::request_service::RequestService;
use crate::account::budget::TokensSpent;
use crate::config::{RoutingConfig, ServeConfig};
use crate::http::{SharedAccess, access};
use crate::log_target::NOTICE;
use crate::observe::{ConfigReport, WrittenSetting};
use crate::targets::nodes::Node;
use crate::targets::upstreams::UpstreamPool;

/// How often the file's time of change is read, which costs microseconds.
const INTERVAL: Duration = Duration::from_secs(1);

/// The configuration in force, and the parts of a running endpoint that take a new one.
pub(super) struct Reload {
    pub source: ConfigSource,
    /// The configuration in force.
    pub config: ServeConfig,
    /// Takes keys, hosts and origins.
    pub access: SharedAccess,
    /// Takes limits, upstreams, nodes and models.
    pub service: Arc<RequestService>,
    /// Own models that are loaded on demand.
    pub own_models: Arc<OwnModels>,
    /// The search for other servers.
    pub adoption: Arc<Adoption>,
    /// How requests for nodes' models are planned.
    pub routing: Arc<ArcSwap<RoutingConfig>>,
    /// The nodes of all models, with those that were found in the network.
    pub cluster: Arc<ClusterNodes>,
    /// Nodes that run elsewhere.
    pub known_nodes: Vec<Arc<Node>>,
}

impl Reload {
    /// Reloads until the process ends. Without a file there is nothing to reload.
    pub(super) fn watch(mut self) {
        let in_force = ConfigInForce::of_start(self.source.clone(), self.config.clone());
        // It is watched once.
        let _ = self.service.in_force.set(in_force);
        self.report(&self.config.written, Vec::new());
        let Some(path) = self.source.path.clone() else { return };
        let Ok(mut hangup) = signal(SignalKind::hangup()) else { return };
        tokio::spawn(async move {
            let mut in_force = FileVersion::of(&path).await;
            let mut last = in_force;
            let mut fetching = None;
            loop {
                let is_asked = tokio::select! {
                    asked = hangup.recv() => asked.is_some(),
                    (new, fetched) = fetched(&mut fetching) => {
                        self.apply_fetched(&new, fetched).await;
                        continue;
                    }
                    () = tokio::time::sleep(INTERVAL) => false,
                };
                let now = FileVersion::of(&path).await;
                // Do not read a file that is being written: its version must be the same twice.
                if is_asked || (now != in_force && now == last) {
                    in_force = now;
                    match self.reload().await {
                        // Drops the fetches of an older file.
                        Ok(wanted) => fetching = wanted,
                        Err(CommandFailure(error)) => {
                            tracing::error!("the configuration was not reloaded and stays as it was: {error}");
                            let before = self.service.config.load();
                            let failed =
                                ConfigReport { problem: Some(error.to_string()), ..ConfigReport::clone(&before) };
                            self.service.config.store(Arc::new(failed));
                        }
                    }
                }
                last = now;
            }
        });
    }

    /// Shows what is set now.
    fn report(&self, settings: &[WrittenSetting], waiting: Vec<String>) {
        let path = self.source.path.as_ref().map(|path| path.display().to_string());
        let applied_at_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        let report = ConfigReport { path, applied_at_ms, settings: settings.to_vec(), waiting, problem: None };
        self.service.config.store(Arc::new(report));
    }

    /// Reads the file and applies it. Returns the models whose files have to be fetched first. Errors: a mistake in the file;
    /// nothing has changed then.
    async fn reload(&mut self) -> Result<Option<Fetching>, CommandFailure> {
        let mut new = self.source.read_again(None, self.config.access.needs_key()).await?;
        let waiting = needs_restart(&self.config, &new);
        if !waiting.is_empty() {
            tracing::warn!("restart the endpoint to apply these changes: {}", waiting.join(", "));
        }
        self.keep_what_waits(&mut new);
        let own_models = Arc::clone(&self.own_models);
        let mut change = own_models.change().await;
        let prepared = self.prepare(&new, &change).await?;
        let missing = prepared.missing.clone();
        self.apply(&new, prepared, &mut change).await;
        drop(change);
        self.config = new.clone();
        if let Some(in_force) = self.service.in_force.get() {
            in_force.reloaded(&new, &waiting);
        }
        self.report(&new.written, waiting.iter().map(|key| (*key).to_owned()).collect());
        if missing.is_empty() {
            tracing::info!(target: NOTICE, "the configuration was reloaded");
            return Ok(None);
        }
        let files = Vec::from_iter(missing.iter().map(|model| &*model.source)).join(", ");
        tracing::info!(target: NOTICE, "the configuration was reloaded, except [[models]], which wait for the download of {files}");
        Ok(Some(Fetching { config: new, fetch: AbortOnDropHandle::new(tokio::spawn(fetch(missing))) }))
    }

    /// Does everything that can fail, and changes nothing yet.
    async fn prepare(
        &self,
        new: &ServeConfig,
        own_models: &OwnModelsChange<'_>,
    ) -> Result<PreparedReload, CommandFailure> {
        let transport = new.startup.transport.transport()?;
        let before = self.service.targets.upstreams.load_full();
        let upstreams = UpstreamPool::new(&new.upstreams, &transport, &before).map_err(CommandFailure)?;
        let nodes = match new.routing != self.config.routing {
            true => Some(RemoteNodes::connect(&new.routing, &new.startup.transport, &self.known_nodes)?),
            false => None,
        };
        let names = PrimaryNames::of(new)?;
        let taken_names = names.name.iter().chain(&names.aliases).cloned().collect::<Vec<_>>();
        let missing = on_demand_models::missing(new)?;
        let own_models = match missing.is_empty() {
            true => Some(own_models.prepare(new, &taken_names).await?),
            false => None,
        };
        Ok(PreparedReload { upstreams, nodes, names, taken_names, missing, own_models })
    }

    async fn apply(&mut self, new: &ServeConfig, prepared: PreparedReload, own_models: &mut OwnModelsChange<'_>) {
        // Names every field, so that a new one is either applied or kept as it was.
        let ServeConfig {
            // `keep_what_waits` has put the old value here.
            startup: _,
            access,
            admission,
            // `apply_names`
            name: _,
            aliases: _,
            sampling: _,
            // `apply_nodes`
            routing: _,
            // In `prepared`.
            upstreams: _,
            adoption,
            models: _,
            loading: _,
            // `report`
            written: _,
            overridden: _,
        } = new;
        let had_keys = self.access.load().scopes();
        let had_nodes = self.known_nodes.clone();
        access::renew(&self.access, access, &self.spent().await);
        self.service.admission.set_limits(*admission);
        let upstreams = prepared.upstreams;
        let changed =
            self.service.targets.change_upstreams::<Infallible>(|before| Ok(Some(upstreams.with_adopted_of(before))));
        let Ok(()) = changed;
        self.adoption.reconfigure(adoption.clone());
        own_models.set_taken_names(prepared.taken_names);
        if let Some(prepared) = prepared.own_models {
            own_models.apply(prepared);
        }
        if let Some(nodes) = prepared.nodes {
            self.apply_nodes(new, nodes).await;
        }
        self.apply_names(new, prepared.names);
        self.forget_removed_keys(new, had_keys, had_nodes).await;
    }

    /// The spent tokens of keys, for keys that the new file adds.
    async fn spent(&self) -> HashMap<String, TokensSpent> {
        self.service.observer.usage.spent().await.unwrap_or_else(|error| {
            tracing::warn!("new keys begin with whole budgets, because what they have used cannot be read: {error}");
            HashMap::new()
        })
    }

    /// A node that this reload has removed is told, too.
    async fn forget_removed_keys(&self, new: &ServeConfig, had_keys: Vec<CacheScope>, had_nodes: Vec<Arc<Node>>) {
        let scopes = self.access.load().scopes();
        let valid: HashSet<&CacheScope> = scopes.iter().collect();
        let removed: Vec<_> = had_keys.into_iter().filter(|scope| !valid.contains(scope)).collect();
        let pool = &self.service.targets.pool;
        pool.removed_keys.note(&removed, &scopes);
        removed_keys::forget(pool, [&had_nodes[..], &self.known_nodes].concat(), removed).await;
        if let Err(CommandFailure(error)) = removed_keys::clear_disks(new, self.source.path.as_deref(), scopes).await {
            tracing::warn!("the KV of removed API keys stays on disk: {error}");
        }
    }

    /// Applies the on-demand models of `new` after their files were fetched.
    async fn apply_fetched(&self, new: &ServeConfig, fetched: Result<(), CommandFailure>) {
        let mut change = self.own_models.change().await;
        let prepared = match fetched {
            Ok(()) => change.prepare_for_same_names(new).await,
            Err(error) => Err(error),
        };
        match prepared {
            Ok(prepared) => {
                change.apply(prepared);
                tracing::info!(target: NOTICE, "the models of [[models]] were reloaded");
            }
            Err(CommandFailure(error)) => {
                tracing::error!("the models of [[models]] were not reloaded and stay as they were: {error}");
            }
        }
    }

    /// Gives `[model]` its new name, aliases and sampling.
    fn apply_names(&self, new: &ServeConfig, names: PrimaryNames) {
        let old = &self.config;
        if old.name == new.name && old.aliases == new.aliases && old.sampling == new.sampling {
            return;
        }
        let routing = self.routing.load();
        self.service.targets.pool.replace_first(|model| {
            // A name that a node has reported stays where the file has none.
            let name = names.name.map_or_else(|| model.name.clone(), OnceLock::from);
            plan_by(&routing, model.with_names(name, names.aliases, new.sampling))
        });
    }

    /// Keeps the old values of keys that only a restart changes.
    fn keep_what_waits(&self, new: &mut ServeConfig) {
        let old = &self.config;
        if !takes_name(old, new) {
            new.name.clone_from(&old.name);
        }
        if !takes_routing(old, new) {
            new.routing = old.routing.clone();
        }
        new.startup = old.startup.clone();
    }

    /// Replaces the nodes, or how requests for their models are planned.
    async fn apply_nodes(&mut self, new: &ServeConfig, nodes: RemoteNodes) {
        // The old nodes serve until the new ones have reported their models.
        wait_for_nodes(nodes.all()).await;
        self.routing.store(Arc::new(new.routing.clone()));
        let RemoteNodes { decode, prefill, .. } = nodes;
        self.cluster.set_configured(NodeLists { decode: decode.clone(), prefill: prefill.clone() }, new);
        self.known_nodes = decode.iter().chain(&prefill).map(Arc::clone).collect();
    }
}

/// All that a reload applies.
struct PreparedReload {
    upstreams: UpstreamPool,
    /// `None`: the routing stays as it is.
    nodes: Option<RemoteNodes>,
    names: PrimaryNames,
    taken_names: Vec<String>,
    missing: Vec<MissingModel>,
    /// `None` until nothing is missing.
    own_models: Option<PreparedModels>,
}

/// The fetch of missing model files. Dropping it ends the fetch.
struct Fetching {
    config: ServeConfig,
    fetch: AbortOnDropHandle<Result<(), CommandFailure>>,
}

async fn fetch(missing: Vec<MissingModel>) -> Result<(), CommandFailure> {
    for MissingModel { source, engine } in missing {
        model_files::locate_or_pull(&source, engine).await?;
    }
    Ok(())
}

/// Returns a finished fetch's configuration and result, once. Never returns if nothing is fetched. Cancel-safe.
async fn fetched(fetching: &mut Option<Fetching>) -> (ServeConfig, Result<(), CommandFailure>) {
    let Some(Fetching { fetch, .. }) = fetching else { return std::future::pending().await };
    let outcome = fetch.await.unwrap_or_else(|panic| Err(panic.into()));
    match fetching.take() {
        Some(Fetching { config, .. }) => (config, outcome),
        None => std::future::pending().await,
    }
}

/// Distinguishes two versions of a file.
#[derive(Clone, Copy, PartialEq)]
struct FileVersion {
    modified: SystemTime,
    n_bytes: u64,
}

impl FileVersion {
    /// `None`: there is no file.
    async fn of(path: &Path) -> Option<FileVersion> {
        let metadata = tokio::fs::metadata(path).await.ok()?;
        Some(FileVersion { modified: metadata.modified().ok()?, n_bytes: metadata.len() })
    }
}

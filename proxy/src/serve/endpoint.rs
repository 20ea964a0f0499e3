//! A running endpoint, from its configuration to its end.
//!
//! Read [`Endpoint::start`] first: it binds the ports, starts what answers requests, and serves. [`Endpoint::ready`] waits
//! for the first engine, and [`Endpoint::finished`] for the end.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use baton_link::connections::bind_host;
use baton_link::node::NodeRequests;
use baton_link::transport::Transport;
use baton_schemas::node::NodeInfo;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use super::adoption::Adoption;
use super::cluster_nodes::{ClusterNodes, NodeLists};
use super::config_source::ConfigSource;
use super::discovery::{self, Discovery};
use super::failure::CommandFailure;
use super::first_start::{FirstStart, wait_for_nodes, wait_for_upstreams};
use super::models_folder::ModelsFolder;
use super::own_models::OwnModels;
use super::planning::plan_by;
use super::primary_model::{OwnEngine, PrimaryNames, start_own_engine};
use super::reload::Reload;
use super::remote_nodes::{RemoteNodes, key_to_discover};
use super::request_service::RequestService;
use super::signals::{OnHangup, Signals};
use super::supervisor::Supervised;
use super::{model_files, removed_keys, service_manager, signals, store_secret, usage_ledger};
use crate::account::request_memory::RequestMemory;
use crate::admission::Admission;
use crate::config::{RoutingConfig, ServeConfig, StartupConfig};
use crate::http;
use crate::http::access::host_check::HostCheck;
use crate::http::edge::server::Shutdown;
use crate::http::{AccessConfig, HttpBackend, SharedAccess};
use crate::observe::Observer;
use crate::targets::Targets;
use crate::targets::found::{DiscoveryState, FoundNodes};
use crate::targets::models::{self, ModelPool, ServedModel};
use crate::targets::nodes::Node;
use crate::targets::upstreams::UpstreamPool;

/// How long running streams may go on after a stop signal.
pub const DRAIN_DEADLINE: Duration = Duration::from_secs(30);

/// An endpoint that serves. Dropping it leaves its tasks running: end it with a signal and [`Endpoint::finished`].
pub struct Endpoint {
    service: Arc<RequestService>,
    shutdown: Shutdown,
    /// Listened to since it listens to clients.
    signals: Option<Signals>,
    addresses: Vec<SocketAddr>,
    ollama: Option<SocketAddr>,
    servers: Vec<JoinHandle<std::io::Result<()>>>,
    nodes: RemoteNodes,
    /// `None` after [`Endpoint::ready`] has waited for it.
    first_start: Option<FirstStart>,
    own_engines: Vec<Supervised>,
    needs_key: bool,
}

/// Facts about an endpoint that answers requests, for the ready message.
pub struct ReadyEndpoint {
    /// Where it listens; the first is the endpoint's own address.
    pub addresses: Vec<SocketAddr>,
    /// The address for Ollama's clients, if it is another one.
    pub ollama: Option<SocketAddr>,
    /// Names of models, `[model]` first. Empty if upstreams have not listed theirs yet.
    pub models: Vec<String>,
    /// The first engine that answered. `None` if only upstreams serve, or models that are loaded on demand.
    pub engine: Option<Arc<NodeInfo>>,
    /// True if requests must present an API key.
    pub needs_key: bool,
    /// What was found in the network; `None` if nothing was searched for.
    pub discovery: Option<DiscoveryState>,
}

impl Endpoint {
    /// Binds, starts the engines' processes and serves. Models that are missing here are fetched first.
    pub async fn start(config: ServeConfig, source: ConfigSource) -> Result<Endpoint, CommandFailure> {
        http::edge::open_files::raise_limit();
        // Ports come first, because a port in use is the commonest mistake, and loading a model takes long.
        let Listeners { own, ollama } = Listeners::bind(&config.startup).await?;
        let n_own = own.len();
        let listeners: Vec<TcpListener> = own.into_iter().chain(ollama).collect();
        let addresses = listeners.iter().map(TcpListener::local_addr).collect::<Result<Vec<_>, _>>()?;
        let ollama = addresses.get(n_own).copied();
        let transport = config.startup.transport.transport()?;
        let access = AccessConfig { scope_key: store_secret::scope_key(&config)?, ..config.access.clone() };
        let access = http::access::shared(&access);
        let usage = usage_ledger::open(&config.startup, &access).await?;
        // Before an engine reads what is on its disk.
        let scopes = access.load().scopes();
        removed_keys::clear_disks(&config, source.path.as_deref(), scopes).await?;
        let mut nodes = RemoteNodes::connect(&config.routing, &config.startup.transport, &[])?;
        let own_engine = match config.routing.has_own_engine {
            true => Some(start_own_engine(&config).await?),
            false => None,
        };
        let routing = Arc::new(ArcSwap::from_pointee(config.routing.clone()));
        let primary = primary_model(&config, &nodes, own_engine.as_ref())?;
        let pool = start_pool(primary, &nodes, &routing);
        let configured = NodeLists { decode: nodes.decode.clone(), prefill: nodes.prefill.clone() };
        let cluster = Arc::new(ClusterNodes::new(Arc::clone(&pool), Arc::clone(&routing), configured, &config));
        let found = start_discovery(&config, &transport, &pool, &cluster)?;
        let taken_names: Vec<String> =
            pool.models().iter().flat_map(|model| model.names().cloned().collect::<Vec<_>>()).collect();
        let folder = models_folder(&config, &transport)?;
        let own_models = OwnModels::start(&config, &taken_names, Arc::clone(&pool), folder).await?;
        let upstreams =
            UpstreamPool::new(&config.upstreams, &transport, &UpstreamPool::default()).map_err(CommandFailure)?;
        let observer = Arc::new(Observer { usage, ..Observer::default() });
        let service = assemble(&config, pool, upstreams, Arc::clone(&own_models), found);
        let service = Arc::new(RequestService { observer, ..service });
        service.keep_history();
        let own_ports = addresses.iter().map(SocketAddr::port).collect();
        let adoption =
            Adoption::start(Arc::clone(&service), config.adoption.clone(), transport.clone(), own_ports).await?;
        let shutdown = Shutdown::default();
        let memory = Arc::clone(&service.memory);
        let http_config = http::HttpConfig { access: config.access.clone(), memory, ..http::HttpConfig::default() };
        let api = http::api(Arc::clone(&service) as Arc<dyn http::HttpBackend>, http_config, access.clone());
        // Before a client can know that it is ready, and then stop it.
        let on_hangup = if source.path.is_some() { OnHangup::Rereads } else { OnHangup::Stops };
        let signals = Signals::listen(on_hangup);
        let servers = serve_all(listeners, &addresses, &api, &access, &shutdown);
        let needs_key = config.access.needs_key();
        let reload = Reload {
            source,
            config,
            access,
            service: Arc::clone(&service),
            own_models,
            adoption,
            routing,
            cluster,
            known_nodes: nodes.all().map(Arc::clone).collect(),
        };
        reload.watch();
        service_manager::keep_informed(Arc::clone(&service), shutdown.clone());
        let (own_engines, first_start) = match own_engine {
            Some(own) => own.supervised(),
            None => (Vec::new(), nodes.first_start()),
        };
        let first_start = Some(first_start);
        Ok(Endpoint {
            service,
            shutdown,
            signals,
            addresses,
            ollama,
            servers,
            nodes,
            first_start,
            own_engines,
            needs_key,
        })
    }

    /// Handles SIGTERM, Ctrl-C and, if no file is reloaded on it, SIGHUP. The first calls `report` with the number of running
    /// requests and begins the drain, the second ends their streams, and the third the process.
    pub fn drain_on_signal(&mut self, report: impl FnOnce(usize) + Send + 'static) {
        let Some(signals) = self.signals.take() else { return };
        let service = Arc::clone(&self.service);
        signals::drain_on_signal(signals, self.shutdown.clone(), move || report(service.admission.n_admitted()));
    }

    /// Waits until requests can be answered. `None`: a stop came first. Errors: no engine will ever be ready.
    pub async fn ready(&mut self) -> Result<Option<ReadyEndpoint>, CommandFailure> {
        let Some(first_start) = self.first_start.take() else { return Ok(None) };
        let started = first_engine(first_start, &mut self.nodes);
        let info = match self.shutdown.begin.run_until_cancelled(started).await {
            Some(Ok(info)) => info,
            Some(Err(error)) => {
                self.shutdown.begin.cancel();
                return Err(error);
            }
            None => return Ok(None),
        };
        wait_for_nodes(self.nodes.all()).await;
        if let Some(found) = &self.service.found {
            discovery::first_look(found).await;
        }
        wait_for_upstreams(&self.service.targets.upstreams.load()).await;
        Ok(Some(ReadyEndpoint {
            addresses: self.addresses.clone(),
            ollama: self.ollama,
            models: served_names(&self.service, info.as_deref()),
            engine: info,
            needs_key: self.needs_key,
            discovery: self.service.state(false).discovery,
        }))
    }

    /// Waits for a stop signal, the end of all streams, and the end of the engines' processes.
    pub async fn finished(self) -> Result<(), CommandFailure> {
        for server in self.servers {
            server.await??;
        }
        self.service.targets.model_loader.stop().await;
        self.own_engines.iter().for_each(|supervised| supervised.stop.cancel());
        for supervised in self.own_engines {
            supervised.tracker.wait().await;
        }
        self.service.observer.usage.close().await;
        Ok(())
    }
}

/// Finds what would end the start: an address in use, or a missing model. Downloads nothing.
pub async fn check_start(config: &ServeConfig) -> Result<(), CommandFailure> {
    let StartupConfig { source, engine, .. } = &config.startup;
    // Dropped at once: the addresses are free.
    Listeners::bind(&config.startup).await?;
    match config.routing.has_own_engine && engine.engine.unwrap_or_default().needs_file() {
        true => model_files::find(source).map(drop),
        false => Ok(()),
    }
}

/// The listeners of the endpoint's own address, and of the one for Ollama's clients.
struct Listeners {
    own: Vec<TcpListener>,
    ollama: Vec<TcpListener>,
}

impl Listeners {
    async fn bind(startup: &StartupConfig) -> Result<Listeners, CommandFailure> {
        let own = bind(&startup.listen, "--listen").await?;
        let ollama = match &startup.ollama_listen {
            Some(address) => bind(address, "--ollama-listen").await?,
            None => Vec::new(),
        };
        Ok(Listeners { own, ollama })
    }
}

async fn bind(address: &str, flag: &str) -> Result<Vec<TcpListener>, CommandFailure> {
    bind_host(address).await.map_err(|error| cannot_bind(address, flag, &error))
}

fn cannot_bind(address: &str, flag: &str, error: &std::io::Error) -> CommandFailure {
    CommandFailure(match error.kind() {
        ErrorKind::AddrInUse => {
            format!("{address} is in use by another program. Stop it, or choose another address with {flag}.")
        }
        _ => format!("cannot listen on {address}: {error}"),
    })
}

/// `[model]`, on this endpoint's own engine and on decode nodes. `None` if only upstreams serve.
fn primary_model(
    config: &ServeConfig,
    nodes: &RemoteNodes,
    own: Option<&OwnEngine>,
) -> Result<Option<ServedModel>, CommandFailure> {
    let decode: Vec<Arc<Node>> = own.map(|own| &own.node).into_iter().chain(&nodes.decode).map(Arc::clone).collect();
    if decode.is_empty() {
        return Ok(None);
    }
    let PrimaryNames { name, aliases } = PrimaryNames::of(config)?;
    let name = name.map_or_else(OnceLock::new, OnceLock::from);
    let lending = own.and_then(|own| own.lending.as_ref()).map(|lending| Arc::clone(&lending.node));
    let prefill = lending.iter().chain(&nodes.prefill).map(Arc::clone).collect();
    let mut model = ServedModel::new(name, aliases, decode, prefill);
    model.lending_engine = lending;
    model.own_engine = own.map(|_| Arc::new(config.startup.engine.clone()));
    model.sampling = config.sampling;
    Ok(Some(model))
}

/// Starts the pool with `[model]`, and the discovery of the models that nodes run. Each of them is planned by the settings
/// that `routing` holds at that time.
fn start_pool(
    primary: Option<ServedModel>,
    nodes: &RemoteNodes,
    routing: &Arc<ArcSwap<RoutingConfig>>,
) -> Arc<ModelPool> {
    let models = primary.map(|model| plan_by(&routing.load(), model)).into_iter().collect();
    let pool = Arc::new(ModelPool::with_undeclared(models, nodes.decode.clone()));
    let routing = Arc::clone(routing);
    models::serve_reported_models(&pool, nodes.prefill.clone(), move |model| plan_by(&routing.load(), model));
    pool
}

/// Starts the search for nodes in the network, if the configuration wants it.
fn start_discovery(
    config: &ServeConfig,
    transport: &Transport,
    pool: &ModelPool,
    cluster: &Arc<ClusterNodes>,
) -> Result<Option<Arc<FoundNodes>>, CommandFailure> {
    if !config.startup.discover {
        return Ok(None);
    }
    pool.note_search();
    let found = Arc::new(FoundNodes::default());
    let discovery = Discovery {
        key: key_to_discover(&config.startup.transport)?,
        transport: transport.clone(),
        found: Arc::clone(&found),
        cluster: Arc::clone(cluster),
    };
    discovery.keep_searching();
    Ok(Some(found))
}

fn assemble(
    config: &ServeConfig,
    pool: Arc<ModelPool>,
    upstreams: UpstreamPool,
    own_models: Arc<OwnModels>,
    found: Option<Arc<FoundNodes>>,
) -> RequestService {
    let admission = Admission::new(config.admission);
    let targets = Targets::new(pool, Arc::clone(&own_models.loader), upstreams);
    let memory = RequestMemory::of_endpoint();
    let observer = Arc::new(Observer::default());
    RequestService {
        admission,
        targets,
        found,
        observer,
        memory,
        own_models: Some(own_models),
        config: ArcSwap::default(),
        in_force: OnceLock::new(),
    }
}

/// The models folder of this machine. `None`: it has none, as the log says.
fn models_folder(config: &ServeConfig, transport: &Transport) -> Result<Option<ModelsFolder>, CommandFailure> {
    let cluster_key = config.startup.transport.cluster_key()?;
    // Nobody sends the endpoint's machine to sleep.
    let requests = NodeRequests::default();
    let folder = ModelsFolder::new(config.loading.budget(), cluster_key.as_deref(), transport, &requests);
    let folder =
        folder.inspect_err(|CommandFailure(error)| tracing::info!("this machine has no models folder: {error}"));
    Ok(folder.ok())
}

fn serve_all(
    listeners: Vec<TcpListener>,
    addresses: &[SocketAddr],
    api: &http::Api,
    access: &SharedAccess,
    shutdown: &Shutdown,
) -> Vec<JoinHandle<std::io::Result<()>>> {
    let serve = |(listener, address): (TcpListener, &SocketAddr)| {
        // A listener that other machines can reach answers under any host name.
        let host = HostCheck { access: access.clone(), checks_names: address.ip().is_loopback() };
        let router = http::listener(api, host);
        tokio::spawn(http::serve(listener, router, shutdown.clone(), DRAIN_DEADLINE))
    };
    listeners.into_iter().zip(addresses).map(serve).collect()
}

/// The first engine that is ready, or why there will be none. With decode nodes, the endpoint serves without its own
/// engine, which goes on trying to start.
async fn first_engine(first: FirstStart, nodes: &mut RemoteNodes) -> Result<Option<Arc<NodeInfo>>, CommandFailure> {
    match first.await {
        Err(CommandFailure(error)) if nodes.has_first_answers() => {
            tracing::error!(error, "this endpoint's own engine did not start; its decode nodes serve without it");
            nodes.first_start().await
        }
        started => started,
    }
}

/// Every model's name. `first`, the first engine that answered, names the models that have no name yet.
fn served_names(service: &RequestService, first: Option<&NodeInfo>) -> Vec<String> {
    let reported = || first.map(|info| info.model.clone()).unwrap_or_default();
    let mut names: Vec<String> =
        service.targets.pool.models().iter().map(|model| model.name.get_or_init(reported).clone()).collect();
    for (name, _) in service.targets.upstreams.load().models() {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

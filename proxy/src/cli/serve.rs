//! `baton serve`: the endpoint, with an engine of its own in a child process, in front of nodes, or both.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_swap::ArcSwap;
use baton_planner::deadlines::Deadlines;
use baton_planner::policy::Policy;
use baton_schemas::node::NodeInfo;
use clap::Args;
use futures::future::BoxFuture;
use tokio::net::TcpListener;

use super::banner::Banner;
use super::reload::Reload;
use super::{Failure, backend, config_file, machine, own_models, service_manager, signals, terminal};
use crate::app::App;
use crate::config::engine_args::EngineArgs;
use crate::config::transport_args::TransportArgs;
use crate::config::{ConfigError, ConfigFile, ServeConfig};
use crate::http;
use crate::http::server::Shutdown;
use crate::observe::Observer;
use crate::request::admission::Admission;
use crate::targets::model_loading::Residency;
use crate::targets::nodes::{self, Node, Pool, ServedModel};
use crate::targets::upstreams::{Life, UpstreamPool};

/// The environment variable of `--api-key`.
pub(super) const API_KEY_VARIABLE: &str = "BATON_API_KEY";

/// Options of `baton serve`. A flag wins over the configuration file.
#[derive(Clone, Args)]
pub(super) struct ServeArgs {
    /// Configuration file; see configs/
    #[arg(long, short, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// A .gguf file, a catalogue name, or OWNER/REPO[:FILE] on the Hugging Face hub [default: smollm2]
    #[arg(long, short, value_name = "PATH|NAME")]
    model: Option<String>,
    /// The address of the endpoint [default: 127.0.0.1:8080]
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// A second address with the same routes, for clients that expect Ollama at its own port: 127.0.0.1:11434
    #[arg(long, value_name = "HOST:PORT")]
    ollama_listen: Option<String>,
    /// The model's public name [default: from the model]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// A key clients must present; repeat for several. Better in the configuration file: arguments show in `ps`
    #[arg(long = "api-key", value_name = "KEY", env = API_KEY_VARIABLE, hide_env_values = true)]
    api_keys: Vec<String>,
    /// A node that generates (`baton node --role decode` or `both`), http:// if no scheme is given; repeat for several.
    /// Without a model here, no engine is started here; needs BATON_CLUSTER_KEY
    #[arg(long, alias = "node", value_name = "HOST:PORT|URL")]
    decode: Vec<String>,
    /// A node that computes prompts (`baton node --role prefill`), http:// if no scheme is given; repeat for several;
    /// needs BATON_CLUSTER_KEY
    #[arg(long, value_name = "HOST:PORT|URL")]
    prefill: Vec<String>,
    /// Do not measure idle nodes and links with made-up prompts; rates are learned from requests alone
    #[arg(long)]
    no_calibration: bool,
    /// How requests are planned: fastest, always_handoff, direct, round_robin, least_loaded [default: fastest]
    #[arg(long, value_name = "NAME")]
    policy: Option<String>,
    #[command(flatten)]
    transport: TransportArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

impl ServeArgs {
    /// The collector of traces that the file names. Its mistakes are told when it is read in earnest.
    pub(super) fn collector(&self) -> Option<String> {
        self.config.as_ref()?;
        let (file, by_flags) = self.clone().read().ok()?;
        file.check(&by_flags, Vec::new()).ok()?.otlp_endpoint
    }

    /// The checked configuration: flags over the file over the defaults. Errors: every mistake in either.
    pub(super) fn into_config(self) -> Result<ServeConfig, ConfigError> {
        let (file, by_flags) = self.read()?;
        let more = machine::problems(&file.raw);
        file.check(&by_flags, more)
    }

    /// The file with the flags over it, and the keys that these set.
    fn read(self) -> Result<(ConfigFile, BTreeSet<String>), ConfigError> {
        let mut file = self.config.as_deref().map_or_else(|| Ok(ConfigFile::default()), ConfigFile::read)?;
        let raw = &mut file.raw;
        let mut by_flags = BTreeSet::new();
        let mut set = |key: &str, is_given: bool| {
            if is_given {
                by_flags.insert(key.to_owned());
            }
            is_given
        };
        for (key, flag, value) in [
            ("listen", self.listen, &mut raw.listen),
            ("ollama_listen", self.ollama_listen, &mut raw.ollama_listen),
            ("model.source", self.model, &mut raw.model.source),
            ("model.name", self.name, &mut raw.model.name),
            ("model.policy", self.policy, &mut raw.model.policy),
        ] {
            if set(key, flag.is_some()) {
                *value = flag;
            }
        }
        for (key, flag, value) in [
            ("api_keys", self.api_keys, &mut raw.api_keys),
            ("model.prefill", self.prefill, &mut raw.model.prefill),
            ("model.decode", self.decode, &mut raw.model.decode),
        ] {
            if set(key, !flag.is_empty()) {
                *value = flag;
            }
        }
        if set("tls_ca", self.transport.tls_ca.is_some()) {
            raw.tls_ca = self.transport.tls_ca;
        }
        raw.allow_plain_http |= self.transport.allow_plain_http;
        raw.model.calibrate = self.no_calibration.then_some(false).or(raw.model.calibrate);
        for key in self.engine.keys() {
            set(&format!("model.engine.{key}"), true);
        }
        raw.model.engine = self.engine.over(std::mem::take(&mut raw.model.engine));
        Ok((file, by_flags))
    }
}

/// A key that is there and empty is a mistake, which clap would take for none.
fn refuse_an_empty_variable() -> Result<(), Failure> {
    if std::env::var(API_KEY_VARIABLE).is_ok_and(|key| key.trim().is_empty()) {
        return Err(Failure(format!("{API_KEY_VARIABLE} is set but empty: give it a key, or unset it")));
    }
    Ok(())
}

/// How long running streams may go on after a stop was asked for.
const DRAIN_DEADLINE: Duration = Duration::from_secs(30);

/// How long the start waits for nodes.
const NODE_ANSWER: Duration = Duration::from_secs(2);

/// Serves until it is told to stop.
pub(super) async fn run(args: ServeArgs) -> Result<(), Failure> {
    http::open_files::raise_limit();
    refuse_an_empty_variable()?;
    let config = args.clone().into_config().map_err(config_file::told)?;
    // The ports first: the commonest mistake is told at once, and not after a model was loaded.
    let mut listeners = vec![bind(&config.listen, "--listen").await?];
    if let Some(address) = &config.ollama_listen {
        listeners.push(bind(address, "--ollama-listen").await?);
    }
    let addresses = listeners.iter().map(TcpListener::local_addr).collect::<Result<Vec<_>, _>>()?;
    let transport = config.transport.transport()?;
    let mut nodes = backend::nodes(&config, &transport, &[])?;
    let backend = match config.has_own_engine {
        true => backend::local(&config).await?,
        false => nodes.backend(config.name.clone()),
    };
    let planning = Arc::new(ArcSwap::from_pointee(Planning::of(&config)));
    let pool = pool_of(&config, &nodes, &backend, &planning);
    let taken: Vec<String> =
        pool.models().iter().flat_map(|model| model.names().cloned().collect::<Vec<_>>()).collect();
    let own = own_models::start(&config, &[], &taken).await?;
    let residents = own.iter().map(|own| Arc::clone(&own.resident)).collect();
    let residency = Residency::new(own_models::limits_of(&config)?, residents);
    pool.replace_residents(own.iter().map(|own| Arc::clone(&own.served)).collect());
    let observer = Arc::new(Observer::default());
    let upstreams = UpstreamPool::new(&config.upstreams, &transport, &UpstreamPool::default()).map_err(Failure)?;
    let upstreams = ArcSwap::from_pointee(upstreams);
    let admission = Admission::new(config.bounds);
    let app = Arc::new(App { admission, pool, residency: Arc::clone(&residency), upstreams, observer });
    let shutdown = Shutdown::default();
    let running = Arc::clone(&app);
    signals::drain_on_signal(shutdown.clone(), DRAIN_DEADLINE, move || running.admission.n_admitted());
    let http_config = http::HttpConfig { access: config.access(), ..http::HttpConfig::default() };
    let access = http::access::shared(&http_config.access);
    let api = http::api(Arc::clone(&app) as Arc<dyn http::Backend>, http_config, access.clone());
    let servers: Vec<_> = listeners
        .into_iter()
        .zip(&addresses)
        .map(|(listener, address)| {
            // A listener that others can reach answers under any name.
            let names = http::host::Names { access: access.clone(), checked: address.ip().is_loopback() };
            let router = http::listener(api.clone(), names);
            tokio::spawn(http::server::serve(listener, router, shutdown.clone(), DRAIN_DEADLINE))
        })
        .collect();
    let known_nodes = nodes.decode.iter().chain(&nodes.prefill).map(Arc::clone).collect();
    Reload { args, config: config.clone(), access, app: Arc::clone(&app), own, taken, planning, known_nodes }.watch();
    service_manager::keep_informed(Arc::clone(&app), shutdown.clone());

    let started = shutdown.begin.run_until_cancelled(first_start(backend.first_start, &mut nodes)).await;
    match started {
        Some(Ok(info)) => {
            hear_from(nodes.prefill.iter().chain(&nodes.decode)).await;
            hear_from_upstreams(&app).await;
            announce(&app, info.as_deref(), &addresses, config.needs_key());
        }
        Some(Err(error)) => {
            shutdown.begin.cancel();
            return Err(error);
        }
        None => {}
    }
    for server in servers {
        server.await??;
    }
    residency.stop().await;
    if let Some(supervised) = backend.supervised {
        supervised.stop.cancel();
        supervised.tracker.wait().await;
    }
    Ok(())
}

/// The first engine that is ready, or why there will be none. Where nodes generate too, they serve without the
/// endpoint's own engine, which goes on trying.
async fn first_start(
    own: BoxFuture<'static, Result<Option<Arc<NodeInfo>>, Failure>>,
    nodes: &mut backend::Nodes,
) -> Result<Option<Arc<NodeInfo>>, Failure> {
    match own.await {
        Err(Failure(error)) if nodes.have_answers() => {
            tracing::error!(error, "this endpoint's own engine did not start; its decode nodes serve without it");
            nodes.backend(None).first_start.await
        }
        started => started,
    }
}

/// The models that are served from the start, and those that nodes will tell of. What they have beside their nodes follows
/// from `planning`, whatever that is then.
fn pool_of(
    config: &ServeConfig,
    nodes: &backend::Nodes,
    backend: &backend::Backend,
    planning: &Arc<ArcSwap<Planning>>,
) -> Arc<Pool> {
    let decode = backend.own.iter().chain(&nodes.decode).map(Arc::clone).collect();
    let aliases = [&backend.aliases[..], &config.aliases].concat();
    let name = backend.name.clone().map_or_else(OnceLock::new, OnceLock::from);
    let mut first = ServedModel::new(name, aliases, decode, nodes.prefill.clone());
    first.has_own_engine = backend.own.is_some();
    first.sampling = config.sampling;
    // With neither an engine nor nodes, upstreams serve all there is.
    let is_served = !first.decode.is_empty();
    let models = is_served.then(|| planning.load().in_service(first)).into_iter().collect();
    let pool = Arc::new(Pool::with_undeclared(models, nodes.decode.clone()));
    let planning = Arc::clone(planning);
    nodes::keep_discovering(&pool, nodes.prefill.clone(), move |model| planning.load().in_service(model));
    pool
}

/// How requests for `[model]`, and for what nodes run, are planned.
pub(super) struct Planning {
    policy: &'static dyn Policy,
    deadlines: Deadlines,
    calibrate: bool,
}

impl Planning {
    /// As it is configured.
    pub(super) fn of(config: &ServeConfig) -> Planning {
        Planning { policy: config.policy, deadlines: config.deadlines, calibrate: config.calibrate }
    }

    /// A model that is planned for so from now on.
    pub(super) fn in_service(&self, mut model: ServedModel) -> Arc<ServedModel> {
        (model.policy, model.deadlines) = (self.policy, self.deadlines);
        let model = Arc::new(model);
        if self.calibrate {
            nodes::keep_calibrated(&model);
        }
        model
    }
}

/// Gives nodes a moment to answer, so that the first request can use them. One that does not is used later.
pub(super) async fn hear_from(nodes: impl Iterator<Item = &Arc<Node>>) {
    let answers = nodes.map(|node| async {
        let _ = node.ready().await;
    });
    if tokio::time::timeout(NODE_ANSWER, futures::future::join_all(answers)).await.is_err() {
        tracing::warn!("a node has not answered yet; requests are served without it until it does");
    }
    // What they run is taken into service.
    tokio::time::sleep(2 * nodes::DISCOVERY_INTERVAL).await;
}

/// Gives upstreams a moment to list their models.
async fn hear_from_upstreams(app: &App) {
    let upstreams = app.upstreams.load_full();
    let answers = async {
        while upstreams.members.iter().any(|member| member.life() == Life::Unknown) {
            tokio::time::sleep(nodes::DISCOVERY_INTERVAL).await;
        }
    };
    // One that is late is used later, and has been told of in the log.
    let _ = tokio::time::timeout(NODE_ANSWER, answers).await;
}

/// Tells the person who started this what is there, and what is unwise about it.
fn announce(app: &App, info: Option<&NodeInfo>, addresses: &[SocketAddr], needs_key: bool) {
    let Some(&address) = addresses.first() else { return };
    let nameless = || info.map(|info| info.model.clone()).unwrap_or_default();
    let served = app.pool.models();
    let mut names: Vec<String> = served.iter().map(|model| model.name.get_or_init(nameless).clone()).collect();
    for (name, _) in app.upstreams.load().models() {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    // Upstreams may list their models later.
    let name = names.first().map_or("upstreams", String::as_str);
    let others = names.get(1..).unwrap_or_default();
    let chats = info.is_none_or(|info| info.has_chat_template);
    if !chats {
        tracing::warn!("{name} has no chat template and refuses chats: give it one with --chat-template-file FILE");
    }
    let lan = if address.ip().is_unspecified() { lan_address(address) } else { None };
    let mut text =
        Banner { address, lan, ollama: addresses.get(1).copied(), model: name, needs_key, chats }.to_string();
    if !others.is_empty() {
        text += &format!("\nOther models: {}", others.join(", "));
    }
    if let Err(error) = terminal::print_line(text) {
        tracing::debug!(%error, "nobody reads the ready message");
    }
    for address in addresses.iter().filter(|address| !address.ip().is_loopback() && !needs_key) {
        tracing::warn!(
            "whoever can reach {address} can use this server: it asks for no key. Set api_keys, or --api-key"
        );
    }
}

/// This machine's address in its network, as the system would choose it for a packet to elsewhere. Nothing is sent.
fn lan_address(listening: SocketAddr) -> Option<IpAddr> {
    // Addresses that are reserved for documentation (RFC 5737 and 3849): never a neighbour's.
    let (any, elsewhere) = match listening {
        SocketAddr::V4(_) => ("0.0.0.0:0", "192.0.2.1:9"),
        SocketAddr::V6(_) => ("[::]:0", "[2001:db8::1]:9"),
    };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(elsewhere).ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_loopback() && !address.is_unspecified()).then_some(address)
}

async fn bind(address: &str, flag: &str) -> Result<TcpListener, Failure> {
    TcpListener::bind(address).await.map_err(|e| {
        Failure(match e.kind() {
            std::io::ErrorKind::AddrInUse => {
                format!("{address} is in use by another program. Stop it, or choose another address with {flag}.")
            }
            _ => format!("cannot listen on {address}: {e}"),
        })
    })
}

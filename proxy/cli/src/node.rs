//! `baton node`: serves one engine by the node protocol.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use baton_engines::handoff::{HttpPuller, KvPuller, PullPolicy};
use baton_engines::mdns::{self, Announced, Announcement, ServiceType};
use baton_engines::node::{ClusterKey, LateEngine, ListenAddress, Listener, ServerTls, stoppable_router};
use baton_engines::registry::{self, EngineKind, EngineOptions, THREADS_VARIABLE};
use baton_engines::transport::{TlsError, Transport};
use baton_pairing::PairingCode;
use baton_proxy::config::DEFAULT_MODEL;
use baton_proxy::config::engine_args::{self, EngineArgs};
use baton_proxy::config::transport_args::TransportArgs;
use baton_proxy::http::open_files;
use baton_proxy::log_target::NOTICE;
use baton_proxy::serve::model_names::ModelNames;
use baton_proxy::serve::signals::OnHangup;
use baton_proxy::serve::{CommandFailure, mlx_environment, model_files, service_manager, signals};
use baton_schemas::node::{ChildEvent, KEY_VARIABLE, NodeInfo, PULL_KEY_VARIABLE, Role, TLS_PROPERTY};
use clap::{Args, ValueEnum};
use rustix::process::Signal;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::engine_line::engine_line;
use super::node_failure::NodeFailure;
use super::pair::{PairFirst, first_machine, pair_first};
#[cfg(feature = "llama")]
use super::workers;
use super::{keeper, lifeline, terminal};

/// Where a node listens unless told.
const DEFAULT_PORT: u16 = 9000;

/// Characters of the host's name in an announcement: with a port as many as a node's name may have.
const MAX_HOST_CHARS: usize = 26;

/// Options of `baton node`.
#[derive(Args)]
pub(super) struct NodeArgs {
    /// A .gguf file, a folder of safetensors (--engine mlx), a catalogue name, or OWNER/REPO[:FILE] on the Hugging Face hub [default: smollm2]
    #[arg(long, short, value_name = "PATH|NAME")]
    pub(super) model: Option<PathBuf>,
    /// The model's name, which endpoints use unless they configure another [default: from the catalogue or the file]
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(super) name: Option<String>,
    /// HOST:PORT or unix:PATH. The cluster key comes from the environment variable BATON_CLUSTER_KEY, or from `baton pair`
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9000")]
    pub(super) listen: ListenAddress,
    /// Which task the node has
    #[arg(long, value_enum, value_name = "ROLE", default_value = "both")]
    role: NodeRole,
    /// Pair this machine first, unless it is paired: join the cluster of the machine that shows this code
    #[arg(long, value_name = "CODE", conflicts_with_all = ["allow_plain_http", "child"])]
    pub(super) pair: Option<PairingCode>,
    /// With --pair: the address of the machine that shows the code, instead of searching for it
    #[arg(long, value_name = "HOST[:PORT]", requires = "pair", value_parser = first_machine)]
    pub(super) at: Option<String>,
    /// Speak TLS, with the certificate in this PEM file; it and the key are read again on SIGHUP
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub(super) tls_cert: Option<PathBuf>,
    /// The certificate's private key, PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    #[command(flatten)]
    pub(super) transport: TransportArgs,
    /// Announce this node in the local network, for `baton serve --discover`. A node that only this machine can reach
    /// announces nothing
    #[arg(long, value_enum, value_name = "ON|OFF", default_value = "on")]
    announce: Announce,
    /// With --role worker: lend at most so much of each device's memory [default: all that is free]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u32).range(16..=1 << 24))]
    pub(super) lend_memory: Option<u32>,
    #[command(flatten)]
    pub(super) engine: EngineArgs,
    /// Serve at this address instead of --listen, and end when standard input does: another process restarts this one
    #[arg(long, value_name = "ADDRESS", hide = true, conflicts_with = "child")]
    kept: Option<ListenAddress>,
    /// Report on standard output, and end when standard input does
    #[arg(long, hide = true)]
    pub(super) child: bool,
}

/// Whether a node announces itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Announce {
    On,
    Off,
}

/// The task of a node.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum NodeRole {
    /// Computes prompts' KV for decode nodes.
    Prefill,
    /// Generates.
    Decode,
    /// Either.
    Both,
    /// Has no model: lends its devices to another node (--workers).
    Worker,
}

impl NodeArgs {
    /// The role of the node's engine. `None`: it is a worker, which has none.
    pub(super) fn engine_role(&self) -> Option<Role> {
        match self.role {
            NodeRole::Prefill => Some(Role::Prefill),
            NodeRole::Decode => Some(Role::Decode),
            NodeRole::Both => Some(Role::Both),
            NodeRole::Worker => None,
        }
    }
}

/// Runs a node with an engine until a signal stops it.
pub(super) async fn run(args: NodeArgs, role: Role) -> Result<(), CommandFailure> {
    if args.lend_memory.is_some() {
        return Err(CommandFailure("--lend-memory is for --role worker".into()));
    }
    set_threads(&args.engine)?;
    open_files::raise_limit();
    let stop = CancellationToken::new();
    let is_child = args.child;
    if let Some(code) = args.pair.clone() {
        // Before the code is used up.
        check_start(&args, role).await.map_err(|failure| CommandFailure(failure.message))?;
        pair_first(PairFirst::Join { code, at: args.at.clone() }).await?;
    }
    // ggml's client ends the process when a worker is lost. A child's parent starts it again.
    if args.engine.workers.as_ref().is_some_and(|workers| !workers.is_empty()) && args.kept.is_none() && !is_child {
        check_options(&args, role).map_err(|failure| CommandFailure(failure.message))?;
        return keeper::keep(&args.listen).await;
    }
    let is_kept = args.kept.is_some();
    let args = NodeArgs { listen: args.kept.clone().unwrap_or(args.listen), ..args };
    if is_kept {
        lifeline::tie_to_parent(Signal::TERM, None);
    }
    if is_child {
        let socket = match &args.listen {
            ListenAddress::Unix(path) => Some(path.clone()),
            ListenAddress::Tcp(_) => None,
        };
        // Not TERM: destructors would race with the thread that computes.
        lifeline::tie_to_parent(Signal::KILL, socket);
    }
    let is_paired_first = args.pair.is_some();
    let start = start(args, role, &stop);
    // Pairing has listened to signals, which now do nothing by themselves.
    let started = if is_paired_first { signals::end_process_meanwhile(start).await } else { start.await };
    match started {
        Err(failure) => {
            if is_child {
                // The parent prints the message.
                let NodeFailure { message, summary } = failure;
                lifeline::tell_parent(&ChildEvent::Failed { message, summary });
                std::process::exit(1);
            }
            Err(CommandFailure(failure.message))
        }
        Ok(StartedNode { server, address, tls, is_paired, info, announced }) => {
            let on_hangup = if tls.is_some() { OnHangup::Rereads } else { OnHangup::Stops };
            if let Some(tls) = tls {
                signals::on_hangup(move || renew(&tls));
            }
            if is_child {
                lifeline::tell_parent(&ChildEvent::Ready { address });
                signals::ignore();
            } else {
                if let Some(address) = address {
                    terminal::note(format_args!("baton node is ready on {address}"));
                    if is_paired && address.ip().to_canonical().is_loopback() {
                        terminal::note(
                            "Only this machine can reach it: --listen 0.0.0.0:9000 lets the cluster find it",
                        );
                    }
                    if let Some(info) = info {
                        terminal::note(format_args!("with {}", engine_line(&info)));
                    }
                }
                signals::stop_on_signal(stop.clone(), on_hangup);
                tokio::spawn(say_goodbye(announced, stop));
                service_manager::report_ready();
            }
            if is_kept {
                lifeline::tell_parent(&ChildEvent::Ready { address });
            }
            server.await??;
            if !is_child {
                service_manager::report_stopping();
            }
            Ok(())
        }
    }
}

/// Gives candle its number of threads, which it reads from the environment of the process. So this process starts its own
/// program again in its place, unless the environment has the number already.
fn set_threads(engine: &EngineArgs) -> Result<(), CommandFailure> {
    let threads = engine.threads.filter(|_| engine.engine.unwrap_or_default() == EngineKind::Candle);
    let Some(threads) = threads.map(|n| OsString::from(n.to_string())) else { return Ok(()) };
    if std::env::var_os(THREADS_VARIABLE).as_ref() == Some(&threads) {
        return Ok(());
    }
    let program = std::env::current_exe()?;
    let error = Command::new(program).args(std::env::args_os().skip(1)).env(THREADS_VARIABLE, threads).exec();
    Err(CommandFailure(format!("the number of candle's threads cannot be set: {error}")))
}

/// A node that serves, or is still loading its model.
struct StartedNode {
    server: JoinHandle<std::io::Result<()>>,
    /// Where, if it listens on TCP.
    address: Option<SocketAddr>,
    tls: Option<ServerTls>,
    /// It uses a pairing.
    is_paired: bool,
    info: Option<NodeInfo>,
    announced: Option<Announced>,
}

/// Finds mistakes that would end the start. Downloads nothing.
async fn check_start(args: &NodeArgs, role: Role) -> Result<(), NodeFailure> {
    check_options(args, role)?;
    let needs_file = args.engine.engine.unwrap_or_default().needs_file();
    if let Some(source) = args.model.as_ref().filter(|_| needs_file).and_then(|model| model.to_str()) {
        model_files::find(source).map_err(|CommandFailure(message)| NodeFailure::setup(message))?;
    }
    // Dropped at once: the address is free.
    Listener::bind(&args.listen).await.map(drop).map_err(NodeFailure::setup)
}

fn check_options(args: &NodeArgs, role: Role) -> Result<(), NodeFailure> {
    let mut problems = args.engine.problems().into_iter();
    let prefills_only = role == Role::Prefill;
    match problems.next().or_else(|| args.engine.handoff_problem().filter(|_| prefills_only)) {
        Some((key, message)) => Err(NodeFailure::setup(format!("{} {message}", engine_args::flag(key)))),
        None => Ok(()),
    }
}

/// Listens, says that the model is loading, and loads it.
async fn start(args: NodeArgs, role: Role, stop: &CancellationToken) -> Result<StartedNode, NodeFailure> {
    let args = NodeArgs { transport: args.transport.or_paired(), ..args };
    let key = cluster_key(&args.transport)?;
    // Before a model is loaded, which can take minutes.
    let tls = certificate(&args).map_err(NodeFailure::setup)?;
    if tls.is_none() && !args.transport.allow_plain_http {
        refuse_open_address(&args.listen).await?;
    }
    let transport = args.transport.transport().map_err(NodeFailure::setup)?;
    let puller = puller(&key, &args, role, transport.clone())?;
    check_options(&args, role)?;
    let model = args.model;
    let name = args.name;
    let options = args.engine;
    let listener = Listener::bind(&args.listen).await.map_err(NodeFailure::setup)?;
    let address = listener.tcp_address();
    let listener = match &tls {
        Some(tls) => listener.with_tls(tls.clone()),
        None => listener,
    };
    // Until the engine is ready, requests are answered with "the model is loading".
    let late = LateEngine::default();
    let about = args.transport.pairing().and_then(|folder| folder.about().ok().flatten());
    let is_paired = about.is_some();
    let machine = about.map(|about| about.machine.to_string());
    // It proves the key and tells its load while its model loads.
    let announced = match args.announce {
        Announce::On if !args.child => address.and_then(|address| announce_at(address, tls.as_ref(), machine)),
        Announce::On | Announce::Off => None,
    };
    let router = stoppable_router(Arc::new(late.clone()), role, ClusterKey::new(&key), stop.clone());
    let server = tokio::spawn(listener.serve(router, stop.clone()));
    if !args.child
        && let Some(note) = engine_args::unused_model(model.is_some(), &options)
    {
        terminal::note(format_args!("baton node: {note}"));
    }
    let kind = options.engine.unwrap_or_default();
    let model = match model {
        // The parent has located the file; if it is gone by now, the engine says so in words for clients.
        model if args.child || !kind.needs_file() => NodeModel { path: model, name },
        model => located(model.unwrap_or_else(|| DEFAULT_MODEL.into()), name, kind).await?,
    };
    #[cfg(feature = "llama")]
    let workers = workers::connect(&options, &args.transport, &key, transport).await?;
    #[cfg(not(feature = "llama"))]
    let workers = Vec::new();
    let options = EngineOptions { workers, ..engine_options(options, model)? };
    let started = registry::start(options, puller).await;
    let engine = started.map_err(|e| NodeFailure { message: e.to_string(), summary: e.summary().into() })?;
    let info = engine.info().await.ok();
    late.set(engine);
    Ok(StartedNode { server, address, tls, is_paired, info, announced })
}

/// The key that every call to a node presents.
pub(super) fn cluster_key(transport: &TransportArgs) -> Result<String, NodeFailure> {
    transport.cluster_key().map_err(NodeFailure::setup)?.ok_or_else(|| {
        NodeFailure::setup(format!(
            "a node needs a cluster key: pair the machines with `baton pair`, or set {KEY_VARIABLE} to the same secret on \
             all machines"
        ))
    })
}

/// Announces the node, unless only this machine reaches it, by the machine's name in the cluster or else its host name. That mDNS
/// does not work here is no reason to end.
fn announce_at(listening: SocketAddr, tls: Option<&ServerTls>, machine: Option<String>) -> Option<Announced> {
    if listening.ip().to_canonical().is_loopback() {
        return None;
    }
    let host = machine.unwrap_or_else(|| rustix::system::uname().nodename().to_string_lossy().into_owned());
    let host: String =
        mdns::printable(&host).split('.').next().unwrap_or_default().chars().take(MAX_HOST_CHARS).collect();
    // The same when the node is started again. Two nodes of one machine have different ports.
    let name = match listening.port() {
        DEFAULT_PORT => host,
        port => format!("{host}-{port}"),
    };
    let tls = tls.map(|tls| (TLS_PROPERTY, tls.dns_name().as_deref().unwrap_or_default().to_owned()));
    let properties = tls.into_iter().collect();
    match mdns::announce(&Announcement { service: ServiceType::NODE, name, listening, properties }) {
        Ok(announced) => Some(announced),
        Err(error) => {
            tracing::warn!(%error, "this node does not announce itself; endpoints need its address (--prefill, --decode)");
            None
        }
    }
}

/// Takes the announcement back as soon as the node begins to stop.
async fn say_goodbye(announced: Option<Announced>, stop: CancellationToken) {
    stop.cancelled().await;
    if let Some(announced) = announced {
        announced.withdraw().await;
    }
}

/// The certificate to speak TLS with: the given one, or the pairing's. A child's socket needs none.
pub(super) fn certificate(args: &NodeArgs) -> Result<Option<ServerTls>, TlsError> {
    if let (Some(cert), Some(key)) = (&args.tls_cert, &args.tls_key) {
        return ServerTls::load(cert, key).map(Some);
    }
    let Some(folder) = args.transport.pairing().filter(|_| !args.child) else { return Ok(None) };
    tracing::info!(target: NOTICE, "the node uses the key and the certificate in {}", folder.path().display());
    ServerTls::load(&folder.certificate(), &folder.private_key()).map(Some)
}

/// Refuses plain HTTP on an address that other machines can reach.
pub(super) async fn refuse_open_address(listen: &ListenAddress) -> Result<(), NodeFailure> {
    if listen.is_private().await.map_err(NodeFailure::setup)? {
        return Ok(());
    }
    Err(NodeFailure::setup(format!(
        "{listen} can be reached from other machines, and over plain HTTP the cluster key and the prompts could be \
         read on the way. Pair the machines with `baton pair`, give the node a certificate (--tls-cert and --tls-key), or \
         allow it with --allow-plain-http"
    )))
}

/// Reads the certificate again. A mistake in the new files must not end a node that serves.
pub(super) fn renew(tls: &ServerTls) {
    match tls.reload() {
        Ok(()) => terminal::note("baton node: the certificate was read again"),
        Err(error) => tracing::error!(%error, "reloading the certificate failed; the old one stays in use"),
    }
}

/// The model of a node: its file, and its name if one is chosen.
struct NodeModel {
    path: Option<PathBuf>,
    name: Option<String>,
}

/// Finds the file of a model that may be named as `baton serve` names it, and fetches it if need be. Without `name`, the
/// model is called as an endpoint would call it.
async fn located(model: PathBuf, name: Option<String>, engine: EngineKind) -> Result<NodeModel, NodeFailure> {
    let path = match model.to_str() {
        Some(source) => {
            let path = model_files::locate_or_pull(source, engine).await;
            path.map_err(|CommandFailure(message)| NodeFailure::setup(message))?
        }
        // A name is text; anything else can only be a path.
        None => model.clone(),
    };
    let name = name.unwrap_or_else(|| ModelNames::of_file(&model.to_string_lossy(), &path).name);
    Ok(NodeModel { path: Some(path), name: Some(name) })
}

/// The client that fetches KV from prefill nodes. A node that only prefills has none, and the child of an endpoint without
/// prefill nodes gets no key for them.
fn puller(
    key: &str,
    args: &NodeArgs,
    role: Role,
    transport: Transport,
) -> Result<Option<Arc<dyn KvPuller>>, NodeFailure> {
    let options = &args.engine;
    let pull_key = std::env::var(PULL_KEY_VARIABLE).ok().filter(|key| !key.is_empty());
    if !role.decodes() || (args.child && pull_key.is_none()) {
        return Ok(None);
    }
    let codecs = options.kv_codecs.clone().unwrap_or_default();
    let policy = PullPolicy {
        max_canary_distance: options.max_canary_distance,
        codecs,
        max_kv_kl: options.max_kv_kl,
        transport,
        ..PullPolicy::default()
    };
    let puller = HttpPuller::new(pull_key.as_deref().unwrap_or(key), policy).map_err(NodeFailure::setup)?;
    Ok(Some(Arc::new(puller)))
}

fn engine_options(mut args: EngineArgs, model: NodeModel) -> Result<EngineOptions, NodeFailure> {
    if args.engine == Some(EngineKind::Mlx) && args.mlx_python.is_none() {
        let environment = mlx_environment().map_err(|CommandFailure(message)| NodeFailure::setup(message))?;
        args.mlx_python = Some(environment.python());
    }
    let template = args.chat_template_file.as_ref().map(|path| {
        std::fs::read_to_string(path)
            .map_err(|e| NodeFailure::setup(format!("cannot read the chat template {}: {e}", path.display())))
    });
    let chat_template = template.transpose()?;
    Ok(args.into_options(model.path, model.name, chat_template))
}

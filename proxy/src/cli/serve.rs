//! `baton serve`: the endpoint, with an engine of its own in a child process or in front of a node.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use baton_engines::Engine;
use baton_engines::remote::{NodeAddress, RemoteEngine};
use baton_engines::transport::Transport;
use baton_schemas::node::KEY_VARIABLE;
use clap::Args;
use tokio::net::TcpListener;
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::{Failure, banner, pull, signals};
use crate::admission::Admission;
use crate::app::App;
use crate::config::{RawConfig, ServeConfig};
use crate::engine_args::{EngineArgs, EngineKind};
use crate::http;
use crate::models::{self, Located};
use crate::node_watch;
use crate::pool::{EngineState, Node, Pool, ServedModel};
use crate::supervisor::{self, StartError, Supervised};
use crate::transport_args::TransportArgs;

/// Options of `baton serve`. A flag wins over the configuration file.
#[derive(Args)]
pub(super) struct ServeArgs {
    /// Configuration file; see configs/
    #[arg(long, short, value_name = "FILE")]
    config: Option<PathBuf>,
    /// A .gguf file, a catalogue name, or OWNER/REPO[:FILE] on the Hugging Face hub [default: smollm2]
    #[arg(long, short, value_name = "PATH|NAME")]
    model: Option<String>,
    /// The address of the endpoint [default: 127.0.0.1:8080]
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// The model's public name [default: from the model]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// A key clients must present; repeat for several. Better in the configuration file: arguments show in `ps`
    #[arg(long = "api-key", value_name = "KEY", env = "BATON_API_KEY", hide_env_values = true)]
    api_keys: Vec<String>,
    /// Use a node that runs elsewhere (`baton node`) and start no engine here; needs BATON_CLUSTER_KEY
    #[arg(long, value_name = "URL")]
    node: Option<String>,
    /// A node that computes prompts (`baton node --role prefill`), http:// if no scheme is given; repeat for several;
    /// needs BATON_CLUSTER_KEY
    #[arg(long, value_name = "HOST:PORT|URL")]
    prefill: Vec<String>,
    #[command(flatten)]
    transport: TransportArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

impl ServeArgs {
    fn into_config(self) -> Result<(ServeConfig, Option<String>), Failure> {
        let mut raw = self.config.as_deref().map_or_else(|| Ok(RawConfig::default()), RawConfig::read)?;
        raw.listen = self.listen.or(raw.listen);
        raw.model.source = self.model.or(raw.model.source);
        raw.model.name = self.name.or(raw.model.name);
        if !self.api_keys.is_empty() {
            raw.api_keys = self.api_keys;
        }
        if !self.prefill.is_empty() {
            raw.model.prefill = self.prefill;
        }
        raw.tls_ca = self.transport.tls_ca.or(raw.tls_ca);
        raw.allow_plain_http |= self.transport.allow_plain_http;
        raw.model.engine = self.engine.over(raw.model.engine);
        Ok((raw.check()?, self.node))
    }
}

/// How long running streams may go on after a stop was asked for.
const DRAIN_DEADLINE: Duration = Duration::from_secs(30);

/// Serves until it is told to stop.
#[allow(clippy::print_stdout, reason = "the ready message is for the person who started this")]
pub(super) async fn run(args: ServeArgs) -> Result<(), Failure> {
    let (config, node) = args.into_config()?;
    // The port first: the commonest mistake is told at once, and not after a model was loaded.
    let listener = bind(&config.listen).await?;
    let address = listener.local_addr()?;
    let transport = config.transport.transport()?;
    let prefill = prefill_nodes(&config.prefill, &transport)?;
    let backend = match node {
        Some(url) => remote_node(&url, config.name.clone(), &transport)?,
        None => local_engine(&config).await?,
    };
    let name = backend.name.clone();
    let pool = Pool {
        models: vec![ServedModel {
            name: backend.name,
            aliases: [backend.aliases, config.aliases.clone()].concat(),
            since: SystemTime::now(),
            decode: Node {
                name: if backend.supervised.is_some() { "local" } else { "remote" }.to_owned(),
                url: None,
                engine: backend.engine,
                state: backend.state,
            },
            prefill,
        }],
    };
    let app = Arc::new(App { admission: Admission::new(config.max_requests), pool });
    let stop = CancellationToken::new();
    signals::stop_on_signal(stop.clone());
    let router = http::router(app, http_config(&config, address.ip().is_loopback()));
    let server = tokio::spawn(http::server::serve(listener, router, stop.clone(), DRAIN_DEADLINE));

    if let Some(first_start) = backend.first_start {
        let started = tokio::select! {
            started = first_start => started.unwrap_or(Err(StartError::TimedOut)),
            () = stop.cancelled() => Ok(()),
        };
        if let Err(error) = started {
            stop.cancel();
            return Err(error.into());
        }
    }
    if !stop.is_cancelled() {
        println!("{}", banner::banner(address, &name, !config.api_keys.is_empty()));
    }
    server.await??;
    if let Some(supervised) = backend.supervised {
        supervised.stop.cancel();
        supervised.tracker.wait().await;
    }
    Ok(())
}

/// What answers requests, and the handles that keep it alive.
struct Backend {
    name: String,
    aliases: Vec<String>,
    engine: Arc<dyn Engine>,
    state: watch::Receiver<EngineState>,
    first_start: Option<oneshot::Receiver<Result<(), StartError>>>,
    supervised: Option<Supervised>,
}

/// A child process with the configured model, which is fetched first if need be.
async fn local_engine(config: &ServeConfig) -> Result<Backend, Failure> {
    let mut args = [config.engine.to_args(), config.transport.to_args()].concat();
    let (mut name, mut aliases) = ("sim".to_owned(), Vec::new());
    if config.engine.engine.unwrap_or_default() == EngineKind::Llama {
        let path = model_file(&config.source).await?;
        (name, aliases) = names(&config.source, &path);
        args.extend([OsString::from("--model"), path.into()]);
    }
    let (supervised, first_start) = supervisor::supervise(args, cluster_key(&config.prefill)?.as_deref())?;
    Ok(Backend {
        name: config.name.clone().unwrap_or(name),
        aliases,
        engine: Arc::clone(&supervised.engine) as Arc<dyn Engine>,
        state: supervised.state.clone(),
        first_start: Some(first_start),
        supervised: Some(supervised),
    })
}

/// The cluster's key, if there are nodes to present it to.
fn cluster_key(prefill: &[String]) -> Result<Option<String>, Failure> {
    let Some(url) = prefill.first() else { return Ok(None) };
    match std::env::var(KEY_VARIABLE).ok().filter(|key| !key.is_empty()) {
        Some(key) => Ok(Some(key)),
        None => Err(Failure(format!("the prefill node {url} needs the cluster key: set {KEY_VARIABLE} to its secret"))),
    }
}

/// The nodes that compute prompts, each watched from now on.
fn prefill_nodes(urls: &[String], transport: &Transport) -> Result<Vec<Node>, Failure> {
    let key = cluster_key(urls)?.unwrap_or_default();
    let node = |(i, url): (usize, &String)| {
        let client = RemoteEngine::with_transport(&NodeAddress::Url(url.clone()), &key, transport)?;
        let engine: Arc<dyn Engine> = Arc::new(client);
        let state = node_watch::watch(Arc::clone(&engine));
        Ok(Node { name: format!("prefill-{}", i + 1), url: Some(url.clone()), engine, state })
    };
    urls.iter().enumerate().map(node).collect()
}

/// A node on another machine.
fn remote_node(url: &str, name: Option<String>, transport: &Transport) -> Result<Backend, Failure> {
    let key = std::env::var(KEY_VARIABLE).unwrap_or_default();
    if key.is_empty() {
        return Err(Failure(format!("--node needs the cluster key: set {KEY_VARIABLE} to the node's secret")));
    }
    if !url.starts_with("http://") && !url.starts_with("https://") {
        return Err(Failure(format!("--node {url:?} is not a URL like http://spark.local:9000")));
    }
    let client = RemoteEngine::with_transport(&NodeAddress::Url(url.to_owned()), &key, transport)?;
    let engine: Arc<dyn Engine> = Arc::new(client);
    let state = node_watch::watch(Arc::clone(&engine));
    let name = name.unwrap_or_else(|| "default".into());
    Ok(Backend { name, aliases: Vec::new(), engine, state, first_start: None, supervised: None })
}

/// The file of a model, fetched if it is not in the cache.
async fn model_file(source: &str) -> Result<PathBuf, Failure> {
    let options = pull::options()?;
    match models::locate(source, &options.cache_dir)? {
        Located::File(path) => Ok(path),
        Located::NeedsPull(_) => Ok(models::pull(source, &options).await?),
    }
}

/// Public names of a model: the catalogue's, or the file's.
fn names(source: &str, path: &Path) -> (String, Vec<String>) {
    if let Some(model) = models::catalogue::find(source) {
        return (model.name.to_owned(), model.aliases.iter().map(|&alias| alias.to_owned()).collect());
    }
    let stem = path.file_stem().map_or_else(|| source.to_owned(), |stem| stem.to_string_lossy().into_owned());
    (stem, Vec::new())
}

async fn bind(address: &str) -> Result<TcpListener, Failure> {
    TcpListener::bind(address).await.map_err(|e| {
        Failure(match e.kind() {
            std::io::ErrorKind::AddrInUse => {
                format!("{address} is in use by another program. Stop it, or choose another address with --listen.")
            }
            _ => format!("cannot listen on {address}: {e}"),
        })
    })
}

fn http_config(config: &ServeConfig, on_loopback: bool) -> http::HttpConfig {
    http::HttpConfig {
        api_keys: config.api_keys.clone(),
        share_prefix_cache: config.share_prefix_cache,
        allowed_origins: config.allowed_origins.clone(),
        allowed_hosts: config.allowed_hosts.clone(),
        check_host: on_loopback,
        ..http::HttpConfig::default()
    }
}

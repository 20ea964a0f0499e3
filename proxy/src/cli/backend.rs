//! What answers the requests of `baton serve`: an engine in a child process, nodes that run elsewhere, or both.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

use baton_engines::Engine;
use baton_engines::remote::{NodeAddress, RemoteEngine};
use baton_engines::transport::Transport;
use baton_fetch::{self as models, Located, cache};
use baton_schemas::node::{KEY_VARIABLE, NodeInfo};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::oneshot;

use super::{Failure, pull};
use crate::config::ServeConfig;
use crate::config::engine_args::EngineKind;
use crate::observe::telemetry;
use crate::serve::supervisor::{self, StartError, Supervised};
use crate::targets::nodes::Node;
use crate::targets::nodes::remote_watch::{self, RefusedKey, Watched};

/// What the endpoint begins with, and the handles that keep it alive.
pub(super) struct Backend {
    /// Of the first model. `None`: to be learned from a node.
    pub name: Option<String>,
    pub aliases: Vec<String>,
    /// This endpoint's own engine.
    pub own: Option<Arc<Node>>,
    /// Resolves once requests can be sent, with what answers them, or never will be.
    pub first_start: BoxFuture<'static, Result<Option<Arc<NodeInfo>>, Failure>>,
    pub supervised: Option<Supervised>,
}

/// What `[model]` is called, if that is known before a node has told: its name, and all others.
pub(super) fn names_of(config: &ServeConfig) -> Result<(Option<String>, Vec<String>), Failure> {
    let (known, mut aliases) = match config.engine.engine.unwrap_or_default() {
        _ if !config.has_own_engine => (None, Vec::new()),
        EngineKind::Sim => (Some("sim".to_owned()), Vec::new()),
        EngineKind::Llama => match models::locate(&config.source, &cache::default_folder()?)? {
            Located::File(path) => {
                let (name, aliases) = names(&config.source, &path);
                (Some(name), aliases)
            }
            Located::NeedsPull(_) => (None, Vec::new()),
        },
    };
    aliases.extend(config.aliases.iter().cloned());
    Ok((config.name.clone().or(known), aliases))
}

/// A child process with the configured model, which is fetched first if need be.
pub(super) async fn local(config: &ServeConfig) -> Result<Backend, Failure> {
    let mut args = [config.engine.to_args(), config.transport.to_args()].concat();
    let (mut name, mut aliases) = ("sim".to_owned(), Vec::new());
    if config.engine.engine.unwrap_or_default() == EngineKind::Llama {
        let path = pull::model_file(&config.source).await?;
        (name, aliases) = names(&config.source, &path);
        args.extend([OsString::from("--model"), path.into()]);
    }
    let (pull_key, traces_to) = (cluster_key(&config.prefill)?, telemetry::endpoint(config.otlp_endpoint.as_deref()));
    let (supervised, first_start) = supervisor::supervise(
        "this endpoint's own engine",
        args,
        pull_key.as_deref(),
        traces_to.as_deref(),
        supervisor::always(),
    )?;
    let engine = Arc::clone(&supervised.engine) as Arc<dyn Engine>;
    Ok(Backend {
        name: Some(config.name.clone().unwrap_or(name)),
        aliases,
        own: Some(Node::new("local".to_owned(), None, engine, Arc::clone(&supervised.health))),
        first_start: first_start.map(|first| Ok(Some(first.unwrap_or(Err(StartError::TimedOut))?))).boxed(),
        supervised: Some(supervised),
    })
}

/// The cluster's key, if there are nodes to present it to.
fn cluster_key<'a>(urls: impl IntoIterator<Item = &'a String>) -> Result<Option<String>, Failure> {
    let Some(url) = urls.into_iter().next() else { return Ok(None) };
    match std::env::var(KEY_VARIABLE).ok().filter(|key| !key.is_empty()) {
        Some(key) => Ok(Some(key)),
        None => Err(Failure(format!("the node {url} needs the cluster key: set {KEY_VARIABLE} to its secret"))),
    }
}

/// Nodes that run elsewhere, each watched from now on.
pub(super) struct Nodes {
    pub decode: Vec<Arc<Node>>,
    /// A node that is named for both tasks is in both lists.
    pub prefill: Vec<Arc<Node>>,
    first_answers: Vec<BoxFuture<'static, Result<Arc<NodeInfo>, Failure>>>,
}

/// The configured nodes. Those at the addresses of `known` ones are these.
pub(super) fn nodes(config: &ServeConfig, transport: &Transport, known: &[Arc<Node>]) -> Result<Nodes, Failure> {
    let key = cluster_key(config.decode.iter().chain(&config.prefill))?.unwrap_or_default();
    let urls: Vec<&String> = config.decode.iter().chain(&config.prefill).collect();
    let stays = |node: &&Arc<Node>| node.url.as_ref().is_some_and(|url| urls.contains(&url));
    let mut there: Vec<Arc<Node>> = known.iter().filter(stays).map(Arc::clone).collect();
    let mut first_answers = Vec::new();
    let mut node = |task: &str, first: usize, url: &String| -> Result<Arc<Node>, Failure> {
        // A node that is named for both tasks is one.
        if let Some(node) = there.iter().find(|node| node.url.as_ref() == Some(url)) {
            return Ok(Arc::clone(node));
        }
        let client = RemoteEngine::with_transport(&NodeAddress::Url(url.clone()), &key, transport)?;
        let engine: Arc<dyn Engine> = Arc::new(client);
        let Watched { health, first_answer } = remote_watch::watch(Arc::clone(&engine), url);
        first_answers.push(told(first_answer, url.clone()));
        // By its place, unless a node that was there before is called so.
        let mut names = (first..).map(|n| format!("{task}-{n}"));
        let name = names.find(|name| !there.iter().any(|node| node.name == *name)).unwrap_or_default();
        let node = Node::new(name, Some(url.clone()), engine, health);
        there.push(Arc::clone(&node));
        Ok(node)
    };
    let decode = (1..).zip(&config.decode).map(|(i, url)| node("decode", i, url)).collect::<Result<Vec<_>, _>>()?;
    let prefill = (1..).zip(&config.prefill).map(|(i, url)| node("prefill", i, url)).collect::<Result<Vec<_>, _>>()?;
    first_answers.truncate(decode.len());
    Ok(Nodes { decode, prefill, first_answers })
}

impl Nodes {
    /// Whether there are decode nodes whose first answers nobody has taken.
    pub(super) fn have_answers(&self) -> bool {
        !self.first_answers.is_empty()
    }

    /// An endpoint without an engine of its own. It can begin once one of these nodes has answered.
    pub(super) fn backend(&mut self, name: Option<String>) -> Backend {
        let answers = std::mem::take(&mut self.first_answers);
        let first_start = if answers.is_empty() {
            // Upstreams alone: nothing to wait for.
            futures::future::ready(Ok(None)).boxed()
        } else {
            futures::future::select_all(answers).map(|(first, ..)| first.map(Some)).boxed()
        };
        Backend { name, aliases: Vec::new(), own: None, first_start, supervised: None }
    }
}

/// A node's first answer, for the operator.
fn told(
    first: oneshot::Receiver<Result<Arc<NodeInfo>, RefusedKey>>,
    url: String,
) -> BoxFuture<'static, Result<Arc<NodeInfo>, Failure>> {
    let told = first.map(move |first| match first {
        Ok(Err(RefusedKey)) => Err(Failure(format!(
            "the node at {url} refused the cluster key: set {KEY_VARIABLE} to the secret that the node was started with"
        ))),
        Ok(Ok(info)) => Ok(info),
        Err(_) => Err(Failure(format!("the node at {url} is not watched any more"))),
    });
    told.boxed()
}

/// Public names of a model: the catalogue's, or the file's.
pub(super) fn names(source: &str, path: &Path) -> (String, Vec<String>) {
    if let Some(model) = models::catalogue::find(source) {
        return (model.name.to_owned(), model.aliases.iter().map(|&alias| alias.to_owned()).collect());
    }
    let stem = path.file_stem().map_or_else(|| source.to_owned(), |stem| stem.to_string_lossy().into_owned());
    (stem, Vec::new())
}

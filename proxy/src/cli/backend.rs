//! What answers the requests of `baton serve`: an engine in a child process, or a node that runs elsewhere.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

use baton_engines::Engine;
use baton_engines::remote::{NodeAddress, RemoteEngine};
use baton_engines::transport::Transport;
use baton_schemas::node::{KEY_VARIABLE, NodeInfo};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::watch;

use super::{Failure, pull};
use crate::config::ServeConfig;
use crate::engine_args::EngineKind;
use crate::models;
use crate::node_watch::{self, RefusedKey};
use crate::pool::{EngineState, Node};
use crate::supervisor::{self, StartError, Supervised};

/// What answers requests, and the handles that keep it alive.
pub(super) struct Backend {
    /// `None`: to be learned from the node.
    pub name: Option<String>,
    pub aliases: Vec<String>,
    pub engine: Arc<dyn Engine>,
    pub state: watch::Receiver<EngineState>,
    /// Resolves once requests can be sent, with what answers them, or never will be.
    pub first_start: BoxFuture<'static, Result<Arc<NodeInfo>, Failure>>,
    pub supervised: Option<Supervised>,
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
    let (supervised, first_start) = supervisor::supervise(args, cluster_key(&config.prefill)?.as_deref())?;
    Ok(Backend {
        name: Some(config.name.clone().unwrap_or(name)),
        aliases,
        engine: Arc::clone(&supervised.engine) as Arc<dyn Engine>,
        state: supervised.state.clone(),
        first_start: first_start.map(|first| Ok(first.unwrap_or(Err(StartError::TimedOut))?)).boxed(),
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
pub(super) fn prefill_nodes(urls: &[String], transport: &Transport) -> Result<Vec<Arc<Node>>, Failure> {
    let key = cluster_key(urls)?.unwrap_or_default();
    let node = |(i, url): (usize, &String)| {
        let client = RemoteEngine::with_transport(&NodeAddress::Url(url.clone()), &key, transport)?;
        let engine: Arc<dyn Engine> = Arc::new(client);
        let watched = node_watch::watch(Arc::clone(&engine), url.clone());
        Ok(Node::new(format!("prefill-{}", i + 1), Some(url.clone()), engine, watched.state))
    };
    urls.iter().enumerate().map(node).collect()
}

/// A node on another machine.
pub(super) fn remote(url: &str, name: Option<String>, transport: &Transport) -> Result<Backend, Failure> {
    let key = std::env::var(KEY_VARIABLE).unwrap_or_default();
    if key.is_empty() {
        return Err(Failure(format!("--node needs the cluster key: set {KEY_VARIABLE} to the node's secret")));
    }
    if !url.starts_with("http://") && !url.starts_with("https://") {
        return Err(Failure(format!("--node {url:?} is not a URL like http://spark.local:9000")));
    }
    let client = RemoteEngine::with_transport(&NodeAddress::Url(url.to_owned()), &key, transport)?;
    let engine: Arc<dyn Engine> = Arc::new(client);
    let watched = node_watch::watch(Arc::clone(&engine), url.to_owned());
    let url = url.to_owned();
    let first_start = watched.first_answer.map(move |first| match first {
        Ok(Err(RefusedKey)) => Err(Failure(format!(
            "the node at {url} refused the cluster key: set {KEY_VARIABLE} to the secret that the node was started with"
        ))),
        Ok(Ok(info)) => Ok(info),
        Err(_) => Err(Failure(format!("the node at {url} is not watched any more"))),
    });
    let first_start = first_start.boxed();
    Ok(Backend { name, aliases: Vec::new(), engine, state: watched.state, first_start, supervised: None })
}

/// Public names of a model: the catalogue's, or the file's.
fn names(source: &str, path: &Path) -> (String, Vec<String>) {
    if let Some(model) = models::catalogue::find(source) {
        return (model.name.to_owned(), model.aliases.iter().map(|&alias| alias.to_owned()).collect());
    }
    let stem = path.file_stem().map_or_else(|| source.to_owned(), |stem| stem.to_string_lossy().into_owned());
    (stem, Vec::new())
}

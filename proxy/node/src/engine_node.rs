//! A node with an engine: answers "the model is loading" until it is loaded.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use baton_engines::engine_options::{EngineKind, EngineOptions, StoreSecret, WrittenOptions};
use baton_engines::registry;
use baton_link::handoff::{HttpPuller, KvPuller, PullPolicy};
use baton_link::node::{NodeRequests, stoppable_router};
use baton_link::transport::Transport;
use baton_proxy::config::{DEFAULT_MODEL, LoadingConfig, engine_options};
use baton_proxy::serve::model_names::ModelNames;
use baton_proxy::serve::models_folder::ModelsFolder;
use baton_proxy::serve::{CommandFailure, mlx_environment, model_files, store_secret};
use baton_schemas::node::{PULL_KEY_VARIABLE, Role, STORE_SECRET_VARIABLE};

use super::door::{Behind, Door};
use super::end::NodeEnd;
use super::event::{NodeEvent, Serves, Tell};
use super::failure::NodeFailure;
use super::models;
use super::options::{NodeOptions, WantedEngine, WayToRun};
use super::sleep::keep_sleeping;
use super::workers;

/// Serves, loads the model, and returns once it is loaded.
pub(crate) async fn start(
    options: NodeOptions,
    role: Role,
    door: Door,
    tell: Tell,
    end: &NodeEnd,
) -> Result<Behind, NodeFailure> {
    let NodeEnd { stop, engine: late, .. } = end;
    let is_child = options.way == WayToRun::Child;
    let puller = puller(&options, &door)?;
    // It proves the key and tells its load while its model loads.
    if options.announces && !is_child {
        door.announce(stop.clone());
    }
    let cluster_key = door.cluster_key();
    let Door { listener, key, transport, .. } = door;
    let router = stoppable_router(Arc::new(late.clone()), role, cluster_key.clone(), stop.clone());
    let router = match is_child {
        // The endpoint has this machine's folder itself.
        true => router,
        false => {
            let requests = late.requests();
            router.merge(models::router(models_folder(&key, &transport, requests)?, cluster_key, requests.clone()))
        }
    };
    let server = tokio::spawn(listener.serve(router, stop.clone()));
    let NodeOptions { model, name, engine, transport: addresses, sleep, .. } = options;
    if !is_child && let Some(remark) = engine_options::unused_model(model.is_some(), &engine) {
        tell(NodeEvent::Remark(remark));
    }
    let kind = engine.kind();
    let model = match model {
        // The parent has located the file; if it is gone by now, the engine says so in words for clients.
        model if is_child || !kind.needs_file() => NodeModel { path: model, name },
        model => located(model.unwrap_or_else(|| DEFAULT_MODEL.into()), name, kind).await?,
    };
    let wanted = WantedEngine { options: &engine, model: model.path.as_deref() };
    let workers = workers::connect(wanted, &addresses, &key, transport, tell).await?;
    let store_secret = match is_child {
        true => std::env::var(STORE_SECRET_VARIABLE).ok().map(StoreSecret),
        false => store_secret::for_engine(&engine, &addresses)
            .map_err(|CommandFailure(message)| NodeFailure::setup(message))?,
    };
    let in_use = model_files::in_use(model.path.as_deref(), &engine);
    let found = found_options(engine, model)?;
    let engine_options = EngineOptions { workers: workers.endpoints.clone(), store_secret, ..found };
    let started = registry::start(engine_options, puller).await;
    let engine = started.map_err(|error| workers.blamed(error))?;
    let info = engine.info().await.ok();
    workers.check(info.as_ref())?;
    late.set(engine);
    if let Some(sleep) = sleep {
        keep_sleeping(sleep, late.requests(), stop.clone());
    }
    let server = tokio::spawn(async move {
        let ended = server.await;
        drop(in_use);
        ended.map_err(io::Error::other)?
    });
    Ok(Behind { server, serves: Serves::Engine(info.map(Box::new)) })
}

/// The models folder of this machine, for other nodes and for endpoints.
fn models_folder(key: &str, transport: &Transport, requests: &NodeRequests) -> Result<ModelsFolder, NodeFailure> {
    let folder = ModelsFolder::new(LoadingConfig::default_budget(), Some(key), transport, requests);
    folder.map_err(|CommandFailure(message)| NodeFailure::setup(message))
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

/// The client that fetches KV from other nodes: from prefill nodes, and on a prefill node that of replies. The child of an endpoint
/// without prefill nodes gets no key for them.
fn puller(options: &NodeOptions, door: &Door) -> Result<Option<Arc<dyn KvPuller>>, NodeFailure> {
    let pull_key = std::env::var(PULL_KEY_VARIABLE).ok().filter(|key| !key.is_empty());
    if options.way == WayToRun::Child && pull_key.is_none() {
        return Ok(None);
    }
    let engine = &options.engine;
    let policy = PullPolicy {
        max_canary_distance: engine.max_canary_distance,
        codecs: engine.kv_codecs.clone().unwrap_or_default(),
        max_kv_kl: engine.max_kv_kl,
        transport: door.transport.clone(),
        takes_sockets: options.way == WayToRun::Child,
        ..PullPolicy::default()
    };
    let puller = HttpPuller::new(pull_key.as_deref().unwrap_or(&door.key), policy).map_err(NodeFailure::setup)?;
    Ok(Some(Arc::new(puller)))
}

fn found_options(mut written: WrittenOptions, model: NodeModel) -> Result<EngineOptions, NodeFailure> {
    for (key, message) in engine_options::remarks(&written) {
        tracing::warn!("{} {message}", engine_options::flag(key));
    }
    if written.engine == Some(EngineKind::Mlx) && written.mlx_python.is_none() {
        let environment = mlx_environment().map_err(|CommandFailure(message)| NodeFailure::setup(message))?;
        written.mlx_python = Some(environment.python());
    }
    let template = written.chat_template_file.as_ref().map(|path| {
        std::fs::read_to_string(path)
            .map_err(|e| NodeFailure::setup(format!("cannot read the chat template {}: {e}", path.display())))
    });
    let chat_template = template.transpose()?;
    let NodeModel { path: model, name } = model;
    let template_program = Some(std::env::current_exe().map_err(NodeFailure::setup)?);
    Ok(EngineOptions { model, name, chat_template, template_program, ..written.into() })
}

//! `[[models]]` as they run: each with a supervised process that is there while requests need it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use baton_engines::Engine;
use baton_engines::gguf::{Gguf, SizeWishes, Sizes};
use baton_engines::limits::DEFAULT_SLOTS;
use baton_fetch::{self as models, Located, cache};
use baton_schemas::node::NodeInfo;
use tokio::sync::watch;

use super::{Failure, backend, pull};
use crate::config::engine_args::{EngineArgs, EngineKind};
use crate::config::{LoadingConfig, OwnModelConfig, ServeConfig};
use crate::observe::telemetry;
use crate::serve::supervisor::{self, Supervised};
use crate::targets::model_loading::{Limits, Process, Resident, ResidentSettings};
use crate::targets::nodes::{Node, ServedModel, names};

/// An own model that is served.
#[derive(Clone)]
pub(super) struct Own {
    config: OwnModelConfig,
    /// What its process is started with. If that does not change, neither does the process.
    args: Vec<OsString>,
    pub(super) served: Arc<ServedModel>,
    pub(super) resident: Arc<Resident>,
}

impl Own {
    /// It holds from now on, whatever it was before.
    pub(super) fn take_into_force(&self) {
        self.resident.reconfigure(self.config.keep_alive);
    }
}

/// Sources of models whose files are not on this machine.
pub(super) fn missing(config: &ServeConfig) -> Result<Vec<String>, Failure> {
    let is_file = |model: &&OwnModelConfig| model.engine.engine.unwrap_or_default() == EngineKind::Llama;
    let found = config.models.iter().filter(is_file).map(|model| Ok((&model.source, found(&model.source)?)));
    let found = found.collect::<Result<Vec<_>, Failure>>()?;
    Ok(found.into_iter().filter(|(_, path)| path.is_none()).map(|(source, _)| source.clone()).collect())
}

/// What holds for all of them together, beside a model that is always there: its source, and how it runs.
pub(super) fn limits(loading: &LoadingConfig, beside: Option<(&str, &EngineArgs)>) -> Result<Limits, Failure> {
    let memory_budget = loading.budget();
    let mut limits =
        Limits { memory_budget, reserved: 0, max_waiting: loading.max_waiting, max_wait: loading.max_wait };
    let beside = beside.filter(|(_, engine)| engine.engine.unwrap_or_default() == EngineKind::Llama);
    if let Some((source, engine)) = beside
        && let Some(path) = found(source)?
    {
        limits.reserved = sized(source, engine, &path, &limits)?.0.memory_bytes;
    }
    Ok(limits)
}

/// The same of a configuration as a whole.
pub(super) fn limits_of(config: &ServeConfig) -> Result<Limits, Failure> {
    let has_both = config.has_own_engine && !config.models.is_empty();
    limits(&config.loading, has_both.then_some((config.source.as_str(), &config.engine)))
}

/// The file of a model, if it is on this machine.
fn found(source: &str) -> Result<Option<PathBuf>, Failure> {
    match models::locate(source, &cache::default_folder()?)? {
        Located::File(path) if path.exists() => Ok(Some(path)),
        Located::File(path) => Err(Failure(format!("there is no model file at {}", path.display()))),
        Located::NeedsPull(_) => Ok(None),
    }
}

/// What a model takes, and what its file says of it.
pub(super) fn sized(
    source: &str,
    engine: &EngineArgs,
    path: &Path,
    limits: &Limits,
) -> Result<(Sizes, NodeInfo), Failure> {
    let gguf = Gguf::open(path)?;
    let n_slots = engine.slots.unwrap_or(DEFAULT_SLOTS);
    let projector_bytes = engine.mmproj.as_deref().map(Gguf::projector_bytes).transpose()?.unwrap_or(0);
    let wishes = SizeWishes { n_ctx: engine.ctx_size, n_cells: engine.kv_cells, n_slots, projector_bytes };
    let available = limits.memory_budget.saturating_sub(limits.reserved);
    let sizes = Sizes::choose(&gguf, wishes, available).map_err(|error| {
        Failure(format!("the model {source} can never be loaded within the memory budget of own models: {error}"))
    })?;
    let template = engine.chat_template_file.as_ref().map(|path| {
        std::fs::read_to_string(path)
            .map_err(|error| Failure(format!("cannot read the chat template {}: {error}", path.display())))
    });
    let mut outline = gguf.outline(path, sizes, n_slots, template.transpose()?.as_deref());
    let projector = engine.mmproj.as_deref().map(|path| Gguf::open_projector(path)?.weights_hash(path));
    outline.projector = projector.transpose()?.map(|hash| hash.to_hex().to_string());
    Ok((sizes, outline))
}

/// What the configuration asks for. Models are fetched if need be, and none is loaded yet. Those that are in `before` and
/// run as they did are taken over with their processes; no other may be called as one of `taken` is.
pub(super) async fn start(config: &ServeConfig, before: &[Own], taken: &[String]) -> Result<Vec<Own>, Failure> {
    let limits = limits_of(config)?;
    let mut taken = taken.to_vec();
    let mut own = Vec::with_capacity(config.models.len());
    for model in &config.models {
        let plan = plan(model, config, &limits).await?;
        for name in std::iter::once(&plan.name).chain(&plan.aliases) {
            if taken.iter().any(|other| names::are_same(other, name)) {
                return Err(Failure(format!("two models are called {name:?}: give one of them another 'name'")));
            }
            taken.push(name.clone());
        }
        own.push(begin(model, config, before, plan)?);
    }
    Ok(own)
}

/// How a model will run.
struct Plan {
    name: String,
    aliases: Vec<String>,
    args: Vec<OsString>,
    estimated_bytes: u64,
    outline: Option<Arc<NodeInfo>>,
}

async fn plan(model: &OwnModelConfig, config: &ServeConfig, limits: &Limits) -> Result<Plan, Failure> {
    let transport = config.transport.to_args();
    if model.engine.engine.unwrap_or_default() == EngineKind::Sim {
        let name = model.name.clone().unwrap_or_else(|| "sim".to_owned());
        let args = [model.engine.to_args(), transport].concat();
        return Ok(Plan { name, aliases: model.aliases.clone(), args, estimated_bytes: 0, outline: None });
    }
    let path = pull::model_file(&model.source).await?;
    let (name, aliases) = backend::names(&model.source, &path);
    let (source, engine, limits, file) = (model.source.clone(), model.engine.clone(), *limits, path.clone());
    let sized = tokio::task::spawn_blocking(move || sized(&source, &engine, &file, &limits)).await;
    let (sizes, outline) = sized.unwrap_or_else(|panic| Err(panic.into()))?;
    // The sizes that were reckoned with, and not what the child would choose for the memory that it finds.
    let engine = EngineArgs { ctx_size: Some(sizes.n_ctx), kv_cells: Some(sizes.n_cells), ..model.engine.clone() };
    let args = [engine.to_args(), transport, vec!["--model".into(), path.into()]].concat();
    Ok(Plan {
        // A name that was chosen is not added to those of the catalogue.
        aliases: model.aliases.iter().cloned().chain(aliases.into_iter().filter(|_| model.name.is_none())).collect(),
        name: model.name.clone().unwrap_or(name),
        args,
        estimated_bytes: sizes.memory_bytes,
        outline: Some(Arc::new(outline)),
    })
}

fn begin(model: &OwnModelConfig, config: &ServeConfig, before: &[Own], plan: Plan) -> Result<Own, Failure> {
    let known = before.iter().find(|known| known.args == plan.args && known.served.name.get() == Some(&plan.name));
    let (node, resident) = match known {
        Some(known) if known.config == *model && known.served.deadlines == config.deadlines => return Ok(known.clone()),
        Some(known) => (Arc::clone(&known.served.decode[0]), Arc::clone(&known.resident)),
        None => process(model, config, &plan)?,
    };
    let mut served = ServedModel::new(OnceLock::from(plan.name), plan.aliases, vec![node], Vec::new());
    served.has_own_engine = true;
    served.sampling = model.sampling;
    served.deadlines = config.deadlines;
    served.resident = Some(Arc::clone(&resident));
    Ok(Own { config: model.clone(), args: plan.args, served: Arc::new(served), resident })
}

/// A process that is not wanted yet.
fn process(model: &OwnModelConfig, config: &ServeConfig, plan: &Plan) -> Result<(Arc<Node>, Arc<Resident>), Failure> {
    let traces_to = telemetry::endpoint(config.otlp_endpoint.as_deref());
    let (wanted, is_wanted) = watch::channel(false);
    let (supervised, _) = supervisor::supervise(
        format!("the engine of {:?}", plan.name),
        plan.args.clone(),
        None,
        traces_to.as_deref(),
        is_wanted,
    )?;
    let Supervised { engine, health, pid, stop, tracker } = supervised;
    let node = Node::new("local".to_owned(), None, engine as Arc<dyn Engine>, Arc::clone(&health));
    let settings = ResidentSettings {
        name: plan.name.clone(),
        estimated_bytes: plan.estimated_bytes,
        outline: plan.outline.clone(),
        n_slots: model.engine.slots.unwrap_or(DEFAULT_SLOTS),
        keep_alive: model.keep_alive,
    };
    Ok((node, Resident::new(settings, Process { wanted, health, pid, stop, tracker })))
}

//! `[[models]]`: each has a supervised process, which is started while requests need it.

use std::ffi::OsString;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use baton_engines::engine_options::{EngineKind, WrittenOptions};
use baton_fetch::in_use::FilesInUse;
use baton_link::Engine;
use baton_model::gguf::{CompanionFiles, CompanionMemory, FoundHead, Gguf, ModelSizes, SizeOptions};
use baton_model::limits::{DEFAULT_SLOTS, DEFAULT_UBATCH};
use baton_schemas::node::NodeInfo;
use tokio::sync::watch;

use super::failure::CommandFailure;
use super::model_files;
use super::model_names::ModelNames;
use super::store_secret;
use super::supervisor::{self, ChildSpec, Supervised};
use crate::config::{LoadingConfig, OnDemandModelConfig, ServeConfig, StartupConfig, engine_options};
use crate::model_name;
use crate::observe::telemetry;
use crate::targets::model_loading::{LoadLimits, LoadableModel, LoadableSettings, ModelProcess};
use crate::targets::models::{RemovedKeys, ServedModel};
use crate::targets::nodes::Node;

/// A model that is loaded on demand, as served.
#[derive(Clone)]
pub(super) struct OnDemandModel {
    config: OnDemandModelConfig,
    /// The arguments of its process. The process is kept over a reload that does not change these.
    args: Vec<OsString>,
    pub(super) served: Arc<ServedModel>,
    pub(super) loadable: Arc<LoadableModel>,
    /// While it is configured, nobody deletes its files, loaded or not.
    #[expect(dead_code, reason = "held, not read")]
    files: Arc<FilesInUse>,
}

impl OnDemandModel {
    /// Applies the settings that a kept process takes over while it runs.
    pub(super) fn apply_settings(&self) {
        self.loadable.reconfigure(self.config.keep_alive);
    }
}

/// A model whose file is not on this machine.
#[derive(Debug, Clone)]
pub(super) struct MissingModel {
    pub source: String,
    pub engine: EngineKind,
}

/// The models whose files are not on this machine.
pub(super) fn missing(config: &ServeConfig) -> Result<Vec<MissingModel>, CommandFailure> {
    let mut missing = Vec::new();
    for model in &config.models {
        let engine = model.engine.kind();
        if engine.needs_file() && model_files::find(&model.source)?.is_none() {
            missing.push(MissingModel { source: model.source.clone(), engine });
        }
    }
    Ok(missing)
}

/// The limits of loading on demand. `always_loaded` is a model that holds memory all the time.
pub(super) fn limits(
    loading: &LoadingConfig,
    always_loaded: Option<LocalModelRef<'_>>,
) -> Result<LoadLimits, CommandFailure> {
    let memory_budget = loading.budget();
    let mut limits =
        LoadLimits { memory_budget, reserved: 0, max_waiting: loading.max_waiting, max_wait: loading.max_wait };
    if let Some(model) = always_loaded.filter(|model| model.engine.kind().needs_file())
        && let Some(path) = model_files::find(model.source)?
    {
        limits.reserved = size_model(model, &path, &limits)?.sizes.memory_bytes;
    }
    Ok(limits)
}

/// The limits of a whole configuration, if models are loaded on demand or not.
pub(super) fn limits_of(config: &ServeConfig, has_on_demand: bool) -> Result<LoadLimits, CommandFailure> {
    let StartupConfig { source, engine, .. } = &config.startup;
    let has_both = config.routing.has_own_engine && has_on_demand;
    limits(&config.loading, has_both.then_some(LocalModelRef { source, engine }))
}

/// A model as a configuration names it.
#[derive(Clone, Copy)]
pub(super) struct LocalModelRef<'a> {
    /// A path, a catalogue name or a hub's repository.
    pub source: &'a str,
    pub engine: &'a WrittenOptions,
}

/// A model's sizes within the memory budget, and the metadata of its file.
pub(super) struct SizedModel {
    pub sizes: ModelSizes,
    pub outline: NodeInfo,
}

/// Reads a model's file and chooses its context and cache. Errors: it can never fit, or a file cannot be read.
pub(super) fn size_model(
    model: LocalModelRef<'_>,
    path: &Path,
    limits: &LoadLimits,
) -> Result<SizedModel, CommandFailure> {
    let LocalModelRef { source, engine } = model;
    let kind = engine.kind();
    let header = kind.header(path)?;
    let n_slots = engine.slots.unwrap_or(DEFAULT_SLOTS);
    let (adapter, draft) = (engine.lora_file().map(|lora| lora.path), engine.draft_file());
    let files =
        CompanionFiles { projector: engine.mmproj.as_deref(), adapter: adapter.as_deref(), draft: draft.as_deref() };
    let n_ubatch = engine.ubatch.unwrap_or(DEFAULT_UBATCH);
    let sequences = kind.sequences(n_slots, n_ubatch, engine.speculation_with_states(), &header);
    let cache_types = kind.cache_types(engine.cache_types(), &header);
    let head = kind.head(sequences, cache_types, &header).ok().filter(|_| engine.may_use_head());
    let options = SizeOptions {
        n_ctx: engine.ctx_size,
        n_cells: engine.kv_cells,
        n_slots,
        sequences,
        cache_types,
        companions: Gguf::companions(files)?.and(head.map_or(CompanionMemory::NONE, FoundHead::memory)),
    };
    let available = limits.memory_budget.saturating_sub(limits.reserved);
    let sizes = ModelSizes::choose(&header, options, available).map_err(|error| {
        CommandFailure(format!(
            "the model {source} can never be loaded within the memory budget of own models: {error}"
        ))
    })?;
    let template = engine.chat_template_file.as_ref().map(|path| {
        std::fs::read_to_string(path)
            .map_err(|error| CommandFailure(format!("cannot read the chat template {}: {error}", path.display())))
    });
    let mut outline = header.outline(path, sizes, n_slots, template.transpose()?.as_deref());
    let projector = engine.mmproj.as_deref().map(|path| Gguf::open_projector(path)?.weights_hash());
    outline.engine = kind.as_str().into();
    outline.projector = projector.transpose()?.map(|hash| hash.to_hex().to_string());
    Ok(SizedModel { sizes, outline })
}

/// Fetches missing files and starts supervising the models of the configuration, without loading any. A model of `before`
/// keeps its process if the process's arguments are unchanged. Errors: a name is used twice, here or in `taken_names`.
pub(super) async fn start(
    config: &ServeConfig,
    before: &[OnDemandModel],
    taken_names: &[String],
    removed_keys: &Arc<RemovedKeys>,
) -> Result<Vec<OnDemandModel>, CommandFailure> {
    let start = ModelStart { config, limits: limits_of(config, !config.models.is_empty())?, before, removed_keys };
    let mut taken = taken_names.to_vec();
    let mut own = Vec::with_capacity(config.models.len());
    for model in &config.models {
        own.push(start_one(model, &start, &mut taken).await?);
    }
    Ok(own)
}

/// The settings with which a model is started.
pub(super) struct ModelStart<'a> {
    pub config: &'a ServeConfig,
    pub limits: LoadLimits,
    /// Models that keep their process if its arguments are unchanged.
    pub before: &'a [OnDemandModel],
    pub removed_keys: &'a Arc<RemovedKeys>,
}

/// Starts supervising one model, and adds its names to `taken`. Errors: one is there already, or its file cannot be used.
pub(super) async fn start_one(
    model: &OnDemandModelConfig,
    start: &ModelStart<'_>,
    taken: &mut Vec<String>,
) -> Result<OnDemandModel, CommandFailure> {
    let plan = plan_process(model, start.config, &start.limits).await?;
    for name in std::iter::once(&plan.name).chain(&plan.aliases) {
        if taken.iter().any(|other| model_name::are_same(other, name)) {
            return Err(CommandFailure(format!("two models are called {name:?}: give one of them another 'name'")));
        }
        taken.push(name.clone());
    }
    keep_or_start(model, start.config, start.before, plan, start.removed_keys)
}

/// How a model's process will run.
struct ProcessPlan {
    name: String,
    aliases: Vec<String>,
    engine: WrittenOptions,
    args: Vec<OsString>,
    estimated_bytes: u64,
    outline: Option<Arc<NodeInfo>>,
    files: FilesInUse,
}

async fn plan_process(
    model: &OnDemandModelConfig,
    config: &ServeConfig,
    limits: &LoadLimits,
) -> Result<ProcessPlan, CommandFailure> {
    let transport = config.startup.transport.to_args();
    let kind = model.engine.kind();
    if !kind.needs_file() {
        let name = model.name.clone().unwrap_or_else(|| kind.as_str().to_owned());
        let args = engine_options::to_args(&model.engine)?.into_iter().chain(transport).collect();
        let (aliases, engine) = (model.aliases.clone(), model.engine.clone());
        let files = FilesInUse::default();
        return Ok(ProcessPlan { name, aliases, engine, args, estimated_bytes: 0, outline: None, files });
    }
    let path = model_files::locate_or_pull(&model.source, kind).await?;
    let names = ModelNames::of_file(&model.source, &path);
    let of_task = model.clone();
    let file = path.clone();
    let limits = *limits;
    let sized = tokio::task::spawn_blocking(move || {
        size_model(LocalModelRef { source: &of_task.source, engine: &of_task.engine }, &file, &limits)
    });
    let SizedModel { sizes, outline } = sized.await.unwrap_or_else(|panic| Err(panic.into()))?;
    // The child must use the sizes that the budget counts, and not choose others for the memory that it finds.
    let engine = WrittenOptions { ctx_size: Some(sizes.n_ctx), kv_cells: Some(sizes.n_cells), ..model.engine.clone() };
    let files = model_files::in_use(Some(&path), &engine);
    let model_args = [OsString::from("--model"), path.into()];
    let args = engine_options::to_args(&engine)?.into_iter().chain(transport).chain(model_args).collect();
    Ok(ProcessPlan {
        // The catalogue's aliases belong to the catalogue's name.
        aliases: match model.name {
            Some(_) => model.aliases.clone(),
            None => [model.aliases.clone(), names.aliases].concat(),
        },
        name: model.name.clone().unwrap_or(names.name),
        engine,
        args,
        estimated_bytes: sizes.memory_bytes,
        outline: Some(Arc::new(outline)),
        files,
    })
}

fn keep_or_start(
    model: &OnDemandModelConfig,
    config: &ServeConfig,
    before: &[OnDemandModel],
    plan: ProcessPlan,
    removed_keys: &Arc<RemovedKeys>,
) -> Result<OnDemandModel, CommandFailure> {
    let known = before.iter().find(|known| known.args == plan.args && known.served.name.get() == Some(&plan.name));
    let (node, loadable) = match known {
        Some(known) if known.config == *model && known.served.deadlines == config.routing.deadlines => {
            return Ok(known.clone());
        }
        Some(known) => (Arc::clone(&known.served.decode[0]), Arc::clone(&known.loadable)),
        None => supervise(model, config, &plan)?,
    };
    let mut served = ServedModel::new(OnceLock::from(plan.name), plan.aliases, vec![node], Vec::new());
    served.removed_keys = Arc::clone(removed_keys);
    served.own_engine = Some(Arc::new(plan.engine));
    served.sampling = model.sampling;
    served.deadlines = config.routing.deadlines;
    served.n_listed_aliases = model.n_listed_aliases;
    served.loadable = Some(Arc::clone(&loadable));
    let (config, files) = (model.clone(), Arc::new(plan.files));
    Ok(OnDemandModel { config, args: plan.args, served: Arc::new(served), loadable, files })
}

/// Supervises a process that is started when a request first needs it.
fn supervise(
    model: &OnDemandModelConfig,
    config: &ServeConfig,
    plan: &ProcessPlan,
) -> Result<(Arc<Node>, Arc<LoadableModel>), CommandFailure> {
    let (wanted, is_wanted) = watch::channel(false);
    let spec = ChildSpec {
        log_name: format!("the engine of {:?}", plan.name),
        args: plan.args.clone(),
        key: None,
        pull_key: None,
        workers_key: None,
        store_secret: store_secret::for_engine(&plan.engine, &config.startup.transport)?,
        traces_to: telemetry::endpoint(config.startup.otlp_endpoint.as_deref()),
    };
    let (supervised, _) = supervisor::supervise(spec, is_wanted)?;
    let Supervised { engine, health, pid, stop, tracker, .. } = supervised;
    let node = Node::new("local".to_owned(), None, engine as Arc<dyn Engine>, Arc::clone(&health));
    let settings = LoadableSettings {
        name: plan.name.clone(),
        estimated_bytes: plan.estimated_bytes,
        outline: plan.outline.clone(),
        keep_alive: model.keep_alive,
    };
    Ok((node, LoadableModel::new(settings, ModelProcess { wanted, health, pid, stop, tracker })))
}

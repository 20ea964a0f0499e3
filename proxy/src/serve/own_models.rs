//! The models that this endpoint loads on demand: those of `[[models]]`, then those that an operator has fetched through it. Fetched
//! models are served without a line in the configuration, while it allows model management.
//!
//! A reload and orders change them. Whoever does holds an [`OwnModelsChange`], so changes come one at a time.

use std::sync::Arc;
use std::time::Duration;

use baton_engines::engine_options::{EngineKind, WrittenOptions};
use baton_fetch::fetched::{self, FetchedModel};
use baton_fetch::stored::CachedModel;
use baton_schemas::EngineError;
use tokio::sync::{Mutex, MutexGuard};
use tokio::time::timeout;

use super::failure::CommandFailure;
use super::model_names::ModelNames;
use super::models_folder::ModelsFolder;
use super::on_demand_models::{self, ModelStart, OnDemandModel, limits_of};
use crate::config::{OnDemandModelConfig, ServeConfig};
use crate::log_target::NOTICE;
use crate::model_name;
use crate::targets::model_loading::{LoadLimits, ModelLoader};
use crate::targets::models::ModelPool;

/// A deletion waits at most this long for the end of the model's process.
const UNLOAD_DEADLINE: Duration = Duration::from_secs(30);

/// See the module.
pub(super) struct OwnModels {
    pool: Arc<ModelPool>,
    pub(super) loader: Arc<ModelLoader>,
    /// The models folder of this machine; `None`: it has none, so nothing can be fetched.
    pub(super) folder: Option<ModelsFolder>,
    state: Mutex<OwnModelsState>,
}

struct OwnModelsState {
    /// The configuration that these models follow.
    config: ServeConfig,
    /// The names of models that are not loaded on demand.
    taken_names: Vec<String>,
    configured: Vec<OnDemandModel>,
    fetched: Vec<ServedFetched>,
}

/// A fetched model that is served.
#[derive(Clone)]
struct ServedFetched {
    entry: FetchedModel,
    model: OnDemandModel,
}

impl OwnModelsState {
    fn all(&self) -> Vec<OnDemandModel> {
        self.configured.iter().chain(self.fetched.iter().map(|fetched| &fetched.model)).cloned().collect()
    }
}

/// The models of a configuration that is about to be in force.
pub(super) struct PreparedModels {
    state: OwnModelsState,
    limits: LoadLimits,
}

/// A change of the models. Other changes wait until it is dropped.
pub(super) struct OwnModelsChange<'a> {
    models: &'a OwnModels,
    state: MutexGuard<'a, OwnModelsState>,
}

impl OwnModels {
    /// Starts supervising the models, without loading any. Errors: a mistake in `[[models]]`. A fetched model that cannot be served
    /// is logged.
    pub(super) async fn start(
        config: &ServeConfig,
        taken_names: &[String],
        pool: Arc<ModelPool>,
        folder: Option<ModelsFolder>,
    ) -> Result<Arc<OwnModels>, CommandFailure> {
        let state = OwnModelsState {
            config: config.clone(),
            taken_names: taken_names.to_vec(),
            configured: Vec::new(),
            fetched: Vec::new(),
        };
        let loader = ModelLoader::new(LoadLimits::default(), Vec::new());
        let models = OwnModels { pool, loader, folder, state: Mutex::new(state) };
        let mut change = models.change().await;
        let prepared = change.prepare(config, taken_names).await?;
        change.apply(prepared);
        drop(change);
        Ok(Arc::new(models))
    }

    /// Begins a change, after those that run.
    pub(super) async fn change(&self) -> OwnModelsChange<'_> {
        OwnModelsChange { models: self, state: self.state.lock().await }
    }

    /// Serves a model that has arrived in the models folder, under a name; by default the one by which it was ordered. Errors: why it
    /// cannot be served, without paths; the log has the cause.
    pub(super) async fn serve_arrived(&self, model: &str, name: Option<&str>) -> Result<(), String> {
        let Some(folder) = &self.folder else { return Ok(()) };
        let served = self.change().await.serve_arrived(folder, model, name.unwrap_or(model)).await;
        served.map_err(|CommandFailure(error)| {
            tracing::warn!(model, error, "a fetched model is not served");
            format!("it cannot be served: {}", folder.without_its_path(&error))
        })
    }

    /// Gives a fetched model one more name. Errors: it was not fetched, or the name cannot be used.
    pub(super) async fn add_name(&self, model: &str, name: &str) -> Result<(), EngineError> {
        let mut change = self.change().await;
        let Some(at) = change.fetched(model) else {
            let problem = "was not fetched through this endpoint: its other names are 'aliases' in the configuration";
            return Err(EngineError::invalid(format!("{model:?} {problem}")));
        };
        let mut entry = change.state.fetched[at].entry.clone();
        entry.names.push(name.to_owned());
        self.put(&mut change, entry).await
    }

    /// Deletes a model: of several names that it was given, only this one; else its files, unless requests use it. A name that was
    /// not fetched through an endpoint is one of the models folder.
    pub(super) async fn delete(&self, model: &str) -> Result<(), EngineError> {
        let mut change = self.change().await;
        let Some(at) = change.fetched(model) else { return change.delete_unserved(model).await };
        let ServedFetched { entry, model: served } = change.state.fetched[at].clone();
        let is_this = |name: &String| model_name::are_same(name, model);
        let (own, others): (Vec<String>, Vec<String>) = entry.names.iter().cloned().partition(is_this);
        if !own.is_empty() && !others.is_empty() {
            return self.put(&mut change, FetchedModel { names: others, ..entry }).await;
        }
        let in_use = || EngineError::invalid(format!("{model} is in use: requests run or wait for it"));
        let report = served.loadable.report();
        if report.n_active > 0 || report.n_waiting > 0 {
            return Err(in_use());
        }
        let loadable = Arc::clone(&served.loadable);
        // With them go the locks on its files.
        drop(change.state.fetched.remove(at));
        drop(served);
        change.put_in_force().map_err(not_changed)?;
        let deleted = match timeout(UNLOAD_DEADLINE, loadable.wait_until_gone()).await {
            Ok(()) => change.delete_files(&entry.source).await,
            Err(_) => Err(in_use()),
        };
        if let Err(error) = deleted {
            // It is served as before.
            self.put(&mut change, entry)
                .await
                .inspect_err(|error| tracing::warn!(%error, "a model is not served any more"))?;
            return Err(error);
        }
        let Some(folder) = &self.folder else { return Ok(()) };
        let listed = fetched::change(folder.path(), |list| list.retain(|known| known.source != entry.source)).await;
        listed.map(drop).map_err(|error| EngineError::internal(error.summary()))
    }

    async fn put(&self, change: &mut OwnModelsChange<'_>, entry: FetchedModel) -> Result<(), EngineError> {
        let Some(folder) = &self.folder else { return Ok(()) };
        change.put(folder, entry).await.map_err(|CommandFailure(error)| {
            tracing::warn!(error, "the names of a fetched model are not changed");
            EngineError::invalid(folder.without_its_path(&error))
        })
    }
}

fn not_changed(CommandFailure(error): CommandFailure) -> EngineError {
    EngineError::internal(error)
}

impl OwnModelsChange<'_> {
    /// Starts what a configuration wants, and changes nothing yet. A model keeps its process if the process's arguments are
    /// unchanged. Errors: a mistake in `[[models]]`.
    pub(super) async fn prepare(
        &self,
        new: &ServeConfig,
        taken_names: &[String],
    ) -> Result<PreparedModels, CommandFailure> {
        let before = self.state.all();
        let removed_keys = &self.models.pool.removed_keys;
        let configured = on_demand_models::start(new, &before, taken_names, removed_keys).await?;
        let mut taken = [taken_names.to_vec(), names_of(&configured)].concat();
        let mut served = Vec::new();
        for entry in self.entries(new) {
            match self.start_fetched(&entry, new, &before, &mut taken).await {
                Ok(model) => served.push(ServedFetched { entry, model }),
                Err(CommandFailure(error)) => {
                    tracing::warn!(model = entry.source, error, "a fetched model is not served");
                }
            }
        }
        let limits = limits_of(new, !configured.is_empty() || !served.is_empty())?;
        let taken_names = taken_names.to_vec();
        let state = OwnModelsState { config: new.clone(), taken_names, configured, fetched: served };
        Ok(PreparedModels { state, limits })
    }

    /// The same, with the names of models that are not loaded on demand as they are.
    pub(super) async fn prepare_for_same_names(&self, new: &ServeConfig) -> Result<PreparedModels, CommandFailure> {
        self.prepare(new, &self.state.taken_names).await
    }

    /// Puts prepared models in the place of those that are served.
    pub(super) fn apply(&mut self, prepared: PreparedModels) {
        *self.state = prepared.state;
        self.serve(prepared.limits);
    }

    /// Notes the names of models that are not loaded on demand.
    pub(super) fn set_taken_names(&mut self, names: Vec<String>) {
        self.state.taken_names = names;
    }

    /// The list of fetched models, if this configuration serves them.
    fn entries(&self, config: &ServeConfig) -> Vec<FetchedModel> {
        let folder = self.models.folder.as_ref().filter(|_| config.access.allow_model_management);
        let read = folder.map_or(Ok(Vec::new()), |folder| fetched::read(folder.path()));
        read.unwrap_or_else(|error| {
            tracing::error!(%error, "no fetched model is served");
            Vec::new()
        })
    }

    async fn start_fetched(
        &self,
        entry: &FetchedModel,
        config: &ServeConfig,
        before: &[OnDemandModel],
        taken: &mut Vec<String>,
    ) -> Result<OnDemandModel, CommandFailure> {
        let Some(folder) = &self.models.folder else { return Err(CommandFailure("there is no models folder".into())) };
        let cached = folder.find(&entry.source).await?;
        let model = config_of(entry, &cached, taken)?;
        let removed_keys = &self.models.pool.removed_keys;
        let start = ModelStart { config, limits: limits_of(config, true)?, before, removed_keys };
        on_demand_models::start_one(&model, &start, taken).await
    }

    async fn serve_arrived(&mut self, folder: &ModelsFolder, model: &str, name: &str) -> Result<(), CommandFailure> {
        if !self.state.config.access.allow_model_management {
            return Ok(());
        }
        let source = folder.find(model).await?.name;
        let known = self.state.fetched.iter().find(|fetched| fetched.entry.source == source);
        let mut entry = known.map_or_else(|| FetchedModel { source, names: Vec::new() }, |known| known.entry.clone());
        if self.state.all().iter().any(|own| own.served.has_name(name)) || self.is_taken(name) {
            return Ok(());
        }
        entry.names.push(name.to_owned());
        self.put(folder, entry).await?;
        tracing::info!(target: NOTICE, model, name, "a fetched model is served");
        Ok(())
    }

    /// Serves a fetched model under the names of this entry, now and after a restart.
    async fn put(&mut self, folder: &ModelsFolder, entry: FetchedModel) -> Result<(), CommandFailure> {
        let before = self.state.all();
        let is_other = |fetched: &&ServedFetched| fetched.entry.source != entry.source;
        let others = self.state.fetched.iter().filter(is_other).map(|fetched| &fetched.model);
        let others: Vec<OnDemandModel> = self.state.configured.iter().chain(others).cloned().collect();
        let mut taken = [self.state.taken_names.clone(), names_of(&others)].concat();
        if let Some(name) = entry.names.iter().find(|name| is_among(&taken, name)) {
            return Err(CommandFailure(format!("{name:?} is the name of another model")));
        }
        let model = self.start_fetched(&entry, &self.state.config, &before, &mut taken).await?;
        let recorded = entry.clone();
        let recorded = fetched::change(folder.path(), |list| {
            match list.iter_mut().find(|known| known.source == recorded.source) {
                Some(known) => *known = recorded,
                None => list.push(recorded),
            }
        });
        recorded.await.map_err(|error| CommandFailure(error.summary()))?;
        // Nothing waits from here on: whoever drops this future leaves the list and what is served alike.
        let new = ServedFetched { entry, model };
        match self.state.fetched.iter_mut().find(|known| known.entry.source == new.entry.source) {
            Some(known) => *known = new,
            None => self.state.fetched.push(new),
        }
        self.put_in_force()
    }

    /// The place of the fetched model of that name.
    fn fetched(&self, name: &str) -> Option<usize> {
        self.state.fetched.iter().position(|fetched| fetched.model.served.has_name(name))
    }

    fn is_taken(&self, name: &str) -> bool {
        is_among(&self.state.taken_names, name)
    }

    async fn delete_unserved(&self, model: &str) -> Result<(), EngineError> {
        if self.is_taken(model) || self.state.configured.iter().any(|own| own.served.has_name(model)) {
            let problem = "is in use: the configuration of this endpoint names it";
            return Err(EngineError::invalid(format!("{model} {problem}")));
        }
        self.delete_files(model).await
    }

    async fn delete_files(&self, model: &str) -> Result<(), EngineError> {
        match &self.models.folder {
            Some(folder) => folder.delete(model).await,
            None => Err(EngineError::invalid("this machine has no models folder")),
        }
    }

    /// Serves the models that the state has.
    fn put_in_force(&self) -> Result<(), CommandFailure> {
        let has_on_demand = !self.state.configured.is_empty() || !self.state.fetched.is_empty();
        let limits = limits_of(&self.state.config, has_on_demand)?;
        self.serve(limits);
        Ok(())
    }

    fn serve(&self, limits: LoadLimits) {
        let models = self.state.all();
        models.iter().for_each(OnDemandModel::apply_settings);
        // Remove models from routing before unloading them, so that no new request finds them.
        self.models.pool.replace_loadable(models.iter().map(|own| Arc::clone(&own.served)).collect());
        let loadable: Vec<_> = models.iter().map(|own| Arc::clone(&own.loadable)).collect();
        self.models.loader.replace(limits, &loadable);
    }
}

fn names_of(models: &[OnDemandModel]) -> Vec<String> {
    models.iter().flat_map(|own| own.served.names().cloned().collect::<Vec<_>>()).collect()
}

fn is_among(names: &[String], name: &str) -> bool {
    names.iter().any(|other| model_name::are_same(other, name))
}

/// A fetched model as if `[[models]]` named it, without the names that other models have. Errors: none is left, or this build has no
/// engine for it.
fn config_of(
    entry: &FetchedModel,
    cached: &CachedModel,
    taken: &[String],
) -> Result<OnDemandModelConfig, CommandFailure> {
    let runs_it = |kind: &EngineKind| kind.is_built() && kind.needs_file() && kind.runs_folders() == cached.is_folder();
    let engine = EngineKind::ALL.into_iter().find(runs_it);
    let engine = engine.ok_or_else(|| CommandFailure("this build has no engine for models of its form".to_owned()))?;
    let mut names: Vec<String> = Vec::new();
    let ModelNames { name, aliases } = ModelNames::of_file(&entry.source, &cached.location());
    let of_catalogue = if aliases.is_empty() { Vec::new() } else { [vec![name], aliases].concat() };
    let mut n_given = 0;
    for (i, name) in entry.names.iter().chain([&entry.source]).chain(&of_catalogue).enumerate() {
        if !is_among(taken, name) && !is_among(&names, name) {
            names.push(name.clone());
            n_given += usize::from(i < entry.names.len());
        }
    }
    if n_given == 0 {
        return Err(CommandFailure("other models have its names".to_owned()));
    }
    let name = names.remove(0);
    Ok(OnDemandModelConfig {
        name: Some(name),
        aliases: names,
        n_listed_aliases: n_given - 1,
        engine: WrittenOptions { engine: Some(engine), ..WrittenOptions::default() },
        ..OnDemandModelConfig::of_source(entry.source.clone())
    })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use baton_schemas::machine_models::FileOnDisk;

    use super::*;

    fn check(names: &[&str], source: &str, taken: &[&str], expected: Option<(&[&str], usize)>) {
        let texts = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
        let entry = FetchedModel { source: source.to_owned(), names: texts(names) };
        let file = FileOnDisk { path: "a-Q4_0.gguf".to_owned(), n_bytes: 4, sha256: None };
        let cached = CachedModel { name: source.to_owned(), folder: PathBuf::from("/cache"), files: vec![file] };
        let made = config_of(&entry, &cached, &texts(taken)).ok();
        let made =
            made.map(|model| ([model.name.into_iter().collect(), model.aliases].concat(), model.n_listed_aliases));
        assert_eq!(made, expected.map(|(names, n)| (texts(names), n)), "{names:?} {taken:?}");
    }

    #[test]
    fn a_fetched_model_has_the_names_that_are_free() {
        let source = "me/one:a-Q4_0.gguf";
        check(&["hf.co/me/one"], source, &[], Some((&["hf.co/me/one", source], 0)));
        check(&["hf.co/me/one", "mine"], source, &[], Some((&["hf.co/me/one", "mine", source], 1)));
        check(&["hf.co/me/one", "mine"], source, &["HF.co/me/one:latest"], Some((&["mine", source], 0)));
        check(&[source, "mine"], source, &[], Some((&[source, "mine"], 1)));
        check(&["mine"], source, &["mine"], None);
        check(&["mine"], source, &[source], Some((&["mine"], 0)));
    }
}

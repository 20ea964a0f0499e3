//! `[[models]]` and `[loading]`: models that are loaded on demand.

use std::time::Duration;

use baton_engines::engine_options::WrittenOptions;
use baton_model::options::WrittenSize;
use baton_schemas::keep_alive::KeepAlive;
use baton_schemas::sampling_fields::SamplingFields;
use schemars::JsonSchema;
use serde::Deserialize;

use super::engine_options;
use super::error::ConfigProblem;
use crate::model_name;

/// How long a model stays without a request. Ollama's default.
const DEFAULT_KEEP_ALIVE: KeepAlive = KeepAlive::For(Duration::from_secs(300));

/// Requests that wait for one model to be loaded.
const DEFAULT_MAX_WAITING: usize = 256;
const MAX_MAX_WAITING: u32 = 10_000;

/// How long they wait: the largest models load in minutes from a disk, and clients give up after ten.
const DEFAULT_MAX_WAIT: f64 = 300.0;
const MAX_MAX_WAIT_SECONDS: u32 = 3_600;

/// Each may have a process of its own.
const MAX_MODELS: usize = 256;

/// The part of the machine's memory that models may take by default. The rest is for the system.
const DEFAULT_BUDGET: f64 = 0.85;

/// One of `[[models]]` as written.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RawOnDemandModel {
    /// A path, a catalogue name, or `owner/repo[:file]`.
    pub source: String,
    /// The public name.
    pub name: Option<String>,
    /// More public names.
    pub aliases: Vec<String>,
    /// Idle time before the model is unloaded: a duration like `5m`, or a number of seconds; negative: never.
    pub keep_alive: Option<RawKeepAlive>,
    /// Sampling defaults for requests that set none.
    pub sampling: SamplingFields,
    /// How the engine runs it.
    pub engine: WrittenOptions,
}

/// A duration as written.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(extend("x-expected" = "a duration like \"5m\", or a number of seconds"))]
pub enum RawKeepAlive {
    /// Seconds.
    Seconds(f64),
    /// With units.
    Text(String),
}

impl RawKeepAlive {
    fn typed(&self) -> Option<KeepAlive> {
        match self {
            RawKeepAlive::Seconds(seconds) => KeepAlive::of_seconds(*seconds),
            RawKeepAlive::Text(text) => KeepAlive::parse(text),
        }
    }
}

/// `[loading]` as written.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct RawLoading {
    /// What the loaded models may take together: a number of bytes, or one like `24GiB`.
    pub memory_budget: Option<WrittenSize>,
    /// Requests that may wait for one model.
    #[schemars(range(min = 1, max = MAX_MAX_WAITING))]
    pub max_waiting: Option<usize>,
    /// Maximum wait for a model, in seconds.
    #[schemars(range(min = 1, max = MAX_MAX_WAIT_SECONDS))]
    pub max_wait_seconds: Option<f64>,
}

/// A checked `[[models]]` table.
#[derive(Debug, Clone, PartialEq)]
pub struct OnDemandModelConfig {
    /// A path, a catalogue name, or `owner/repo[:file]`.
    pub source: String,
    /// The public name, if it is not to follow from the source.
    pub name: Option<String>,
    /// More public names.
    pub aliases: Vec<String>,
    /// So many of them, the first ones, are listed like models of their own. Not in the file: Ollama's copies are.
    pub n_listed_aliases: usize,
    /// How long it stays without a request.
    pub keep_alive: KeepAlive,
    /// Sampling defaults for requests that set none.
    pub sampling: SamplingFields,
    /// How the engine runs it.
    pub engine: WrittenOptions,
}

impl OnDemandModelConfig {
    /// A model of which nothing else is configured.
    pub fn of_source(source: String) -> OnDemandModelConfig {
        OnDemandModelConfig {
            source,
            name: None,
            aliases: Vec::new(),
            n_listed_aliases: 0,
            keep_alive: DEFAULT_KEEP_ALIVE,
            sampling: SamplingFields::default(),
            engine: WrittenOptions::default(),
        }
    }
}

/// How they are loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadingConfig {
    /// Bytes that the loaded models may take; by default most of the machine's.
    pub memory_budget: Option<u64>,
    /// Requests that may wait for one model.
    pub max_waiting: usize,
    /// Maximum wait for a model.
    pub max_wait: Duration,
}

impl LoadingConfig {
    /// Bytes that the loaded models may take.
    pub fn budget(&self) -> u64 {
        self.memory_budget.unwrap_or_else(LoadingConfig::default_budget)
    }

    /// The same without a configured budget: most of the machine's memory.
    pub fn default_budget() -> u64 {
        let most = |bytes: u64| (bytes as f64 * DEFAULT_BUDGET) as u64;
        crate::targets::model_loading::total_memory().map_or(u64::MAX, most)
    }
}

/// Everything that is wrong with `models` and `loading`. `taken` are the names of `[model]`.
pub(super) fn problems(models: &[RawOnDemandModel], loading: &RawLoading, taken: &[&String]) -> Vec<ConfigProblem> {
    let mut found = Vec::new();
    let mut problem = |key: String, message: String| found.push(ConfigProblem { flag: key.clone(), key, message });
    let mut taken: Vec<&String> = taken.to_vec();
    for (i, model) in models.iter().enumerate() {
        let key = |field: &str| format!("models[{i}].{field}");
        if i >= MAX_MODELS {
            problem(key("source"), format!("is one model too many: there may be {MAX_MODELS}"));
            break;
        }
        if model.source.trim().is_empty() && model.engine.kind().needs_file() {
            problem(key("source"), "must be a .gguf file, a catalogue name, or OWNER/REPO[:FILE]".into());
        }
        for (field, list) in [("name", model.name.as_slice()), ("aliases", &model.aliases[..])] {
            for name in list {
                if name.trim().is_empty() {
                    problem(key(field), "must not be empty".into());
                } else if taken.iter().any(|other| model_name::are_same(other, name)) {
                    problem(key(field), format!("must not be {name:?}, which another model is called too"));
                } else {
                    taken.push(name);
                }
            }
        }
        if model.keep_alive.as_ref().is_some_and(|keep_alive| keep_alive.typed().is_none()) {
            problem(key("keep_alive"), "must be a duration like \"5m\", or a number of seconds".into());
        }
        for (field, message) in model.sampling.problems() {
            problem(key(&format!("sampling.{field}")), message);
        }
        for (field, message) in engine_options::problems(&model.engine) {
            problem(key(&format!("engine.{field}")), message);
        }
        if model.engine.workers.as_ref().is_some_and(|workers| !workers.is_empty()) {
            let message = "cannot be set for a model that is loaded on demand, whose memory is this machine's";
            problem(key("engine.workers"), message.into());
        }
    }
    if loading.memory_budget.is_some() && loading.memory_bytes().is_none() {
        problem("loading.memory_budget".into(), format!("must be {}", WrittenSize::EXPECTED));
    }
    found
}

pub(super) fn checked(models: Vec<RawOnDemandModel>) -> Vec<OnDemandModelConfig> {
    let model = |raw: RawOnDemandModel| OnDemandModelConfig {
        keep_alive: raw.keep_alive.and_then(|keep_alive| keep_alive.typed()).unwrap_or(DEFAULT_KEEP_ALIVE),
        name: raw.name,
        aliases: raw.aliases,
        sampling: raw.sampling,
        engine: raw.engine,
        ..OnDemandModelConfig::of_source(raw.source)
    };
    models.into_iter().map(model).collect()
}

impl RawLoading {
    fn memory_bytes(&self) -> Option<u64> {
        self.memory_budget.as_ref().and_then(WrittenSize::bytes).filter(|bytes| *bytes > 0)
    }

    /// With defaults for what is not written.
    pub fn typed(&self) -> LoadingConfig {
        LoadingConfig {
            memory_budget: self.memory_bytes(),
            max_waiting: self.max_waiting.unwrap_or(DEFAULT_MAX_WAITING),
            max_wait: Duration::try_from_secs_f64(self.max_wait_seconds.unwrap_or(DEFAULT_MAX_WAIT))
                .unwrap_or_default(),
        }
    }
}

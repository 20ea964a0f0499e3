//! Checks the files that a configuration names on this machine: models, projectors, templates, and their memory.
//! Runs before anything starts, so that every mistake is reported at once.

mod stores;

use std::fmt;
use std::path::{Path, PathBuf};

use baton_engines::engine_options::{EngineKind, WrittenOptions};
use baton_fetch::{self as models, Located, cache};
use baton_model::gguf::Gguf;
use baton_model::template::{ChatTemplate, SpecialTokens};

pub use self::stores::key_problem as store_key_problem;
use super::failure::CommandFailure;
use super::model_names::ModelNames;
use super::on_demand_models::{LocalModelRef, limits, size_model};
use crate::config::{ConfigProblem, DEFAULT_MODEL, RawConfig, engine_options, read_text};
use crate::model_name;
use crate::targets::model_loading::LoadLimits;

/// The longest template of a known model has some 20 kB.
const MAX_TEMPLATE_BYTES: u64 = 1 << 20;

/// The table of the file that names a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ModelTable {
    /// `[model]`, which has flags, too.
    Model,
    /// `[[models]]`, by its place in the list.
    Models(usize),
}

impl fmt::Display for ModelTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ModelTable::Model => f.write_str("model"),
            ModelTable::Models(i) => write!(f, "models[{i}]"),
        }
    }
}

/// A key that names a file.
#[derive(Debug, Clone, Copy)]
enum FileKey {
    Source,
    /// An option of the engine.
    Option(&'static str),
}

impl fmt::Display for FileKey {
    /// The key in the model's table.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FileKey::Source => f.write_str("source"),
            FileKey::Option(key) => write!(f, "engine.{key}"),
        }
    }
}

impl FileKey {
    /// The flag for `[model]`.
    fn flag(self) -> String {
        match self {
            FileKey::Source => "--model".to_owned(),
            FileKey::Option(key) => engine_options::flag(key),
        }
    }
}

/// A model that an engine is started for on this machine.
struct LocalModel<'a> {
    table: ModelTable,
    source: &'a str,
    engine: &'a WrittenOptions,
    name: Option<&'a String>,
    aliases: &'a [String],
    /// Decode nodes can serve if the local engine fails, so an unusable file is not a mistake.
    has_decode_nodes: bool,
    /// The model's file, if it is on this machine.
    path: Option<PathBuf>,
    problems: Vec<ConfigProblem>,
}

impl LocalModel<'_> {
    fn problem(&mut self, file_key: FileKey, message: String) {
        let key = format!("{}.{file_key}", self.table);
        let flag = match self.table {
            ModelTable::Model => file_key.flag(),
            ModelTable::Models(_) => key.clone(),
        };
        self.problems.push(ConfigProblem { key, flag, message });
    }

    fn names(&self) -> Vec<String> {
        let chosen = self.name.into_iter().chain(self.aliases).cloned();
        chosen.chain(self.names_of_its_file()).collect()
    }

    /// Names that follow from the file, if no name is configured.
    fn names_of_its_file(&self) -> Vec<String> {
        let is_known = self.path.is_some() || models::catalogue::find(self.source).is_some();
        match self.kind() {
            _ if self.name.is_some() => return Vec::new(),
            kind if !kind.needs_file() => return vec![kind.as_str().to_owned()],
            _ if !is_known => return Vec::new(),
            _ => {}
        }
        let ModelNames { name, aliases } =
            ModelNames::of_file(self.source, self.path.as_deref().unwrap_or(Path::new("")));
        std::iter::once(name).chain(aliases).collect()
    }

    fn as_ref(&self) -> LocalModelRef<'_> {
        LocalModelRef { source: self.source, engine: self.engine }
    }

    fn kind(&self) -> EngineKind {
        self.engine.kind()
    }

    /// Finds and opens its files.
    fn open_files(&mut self) {
        if let Some(path) = &self.engine.chat_template_file
            && let Err(error) = check_template(path)
        {
            self.problem(FileKey::Option("chat_template_file"), format!("cannot be used: {}: {error}", path.display()));
        }
        self.check_store();
        if !self.kind().needs_file() {
            return;
        }
        let located = cache::default_folder().and_then(|folder| models::locate(self.source, &folder));
        match located {
            Ok(Located::File(path)) => match self.kind().header(&path) {
                Err(error) if !self.has_decode_nodes => {
                    self.problem(FileKey::Source, format!("cannot be used: {error}"))
                }
                header => {
                    self.check_draft(header.as_ref().ok());
                    header.iter().for_each(|header| self.check_block(header));
                    self.path = Some(path);
                }
            },
            Ok(Located::NeedsPull(_)) => self.check_draft(None),
            Err(error) => self.problem(FileKey::Source, format!("cannot be used: {error}")),
        }
        if let Some(Err(error)) = self.engine.mmproj.as_deref().map(Gguf::open_projector) {
            self.problem(FileKey::Option("mmproj"), format!("cannot be used: {error}"));
        }
        if let Some(Err(error)) = self.engine.lora_file().map(|lora| Gguf::open_adapter(lora.path)) {
            let key = if self.engine.lora.is_some() { "lora" } else { "lora_scaled" };
            self.problem(FileKey::Option(key), format!("cannot be used: {error}"));
        }
    }

    /// Opens the draft model, and compares it with the model if that is here.
    fn check_draft(&mut self, model: Option<&Gguf>) {
        let Some(path) = self.engine.draft_file() else { return };
        let why = match Gguf::open(path) {
            Err(error) => Some(error.to_string()),
            Ok(draft) => model.and_then(|model| model.check_draft(&draft).err()).map(|why| why.to_string()),
        };
        if let Some(why) = why {
            self.problem(FileKey::Option("draft"), format!("cannot be used: {why}"));
        }
    }

    /// Adds a problem if the model can never fit into memory. A model with other mistakes is not checked.
    fn check_memory(&mut self, limits: &LoadLimits) {
        let is_sound = self.problems.is_empty() && engine_options::problems(self.engine).is_empty();
        if let Some(path) = self.path.as_deref().filter(|_| is_sound)
            && let Err(CommandFailure(error)) = size_model(self.as_ref(), path, limits)
        {
            self.problem(FileKey::Source, format!("is refused: {error}"));
        }
    }
}

/// Parses a template. A mistake that depends on the model's own tokens is found when the model is loaded.
fn check_template(path: &Path) -> Result<(), String> {
    let source = read_text(path, MAX_TEMPLATE_BYTES).map_err(|error| error.to_string())?;
    ChatTemplate::compile(&source, SpecialTokens::default()).map(drop).map_err(|error| error.to_string())
}

/// Everything named in a configuration that cannot be used on this machine.
pub fn problems(raw: &RawConfig) -> Vec<ConfigProblem> {
    let model = raw.has_own_engine().then(|| LocalModel {
        table: ModelTable::Model,
        source: raw.model.source.as_deref().unwrap_or(DEFAULT_MODEL),
        engine: &raw.model.engine,
        name: raw.model.name.as_ref(),
        aliases: &raw.model.aliases,
        has_decode_nodes: !raw.model.decode.is_empty(),
        path: None,
        problems: Vec::new(),
    });
    let models = raw.models.iter().enumerate().map(|(i, own)| LocalModel {
        table: ModelTable::Models(i),
        source: &own.source,
        engine: &own.engine,
        name: own.name.as_ref(),
        aliases: &own.aliases,
        has_decode_nodes: false,
        path: None,
        problems: Vec::new(),
    });
    // An empty source is reported elsewhere.
    let names_one = |named: &LocalModel| !named.kind().needs_file() || !named.source.trim().is_empty();
    let mut named: Vec<LocalModel> = model.into_iter().chain(models).filter(names_one).collect();
    named.iter_mut().for_each(LocalModel::open_files);
    stores::refuse_two_budgets(&mut named);
    let over_budget = check_memory_of_all(raw, &mut named);
    // Without an own engine, the names of [model] are those of the nodes' model.
    let of_nodes = if raw.has_own_engine() { None } else { Some(&raw.model) };
    let of_nodes = of_nodes.into_iter().flat_map(|model| model.name.iter().chain(&model.aliases)).cloned();
    refuse_shared_names(&mut named, of_nodes.collect());
    over_budget.into_iter().chain(named.into_iter().flat_map(|named| named.problems)).collect()
}

/// Checks the models that are loaded on demand against the budget, less what `[model]` always holds.
fn check_memory_of_all(raw: &RawConfig, named: &mut [LocalModel]) -> Option<ConfigProblem> {
    let is_sound = |own: &&LocalModel| own.problems.is_empty() && engine_options::problems(own.engine).is_empty();
    let always_loaded = named.iter().filter(is_sound).find(|named| named.table == ModelTable::Model);
    let always_loaded = always_loaded.filter(|_| !raw.models.is_empty()).map(LocalModel::as_ref);
    match limits(&raw.loading.typed(), always_loaded) {
        Ok(limits) => {
            named
                .iter_mut()
                .filter(|named| named.table != ModelTable::Model)
                .for_each(|named| named.check_memory(&limits));
            None
        }
        Err(CommandFailure(error)) => Some(ConfigProblem {
            key: "model.source".to_owned(),
            flag: "--model".to_owned(),
            message: format!("is refused: {error}"),
        }),
    }
}

/// Adds a problem for each model whose file gives it a name that another model has. Configured names that are used twice
/// are reported elsewhere.
fn refuse_shared_names(named: &mut [LocalModel], mut taken: Vec<String>) {
    let mut by_file: Vec<String> = Vec::new();
    for one in named {
        let all = one.names();
        let of_its_file = one.names_of_its_file();
        let is_in = |names: &[String], name: &String| names.iter().any(|other| model_name::are_same(other, name));
        let twice = all.iter().find(|name| is_in(&by_file, name) || (is_in(&of_its_file, name) && is_in(&taken, name)));
        if let Some(twice) = twice {
            one.problem(
                FileKey::Source,
                format!("is called {twice:?}, and so is another model: give one of them another 'name'"),
            );
        }
        taken.extend(all);
        by_file.extend(of_its_file);
    }
}

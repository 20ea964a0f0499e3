//! The options of an engine in the endpoint: as flags, and what is wrong with them. [`baton_engines::engine_options`]
//! declares them, for the keys of the configuration file, too.

mod flags;
#[cfg(test)]
mod page;
mod problems;
pub mod workers;

use std::path::Path;

use baton_engines::engine_options::{DECLARED, WrittenOptions};
use baton_model::options::LoraFile;

pub use self::flags::{EngineFlags, OPTIONS_FLAG, of_json, to_args};
pub use self::problems::problems;

/// Takes relative paths from this folder.
pub(super) fn resolve(options: &mut WrittenOptions, folder: &Path) {
    DECLARED.iter().filter(|option| !option.is_program).for_each(|option| (option.field.resolve)(options, folder));
    let Some(scaled) = &mut options.lora_scaled else { return };
    if let Ok(file) = LoraFile::parse_scaled(scaled) {
        *scaled = LoraFile { path: folder.join(file.path), ..file }.to_scaled();
    }
}

/// The message for an operator who names a model for an engine that runs none.
pub fn unused_model(is_named: bool, engine: &WrittenOptions) -> Option<String> {
    let kind = engine.engine.filter(|kind| is_named && !kind.needs_file())?;
    Some(format!("the model that --model or source names is not used: the engine {} needs no file", kind.as_str()))
}

/// The options of an engine that others make useless, each with a message that completes `KEY …`.
pub fn remarks(options: &WrittenOptions) -> impl Iterator<Item = (&'static str, &'static str)> {
    let unused_draft = options.draft.is_some() && options.draft_file().is_none();
    unused_draft.then_some(("draft", "is not used, because speculation is off")).into_iter()
}

/// The flag of an option, by its key in the configuration file. Keys of an option's own table have the table's flag.
pub fn flag(key: &str) -> String {
    let key = key.split('.').next().unwrap_or(key);
    format!("--{}", key.replace('_', "-"))
}

#[cfg(test)]
mod tests;

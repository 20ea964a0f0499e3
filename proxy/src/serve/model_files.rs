//! From a model's source to a file on this machine, with progress on standard error.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use baton_engines::engine_options::WrittenOptions;
use baton_engines::registry::EngineKind;
use baton_fetch::environment::PythonEnvironment;
use baton_fetch::in_use::FilesInUse;
use baton_fetch::{self as models, Located, ModelForm, PullOptions, cache, progress};

use super::failure::CommandFailure;

/// Returns the path of the file or the folder of a model for this engine. Fetches it if it is not in the cache.
pub async fn locate_or_pull(source: &str, engine: EngineKind) -> Result<PathBuf, CommandFailure> {
    let form = if engine.runs_folders() { ModelForm::Folder } else { ModelForm::File };
    let options = PullOptions { form, ..pull_options()? };
    match models::locate(source, &options.cache_dir)? {
        Located::File(path) => Ok(path),
        Located::NeedsPull(_) => Ok(models::pull(source, &options).await?),
    }
}

/// The file of a model, if it is on this machine. Errors: the source names a path, and there is no file.
pub fn find(source: &str) -> Result<Option<PathBuf>, CommandFailure> {
    match models::locate(source, &cache::default_folder()?)? {
        Located::File(path) if path.exists() => Ok(Some(path)),
        Located::File(path) => Err(CommandFailure(format!("there is no model file at {}", path.display()))),
        Located::NeedsPull(_) => Ok(None),
    }
}

/// Notes that this process uses the files of an engine's model, as long as the result lives.
pub fn in_use(model: Option<&Path>, engine: &WrittenOptions) -> FilesInUse {
    let (adapter, draft) = (engine.lora_file().map(|lora| lora.path), engine.draft_file());
    let companions = [engine.mmproj.as_deref(), adapter.as_deref(), draft.as_deref()];
    FilesInUse::hold(model.into_iter().chain(companions.into_iter().flatten()))
}

/// The cache folder and the hubs, from the environment; progress is shown on standard error.
pub fn pull_options() -> Result<PullOptions, CommandFailure> {
    Ok(PullOptions::from_env(cache::default_folder()?, Arc::from(progress::to_stderr())))
}

/// The Python environment of the mlx engine, in the cache folder. It may not exist.
pub fn mlx_environment() -> Result<PythonEnvironment, CommandFailure> {
    Ok(PythonEnvironment::new(&cache::default_folder()?, "mlx"))
}

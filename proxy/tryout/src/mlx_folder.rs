//! Makes a folder for the mlx engine from a GGUF file, so that both engines have the same weights.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_engines::mlx::{CONVERTER, REQUIREMENTS};
use baton_fetch::cache;
use baton_model::gguf::Gguf;
use baton_model::hf::ModelFolder;
use baton_proxy::serve::{CommandFailure, mlx_environment};

/// Dequantizing some gigabytes.
const MAX_CONVERSION: Duration = Duration::from_secs(1_800);

/// Writes the folder. Its weights are f32, because MLX computes 16 bits slowly on a processor.
pub async fn convert(file: &Path, folder: &Path) -> Result<(), CommandFailure> {
    Gguf::open(file)?.require_one_file()?;
    let environment = mlx_environment()?;
    if !environment.has(REQUIREMENTS) {
        return Err(CommandFailure("mlx-lm is not installed: run `baton mlx install`".into()));
    }
    let args: [OsString; 3] = [file.into(), folder.into(), "f32".into()];
    Ok(environment.run("the conversion", CONVERTER, args, MAX_CONVERSION).await?)
}

/// The folder that was made of a file in the cache, or is made now.
pub(crate) async fn made_of(file: &Path) -> Result<PathBuf, CommandFailure> {
    let stem = file.file_stem().unwrap_or_default().to_string_lossy();
    // Files of one name may be different models.
    let fingerprint = Gguf::open(file)?.fingerprint(&[])?;
    let weights: String = fingerprint.weights[..6].iter().map(|byte| format!("{byte:02x}")).collect();
    let folder = cache::default_folder()?.join(format!("{stem}-{weights}-f32"));
    if ModelFolder::open(&folder).is_ok() {
        return Ok(folder);
    }
    eprintln!("{} is converted for MLX, once.", file.display());
    // Another process may convert the same file.
    let parent = cache::default_folder()?;
    let made = tempfile::tempdir_in(&parent)?;
    convert(file, made.path()).await?;
    match std::fs::rename(made.path(), &folder) {
        Err(_) if ModelFolder::open(&folder).is_ok() => {}
        renamed => renamed?,
    }
    Ok(folder)
}

//! `baton pull`: fetch a model into the cache.

use std::path::PathBuf;
use std::sync::Arc;

use baton_fetch::{self as models, Located, PullOptions, cache, progress};
use clap::Args;

use super::{Failure, terminal};

/// Options of `baton pull`.
#[derive(Args)]
pub(super) struct PullArgs {
    /// A catalogue name, or OWNER/REPO[:FILE] on the Hugging Face hub
    name: String,
}

/// Fetches the model and prints its path.
pub(super) async fn run(args: PullArgs) -> Result<(), Failure> {
    let path = models::pull(&args.name, &options()?).await?;
    Ok(terminal::print_line(path.display())?)
}

/// The file of a model, fetched if it is not in the cache.
pub(super) async fn model_file(source: &str) -> Result<PathBuf, Failure> {
    let options = options()?;
    match models::locate(source, &options.cache_dir)? {
        Located::File(path) => Ok(path),
        Located::NeedsPull(_) => Ok(models::pull(source, &options).await?),
    }
}

/// Where models are kept and how they are fetched, with progress for the person at the terminal.
pub(super) fn options() -> Result<PullOptions, Failure> {
    Ok(PullOptions::from_env(cache::default_folder()?, Arc::from(progress::to_stderr())))
}

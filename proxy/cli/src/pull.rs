//! `baton pull`: fetch a model into the cache.

use baton_fetch as models;
use baton_proxy::serve::{CommandFailure, model_files};
use clap::Args;

use super::terminal;

/// Options of `baton pull`.
#[derive(Args)]
pub(super) struct PullArgs {
    /// A catalogue name, or OWNER/REPO[:FILE] on the Hugging Face hub
    name: String,
}

/// Fetches the model and prints its path.
pub(super) async fn run(args: PullArgs) -> Result<(), CommandFailure> {
    let path = models::pull(&args.name, &model_files::pull_options()?).await?;
    Ok(terminal::print_line(path.display())?)
}

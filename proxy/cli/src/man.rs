//! `baton man FOLDER`: the manual pages that packages carry.

use std::path::PathBuf;

use baton_proxy::serve::CommandFailure;
use clap::Args;

/// Options of `baton man`.
#[derive(Args)]
pub(super) struct ManArgs {
    /// Where the pages go; it must exist
    folder: PathBuf,
}

/// Writes `baton.1`, and a page for each command that is not hidden, such as `baton-serve.1`.
pub(super) fn run(args: &ManArgs, command: clap::Command) -> Result<(), CommandFailure> {
    let folder = args.folder.display();
    clap_mangen::generate_to(command, &args.folder).map_err(|error| CommandFailure(format!("{folder}: {error}")))
}

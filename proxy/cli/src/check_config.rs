//! `baton check-config`: reports every mistake in a configuration file, and starts nothing.

use std::path::PathBuf;

use baton_proxy::config::ConfigFile;
use baton_proxy::config::transport_args::found_pairing;
use baton_proxy::serve::{CommandFailure, local_problems};
use baton_schemas::node::KEY_VARIABLE;
use clap::Args;

use super::{config_file, terminal};

/// Options of `baton check-config`.
#[derive(Args)]
pub(super) struct CheckConfigArgs {
    /// The file
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// Prints a line for each mistake, `FILE: line N: …`, and fails if there is one.
pub(super) fn run(args: &CheckConfigArgs) -> Result<(), CommandFailure> {
    let file = ConfigFile::read(&args.file)?.with_pairing(found_pairing());
    let more = local_problems(&file.raw);
    let config = file.check(more).map_err(config_file::print_mistakes)?;
    let has_nodes = !config.routing.decode.is_empty() || !config.routing.prefill.is_empty();
    // Not a mistake: the file may be for another machine.
    if has_nodes && config.startup.transport.cluster_key()?.is_none() {
        terminal::note(format_args!(
            "{KEY_VARIABLE} is not set here, and this machine is not paired: `baton serve` needs the one or the other for these nodes"
        ));
    }
    Ok(terminal::print_line(format_args!("{} is fine", args.file.display()))?)
}

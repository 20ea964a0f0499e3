//! `baton check-config`: everything that is wrong with a configuration file, without starting anything.

use std::collections::BTreeSet;
use std::path::PathBuf;

use clap::Args;

use super::{Failure, config_file, machine, terminal};
use crate::config::ConfigFile;

/// Options of `baton check-config`.
#[derive(Args)]
pub(super) struct CheckConfigArgs {
    /// The file
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// Prints a line for each mistake, `FILE: line N: …`, and fails if there is one.
pub(super) fn run(args: &CheckConfigArgs) -> Result<(), Failure> {
    let file = ConfigFile::read(&args.file)?;
    let more = machine::problems(&file.raw);
    file.check(&BTreeSet::new(), more).map_err(config_file::told)?;
    Ok(terminal::print_line(format_args!("{} is fine", args.file.display()))?)
}

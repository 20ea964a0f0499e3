//! `baton check-config`: everything that is wrong with a configuration file, without starting anything.

use std::path::PathBuf;

use clap::Args;

use super::{Failure, own_models, terminal};
use crate::config::{ConfigError, RawConfig};

/// Options of `baton check-config`.
#[derive(Args)]
pub(super) struct CheckConfigArgs {
    /// The file
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// Prints a line for each mistake, `FILE: line N: …`, and fails if there is one.
pub(super) fn run(args: &CheckConfigArgs) -> Result<(), Failure> {
    match RawConfig::read(&args.file).and_then(RawConfig::check) {
        Ok(config) => {
            own_models::check(&config)?;
            Ok(terminal::print_line(format_args!("{} is fine", args.file.display()))?)
        }
        Err(ConfigError::Invalid { path, mistakes }) => {
            for mistake in &mistakes {
                terminal::note(format_args!("{}: {mistake}", path.display()));
            }
            let n = mistakes.len();
            Err(Failure(format!("{} has {n} mistake{}", path.display(), if n == 1 { "" } else { "s" })))
        }
        Err(error) => Err(error.into()),
    }
}

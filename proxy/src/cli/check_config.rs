//! `baton check-config`: everything that is wrong with a configuration file, without starting anything.

use std::path::PathBuf;

use clap::Args;

use super::Failure;
use crate::config::{ConfigError, RawConfig};

/// Options of `baton check-config`.
#[derive(Args)]
pub(super) struct CheckConfigArgs {
    /// The file
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// Prints a line for each mistake, `FILE: line N: …`, and fails if there is one.
#[allow(clippy::print_stdout, reason = "the verdict is what was asked for")]
pub(super) fn run(args: &CheckConfigArgs) -> Result<(), Failure> {
    match RawConfig::read(&args.file).and_then(RawConfig::check) {
        Ok(_) => {
            println!("{} is fine", args.file.display());
            Ok(())
        }
        Err(ConfigError::Invalid { path, mistakes }) => {
            for mistake in &mistakes {
                eprintln!("{}: {mistake}", path.display());
            }
            let n = mistakes.len();
            Err(Failure(format!("{} has {n} mistake{}", path.display(), if n == 1 { "" } else { "s" })))
        }
        Err(error) => Err(error.into()),
    }
}

//! The flags of `baton serve` that set configuration keys. [`RawConfig`] declares them next to the keys.

use std::collections::BTreeSet;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, Error, FromArgMatches};

use super::raw::RawConfig;

/// The flags as given, with the environment variables that stand for some of them.
#[derive(Clone)]
pub struct ConfigFlags(ArgMatches);

impl ConfigFlags {
    /// Overwrites the keys whose flags are given. Errors: a value that is not of its flag's type, which clap has refused.
    pub(super) fn lay_over(&self, raw: &mut RawConfig) -> Result<(), Error> {
        raw.update_from_arg_matches(&self.0)
    }

    /// The flags that are given, as `--NAME`.
    pub(super) fn given(&self) -> BTreeSet<String> {
        let is_given =
            |id| matches!(self.0.value_source(id), Some(ValueSource::CommandLine | ValueSource::EnvVariable));
        let command = RawConfig::augment_args(Command::new(""));
        let given = command.get_arguments().filter(|arg| is_given(arg.get_id().as_str()));
        given.filter_map(|arg| Some(format!("--{}", arg.get_long()?))).collect()
    }
}

/// Shows the names of the given flags. Their values may be secret.
impl std::fmt::Debug for ConfigFlags {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ConfigFlags").field(&self.given()).finish()
    }
}

impl FromArgMatches for ConfigFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        Ok(ConfigFlags(matches.clone()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        self.0 = matches.clone();
        Ok(())
    }
}

impl Args for ConfigFlags {
    fn augment_args(command: Command) -> Command {
        RawConfig::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        RawConfig::augment_args_for_update(command)
    }
}

//! The flags of `baton serve` that set configuration keys. [`RawConfig`] declares them next to the keys.

use std::collections::BTreeSet;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, Error, FromArgMatches};

use super::raw::RawConfig;
use super::written::setting;
use crate::observe::{SettingSource, WrittenSetting};

/// The flags as given, with the environment variables that stand for some of them.
#[derive(Clone)]
pub struct ConfigFlags(ArgMatches);

impl ConfigFlags {
    /// Overwrites the keys whose flags are given. Errors: a value that is not of its flag's type, which clap has refused.
    pub(super) fn lay_over(&self, raw: &mut RawConfig) -> Result<(), Error> {
        raw.update_from_arg_matches(&self.0)
    }

    /// The flags that are given, with their values unless these are secrets, and where they are given.
    pub(super) fn settings(&self) -> Vec<WrittenSetting> {
        let command = RawConfig::augment_args(Command::new(""));
        let given = command.get_arguments().filter_map(|arg| {
            let source = match self.0.value_source(arg.get_id().as_str())? {
                ValueSource::CommandLine => SettingSource::CommandLine,
                ValueSource::EnvVariable => SettingSource::Environment,
                _ => return None,
            };
            // A variable whose value `--help` hides is a secret.
            let raw =
                self.0.try_get_raw(arg.get_id().as_str()).ok().flatten().filter(|_| !arg.is_hide_env_values_set());
            let is_switch = arg.get_num_args().is_some_and(|n| n.max_values() == 0);
            let value = raw.map(|values| match is_switch {
                true => "true".to_owned(),
                false => values.map(|value| value.to_string_lossy()).collect::<Vec<_>>().join(", "),
            });
            Some(setting(format!("--{}", arg.get_long()?), value, source))
        });
        given.collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_shown_with_their_values_but_no_key() {
        let args = ["serve", "--api-key", "very-secret", "--policy", "direct", "--no-calibration"];
        let matches = RawConfig::augment_args(Command::new("serve")).get_matches_from(args);
        let mut shown = ConfigFlags(matches).settings();
        shown.sort_by(|a, b| a.key.cmp(&b.key));
        let shown: Vec<_> = shown.iter().map(|one| (&*one.key, one.value.as_deref(), one.source)).collect();
        let given = SettingSource::CommandLine;
        let expected = [
            ("--api-key", None, given),
            ("--no-calibration", Some("true"), given),
            ("--policy", Some("direct"), given),
        ];
        assert_eq!(shown, expected);
    }
}

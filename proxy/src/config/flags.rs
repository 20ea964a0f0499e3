//! The flags of `baton serve` that set configuration keys. [`RawConfig`] declares them next to the keys.

use std::collections::BTreeSet;

use baton_engines::engine_options::DECLARED;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, Error, FromArgMatches};

use super::raw::RawConfig;
use super::schema::SchemaPlace;
use super::written::{Shown, setting};
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
            let values = self.0.try_get_raw(arg.get_id().as_str()).ok().flatten()?;
            let is_switch = arg.get_num_args().is_some_and(|n| n.max_values() == 0);
            let value = match is_switch {
                true => "true".to_owned(),
                false => values.map(|value| value.to_string_lossy()).collect::<Vec<_>>().join(", "),
            };
            // A variable whose value `--help` hides is a secret.
            let shown = if arg.is_hide_env_values_set() { Shown::Nothing } else { Shown::Value };
            Some(setting(format!("--{}", arg.get_long()?), &value, shown, source))
        });
        given.collect()
    }

    /// The keys of the file whose flags are given: the file's values of these have no effect.
    pub(super) fn overridden(&self) -> Vec<String> {
        let command = RawConfig::augment_args(Command::new(""));
        let given = command.get_arguments().map(|arg| arg.get_id().as_str()).filter(|id| self.is_given(id));
        given.filter_map(key_of_flag).collect()
    }

    fn is_given(&self, id: &str) -> bool {
        matches!(self.0.value_source(id), Some(ValueSource::CommandLine | ValueSource::EnvVariable))
    }

    /// The flags that are given, as `--NAME`.
    pub(super) fn given(&self) -> BTreeSet<String> {
        let command = RawConfig::augment_args(Command::new(""));
        let given = command.get_arguments().filter(|arg| self.is_given(arg.get_id().as_str()));
        given.filter_map(|arg| Some(format!("--{}", arg.get_long()?))).collect()
    }
}

/// The key of the file that an argument sets, by the argument's id, which is the name of its field.
fn key_of_flag(id: &str) -> Option<String> {
    let negated = DECLARED.iter().find(|option| option.negation == Some(id));
    let id = negated.map_or(id, |option| option.key);
    let root = SchemaPlace::root();
    let model = root.key("model")?;
    // Before `model`, which has a table `engine` as the options have `engine`.
    let tables = [("", root), ("model.engine.", model.key("engine")?), ("model.", model)];
    let (table, _) = tables.into_iter().find(|(_, table)| table.key(id).is_some())?;
    Some(format!("{table}{id}"))
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

    #[test]
    fn a_given_flag_is_known_by_its_key_of_the_file() {
        let args = [
            "serve",
            "--listen",
            "127.0.0.1:1",
            "--model",
            "m",
            "--name",
            "n",
            "--ctx-size",
            "64",
            "--adopt-host",
            "h",
        ];
        let matches = RawConfig::augment_args(Command::new("serve")).get_matches_from(args);
        let mut keys = ConfigFlags(matches).overridden();
        keys.sort();
        assert_eq!(keys, ["adopt_hosts", "listen", "model.engine.ctx_size", "model.name", "model.source"]);
        // Every flag has a key, but those for tests and for other commands, which the file does not have.
        let is_flag_only = |id: &str| DECLARED.iter().any(|option| option.key == id && option.is_flag_only());
        let command = RawConfig::augment_args(Command::new("serve"));
        let ids = command.get_arguments().map(|arg| arg.get_id().as_str());
        let without_key: Vec<&str> = ids.filter(|id| key_of_flag(id).is_none() && !is_flag_only(id)).collect();
        assert!(without_key.is_empty(), "{without_key:?}");
        assert_eq!(key_of_flag("no-mmap").as_deref(), Some("model.engine.mmap"));
        assert_eq!(key_of_flag("engine").as_deref(), Some("model.engine.engine"));
    }
}

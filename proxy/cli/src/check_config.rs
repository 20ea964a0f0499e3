//! `baton check-config`: reports every mistake in a configuration file, and starts nothing.

use std::path::{Path, PathBuf};

use baton_proxy::config::transport_args::found_pairing;
use baton_proxy::config::{ConfigFile, ServeConfig};
use baton_proxy::observe::{ChangeEffect, ChangeKind, SettingChange};
use baton_proxy::serve::{CommandFailure, changes_between, local_problems, store_key_problem};
use baton_schemas::node::KEY_VARIABLE;
use baton_schemas::printable::printable;
use clap::Args;

use super::columns::table;
use super::{config_file, terminal};

/// Options of `baton check-config`.
#[derive(Args)]
pub(super) struct CheckConfigArgs {
    /// The file
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// List the keys that FILE sets otherwise than this one, and which of them need a restart
    #[arg(long, value_name = "FILE")]
    against: Option<PathBuf>,
}

/// Prints a line for each mistake, `FILE: line N: …`, and fails if there is one. A key without effect has a line, too.
pub(super) fn run(args: &CheckConfigArgs) -> Result<(), CommandFailure> {
    let file = read(&args.file)?;
    let remarks = file.remarks();
    let config = checked(file)?;
    remarks.iter().for_each(|remark| terminal::note(format_args!("{remark}")));
    let has_nodes = !config.routing.decode.is_empty() || !config.routing.prefill.is_empty();
    // Not a mistake: the file may be for another machine.
    if has_nodes && config.startup.transport.cluster_key()?.is_none() {
        terminal::note(format_args!(
            "{KEY_VARIABLE} is not set here, and this machine is not paired: `baton serve` needs the one or the other for these nodes"
        ));
    }
    terminal::print_line(format_args!("{} is fine", args.file.display()))?;
    let Some(old) = &args.against else { return Ok(()) };
    let changes = changes_between(&checked(read(old)?)?, &config);
    terminal::print(changes_in_words(&changes, old))?;
    Ok(())
}

fn read(file: &Path) -> Result<ConfigFile, CommandFailure> {
    Ok(ConfigFile::read(file)?.with_pairing(found_pairing()))
}

fn checked(file: ConfigFile) -> Result<ServeConfig, CommandFailure> {
    let more = local_problems(&file.raw).into_iter().chain(store_key_problem(&file.raw)).collect();
    file.check(more).map_err(config_file::print_mistakes)
}

fn changes_in_words(changes: &[SettingChange], old: &Path) -> String {
    if changes.is_empty() {
        return format!("It sets what {} sets.\n", old.display());
    }
    let value = |value: &Option<String>, is_set: bool| match value {
        Some(value) => printable(value),
        None if is_set => "(not shown)".to_owned(),
        None => "-".to_owned(),
    };
    let rows = changes.iter().map(|SettingChange { key, kind, before, after, effect }| {
        let before = value(before, *kind != ChangeKind::Added);
        let after = value(after, *kind != ChangeKind::Removed);
        let effect = match effect {
            ChangeEffect::Reload => "after a reload",
            ChangeEffect::Restart => "after a restart",
            ChangeEffect::Overridden => "never: a flag wins",
        };
        vec![printable(key), before, after, effect.to_owned()]
    });
    let heads = ["KEY", "BEFORE", "AFTER", "TAKES EFFECT"];
    format!("Instead of {} it changes:\n{}", old.display(), table(&heads, rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_has_both_values_unless_they_are_secret() {
        let change = |key: &str, kind, before: Option<&str>, after: Option<&str>, effect| SettingChange {
            key: key.into(),
            kind,
            before: before.map(str::to_owned),
            after: after.map(str::to_owned),
            effect,
        };
        let changes = [
            change("listen", ChangeKind::Changed, Some("\"a:1\""), Some("\"b:2\""), ChangeEffect::Restart),
            change("api_keys", ChangeKind::Added, None, None, ChangeEffect::Reload),
            change("max_waiting", ChangeKind::Removed, Some("7"), None, ChangeEffect::Reload),
        ];
        let expected = "Instead of old.toml it changes:\n\
                        \x20 KEY          BEFORE  AFTER        TAKES EFFECT\n\
                        \x20 listen       \"a:1\"   \"b:2\"        after a restart\n\
                        \x20 api_keys     -       (not shown)  after a reload\n\
                        \x20 max_waiting  7       -            after a reload\n";
        assert_eq!(changes_in_words(&changes, Path::new("old.toml")), expected);
        assert_eq!(changes_in_words(&[], Path::new("old.toml")), "It sets what old.toml sets.\n");
    }
}

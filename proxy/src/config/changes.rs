//! The settings that differ between two configurations, for operators. Never a secret.

use std::collections::HashMap;

use super::ServeConfig;
use super::written::MAX_SETTINGS;
use crate::observe::{ChangeEffect, ChangeKind, SettingChange, SettingSource, WrittenSetting};

/// The settings of a configuration that are in force, beside what waits for a restart.
#[derive(Debug, Clone, Default)]
pub struct SettingsInForce(Vec<WrittenSetting>);

impl SettingsInForce {
    /// Those of the start.
    pub fn of(config: &ServeConfig) -> SettingsInForce {
        SettingsInForce(of_file(&config.written).cloned().collect())
    }

    /// After the reload of a configuration, of which these keys wait for a restart.
    pub fn after(&self, new: &ServeConfig, waiting: &[&str]) -> SettingsInForce {
        let waits = |setting: &&WrittenSetting| waiting.iter().any(|key| is_within(&setting.key, key));
        let applied = of_file(&new.written).filter(|setting| !waits(setting));
        let kept = self.0.iter().filter(waits);
        SettingsInForce(applied.chain(kept).cloned().collect())
    }

    /// What differs in a new configuration, of which these keys need a restart: first what it sets, in the order of its file.
    pub fn changes(&self, new: &ServeConfig, restart: &[&str]) -> Vec<SettingChange> {
        let effect = |key: &str| {
            if new.overridden.iter().any(|of_flag| is_within(key, of_flag)) {
                ChangeEffect::Overridden
            } else if restart.iter().any(|waiting| is_within(key, waiting)) {
                ChangeEffect::Restart
            } else {
                ChangeEffect::Reload
            }
        };
        let mut before: HashMap<&str, &WrittenSetting> =
            self.0.iter().map(|setting| (&*setting.key, setting)).collect();
        let mut found = Vec::new();
        for after in of_file(&new.written) {
            let (kind, value) = match before.remove(&*after.key) {
                Some(before) if before.digest == after.digest => continue,
                Some(before) => (ChangeKind::Changed, before.value.clone()),
                None => (ChangeKind::Added, None),
            };
            let (key, effect) = (after.key.clone(), effect(&after.key));
            found.push(SettingChange { key, kind, before: value, after: after.value.clone(), effect });
        }
        for removed in self.0.iter().filter(|setting| before.contains_key(&*setting.key)) {
            let (key, kind, effect) = (removed.key.clone(), ChangeKind::Removed, effect(&removed.key));
            found.push(SettingChange { key, kind, before: removed.value.clone(), after: None, effect });
        }
        // Changes that no key of the file shows, such as a pairing since the start.
        for waiting in restart {
            if !found.iter().any(|change| is_within(&change.key, waiting)) {
                let (key, kind, effect) = ((*waiting).to_owned(), ChangeKind::Changed, ChangeEffect::Restart);
                found.push(SettingChange { key, kind, before: None, after: None, effect });
            }
        }
        found
    }

    /// Returns true if a file has more settings than are compared.
    pub fn is_truncated(&self, new: &ServeConfig) -> bool {
        self.0.len().max(of_file(&new.written).count()) >= MAX_SETTINGS
    }
}

/// The settings of the file. Flags stay what they are until the process ends.
fn of_file(written: &[WrittenSetting]) -> impl Iterator<Item = &WrittenSetting> {
    written.iter().filter(|setting| setting.source == SettingSource::File)
}

/// Returns true for a key, and for the keys of its table or its entries.
fn is_within(key: &str, of: &str) -> bool {
    key.strip_prefix(of).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::ConfigFile;

    fn checked(text: &str) -> ServeConfig {
        ConfigFile::parse(Path::new("/baton.toml"), text.to_owned()).unwrap().check(Vec::new()).unwrap()
    }

    fn shown(changes: &[SettingChange]) -> Vec<String> {
        let words = changes.iter().map(|SettingChange { key, kind, before, after, effect }| {
            format!(
                "{key} {kind:?} {} {} {effect:?}",
                before.as_deref().unwrap_or("-"),
                after.as_deref().unwrap_or("-")
            )
        });
        words.collect()
    }

    const KEY: &str = "[[keys]]\nname = \"anna\"\nhash = \"blake3:1111111111111111111111111111111111111111111111111111111111111111\"\n";

    #[test]
    fn each_key_that_differs_is_named_with_its_values_but_no_secret() {
        let old = format!(
            "max_waiting = 7\nlisten = \"127.0.0.1:1\"\napi_keys = [\"secret-one\"]\n{KEY}tokens_per_day = 5\n[model.engine]\nslots = 2\n"
        );
        let first = "[[keys]]\nname = \"first\"\nhash = \"blake3:2222222222222222222222222222222222222222222222222222222222222222\"\n";
        let new = format!(
            "max_waiting = 8\napi_keys = [\"secret-two\"]\n{first}{}tokens_per_day = 5\noperator = true\n[model.engine]\nslots = 3\n",
            KEY.replace('1', "3")
        );
        let (old, new) = (checked(&old), checked(&new));
        let restart = old.startup.changed_keys(&new.startup);
        assert_eq!(restart, ["listen", "model.engine"]);
        let changes = SettingsInForce::of(&old).changes(&new, &restart);
        let mut found = shown(&changes);
        found.sort();
        let mut expected = [
            "api_keys Changed - - Reload",
            "keys[anna].hash Changed - - Reload",
            "keys[anna].operator Added - true Reload",
            "keys[first].hash Added - - Reload",
            "keys[first].name Added - \"first\" Reload",
            "listen Removed \"127.0.0.1:1\" - Restart",
            "max_waiting Changed 7 8 Reload",
            "model.engine.slots Changed 2 3 Restart",
        ];
        expected.sort_unstable();
        assert_eq!(found, expected);
        assert!(!format!("{changes:?}").contains("secret"));
        assert!(SettingsInForce::of(&old).changes(&old, &[]).is_empty());
    }

    #[test]
    fn what_waits_for_a_restart_stays_a_change_until_then() {
        let (old, new) = (
            checked("max_waiting = 7\nlisten = \"127.0.0.1:1\"\n"),
            checked("max_waiting = 8\nlisten = \"127.0.0.1:2\"\n"),
        );
        let in_force = SettingsInForce::of(&old).after(&new, &["listen"]);
        assert_eq!(
            shown(&in_force.changes(&new, &["listen"])),
            ["listen Changed \"127.0.0.1:1\" \"127.0.0.1:2\" Restart"]
        );
        // Taken back before the restart.
        assert!(in_force.changes(&checked("max_waiting = 8\nlisten = \"127.0.0.1:1\"\n"), &[]).is_empty());
        // Changes that no key of the file shows.
        assert_eq!(shown(&in_force.changes(&new, &["listen", "pairing"]))[1], "pairing Changed - - Restart");
        // A flag wins: the file's value is of no effect.
        let overridden = ServeConfig {
            overridden: vec!["max_waiting".into()],
            ..checked("max_waiting = 9\nlisten = \"127.0.0.1:1\"\n")
        };
        assert_eq!(shown(&in_force.changes(&overridden, &[])), ["max_waiting Changed 8 9 Overridden"]);
    }
}

//! The settings of a file and flags, for operators: keys, values and sources. Never a secret.

use std::collections::HashMap;

use toml::{Table, Value};

use super::schema::{SchemaPlace, Takes};
use crate::observe::{SettingSource, ValueDigest, WrittenSetting};

/// A file with more settings is shown in part.
pub(super) const MAX_SETTINGS: usize = 1_000;

/// The most characters of a value that are shown, and of a name in a key.
const MAX_VALUE_CHARS: usize = 300;
const MAX_NAME_CHARS: usize = 60;

/// The settings of a file without mistakes, in the file's order of keys.
pub(super) fn in_file(text: &str) -> Vec<WrittenSetting> {
    let mut found = Vec::new();
    if let Ok(table) = text.parse::<Table>() {
        add_table(&mut found, "", &table, SchemaPlace::root());
    }
    found.truncate(MAX_SETTINGS);
    found
}

/// Whether a value is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shown {
    Value,
    /// It is a secret, or could be one.
    Nothing,
}

/// A setting with its value cut to what is shown.
pub(super) fn setting(key: String, value: &str, shown: Shown, source: SettingSource) -> WrittenSetting {
    // A URL with a user's password.
    let is_shown = shown == Shown::Value && !(value.contains("://") && value.contains('@'));
    let cut = || match value.char_indices().nth(MAX_VALUE_CHARS) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value.to_owned(),
    };
    WrittenSetting { key, value: is_shown.then(cut), source, digest: ValueDigest::of(value) }
}

fn add_table(found: &mut Vec<WrittenSetting>, at: &str, table: &Table, place: SchemaPlace) {
    for (name, value) in table {
        let key = if at.is_empty() { name.clone() } else { format!("{at}.{name}") };
        add(found, key, value, place.key(name));
    }
}

fn add(found: &mut Vec<WrittenSetting>, key: String, value: &Value, place: Option<SchemaPlace>) {
    if found.len() >= MAX_SETTINGS {
        return;
    }
    let of_file = |key, shown| setting(key, &value.to_string(), shown, SettingSource::File);
    // A key that the schema does not know could be a secret.
    let Some(place) = place else { return found.push(of_file(key, Shown::Nothing)) };
    match (value, place.takes()) {
        // A list such as [[keys]] is a secret in messages, which quote all of it. Each of its keys says for itself whether it is one.
        (Value::Array(items), Takes::List(item))
            if item.keys().next().is_some() && items.iter().all(Value::is_table) =>
        {
            let names = EntryNames::of(items);
            for (at, value) in items.iter().enumerate().take(MAX_SETTINGS) {
                if let Value::Table(table) = value {
                    add_table(found, &format!("{key}[{}]", names.of_entry(at, value)), table, item);
                }
            }
        }
        _ if place.is_secret() => found.push(of_file(key, Shown::Nothing)),
        (Value::Table(table), Takes::Table) => add_table(found, &key, table, place),
        // A table of another form.
        (Value::Table(_), _) => found.push(of_file(key, Shown::Nothing)),
        (Value::Array(items), _) if items.iter().any(Value::is_table) => found.push(of_file(key, Shown::Nothing)),
        _ => found.push(of_file(key, Shown::Value)),
    }
}

/// The labels of a list's entries: their names, so that one more at the beginning does not rename the others.
struct EntryNames<'a>(HashMap<&'a str, usize>);

impl<'a> EntryNames<'a> {
    fn of(items: &'a [Value]) -> EntryNames<'a> {
        let mut counts = HashMap::new();
        for name in items.iter().filter_map(name_of) {
            *counts.entry(name).or_default() += 1;
        }
        EntryNames(counts)
    }

    /// The name of an entry; its place if others have that name, too.
    fn of_entry(&self, at: usize, item: &Value) -> String {
        let is_own = |name: &&str| self.0.get(name) == Some(&1) && name.chars().nth(MAX_NAME_CHARS).is_none();
        name_of(item).filter(is_own).map_or_else(|| at.to_string(), str::to_owned)
    }
}

fn name_of(item: &Value) -> Option<&str> {
    item.get("name")?.as_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_named_as_in_the_file_and_secrets_are_not_shown() {
        let text = "api_keys = [\"very-secret\"]\nlisten = \"0.0.0.0:80\"\n[model.engine]\nslots = 3\n[[models]]\nname = \"a\"\n\
                    source = \"s\"\n[[keys]]\nname = \"guest\"\nhash = \"0123secret\"\nunknown = \"secret\"\ntokens_per_day = 7\n\
                    [[upstream]]\nname = \"u\"\nkey = \"secret-key\"\nurl = \"http://me:secret@host\"\n[upstream.headers]\nx = \"a secret header\"\n";
        let found = in_file(text);
        let shown: Vec<_> = found.iter().filter_map(|one| Some((&*one.key, one.value.as_deref()?))).collect();
        for wanted in [
            ("listen", "\"0.0.0.0:80\""),
            ("model.engine.slots", "3"),
            ("models[a].name", "\"a\""),
            ("keys[guest].tokens_per_day", "7"),
        ] {
            assert!(shown.contains(&wanted), "{wanted:?} in {shown:?}");
        }
        assert!(!format!("{found:?}").contains("secret"), "{found:?}");
        assert!(found.iter().any(|one| one.key == "api_keys" && one.value.is_none()), "{found:?}");
        assert!(found.iter().all(|one| one.source == SettingSource::File));

        let long = in_file(&format!("listen = \"{}\"", "x".repeat(5_000)));
        assert!(long[0].value.as_ref().is_some_and(|value| value.chars().count() <= MAX_VALUE_CHARS + 1));
        let twice = in_file("[[models]]\nname = \"a\"\n[[models]]\nname = \"a\"\n[[models]]\nsource = \"s\"\n");
        let keys: Vec<&str> = twice.iter().map(|one| &*one.key).collect();
        assert_eq!(keys, ["models[0].name", "models[1].name", "models[2].source"]);
        let many: String = (0..5_000).map(|at| format!("[[models]]\nname = \"{at}\"\n")).collect();
        assert_eq!(in_file(&many).len(), MAX_SETTINGS);
    }
}

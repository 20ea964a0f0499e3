//! The settings of a file and flags, for operators: keys, values and sources. Never a secret.

use toml::{Table, Value};

use super::schema::{SchemaPlace, Takes};
use crate::observe::{SettingSource, WrittenSetting};

/// A file with more settings is shown in part.
const MAX_SETTINGS: usize = 1_000;

/// The most characters of a value that are shown.
const MAX_VALUE_CHARS: usize = 300;

/// The settings of a file without mistakes, in the file's order of keys.
pub(super) fn in_file(text: &str) -> Vec<WrittenSetting> {
    let mut found = Vec::new();
    if let Ok(table) = text.parse::<Table>() {
        add_table(&mut found, "", &table, SchemaPlace::root());
    }
    found.truncate(MAX_SETTINGS);
    found
}

/// A setting with its value cut to what is shown.
pub(super) fn setting(key: String, value: Option<String>, source: SettingSource) -> WrittenSetting {
    let cut = |value: String| match value.char_indices().nth(MAX_VALUE_CHARS) {
        Some((end, _)) => format!("{}…", &value[..end]),
        None => value,
    };
    // A URL with a user's password.
    let is_shown = |value: &String| !(value.contains("://") && value.contains('@'));
    WrittenSetting { key, value: value.filter(is_shown).map(cut), source }
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
    // A key that the schema does not know could be a secret.
    let Some(place) = place.filter(|place| !place.is_secret()) else {
        found.push(setting(key, None, SettingSource::File));
        return;
    };
    match (value, place.takes()) {
        (Value::Table(table), Takes::Table) => add_table(found, &key, table, place),
        (Value::Array(items), Takes::List(item)) if items.iter().any(Value::is_table) => {
            for (at, value) in items.iter().enumerate() {
                add(found, format!("{key}[{at}]"), value, Some(item));
            }
        }
        // A table of another form.
        (Value::Table(_), _) => found.push(setting(key, None, SettingSource::File)),
        _ => found.push(setting(key, Some(value.to_string()), SettingSource::File)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_named_as_in_the_file_and_secrets_are_not_shown() {
        let text = "api_keys = [\"very-secret\"]\nlisten = \"0.0.0.0:80\"\n[model.engine]\nslots = 3\n[[models]]\nname = \"a\"\n\
                    source = \"s\"\n[[keys]]\nname = \"guest\"\nsha256 = \"0123secret\"\n\
                    [[upstream]]\nname = \"u\"\nkey = \"secret-key\"\nurl = \"http://me:secret@host\"\n[upstream.headers]\nx = \"a secret header\"\n";
        let found = in_file(text);
        let shown: Vec<_> = found.iter().filter_map(|one| Some((&*one.key, one.value.as_deref()?))).collect();
        for wanted in [("listen", "\"0.0.0.0:80\""), ("model.engine.slots", "3"), ("models[0].name", "\"a\"")] {
            assert!(shown.contains(&wanted), "{wanted:?} in {shown:?}");
        }
        assert!(!format!("{found:?}").contains("secret"), "{found:?}");
        assert!(found.iter().any(|one| one.key == "api_keys" && one.value.is_none()), "{found:?}");
        assert!(found.iter().all(|one| one.source == SettingSource::File));

        let long = in_file(&format!("listen = \"{}\"", "x".repeat(5_000)));
        assert!(long[0].value.as_ref().is_some_and(|value| value.chars().count() <= MAX_VALUE_CHARS + 1));
        let many: String = (0..5_000).map(|at| format!("[[models]]\nname = \"{at}\"\n")).collect();
        assert_eq!(in_file(&many).len(), MAX_SETTINGS);
    }
}

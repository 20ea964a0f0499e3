//! Everything that is wrong with a file at once, each with its line.
//!
//! serde stops at the first mistake. So what it stopped at is taken out of the document, and it is asked again, until
//! nothing is left to complain about.

use std::ops::Range;

use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::hint;
use super::raw::RawConfig;

/// Mistakes that are reported. A file with more of them is no configuration.
const MAX_MISTAKES: usize = 100;

/// A mistake, and the byte where it is.
pub(super) struct Mistake {
    pub(super) at: Option<usize>,
    pub(super) message: String,
    /// Whether it is a value that is not what its key takes, and that was left out for that.
    pub(super) is_of_type: bool,
}

/// Reads what can be read, and says what cannot.
pub(super) fn parse(text: &str) -> (RawConfig, Vec<Mistake>) {
    let (mut root, errors) = DeTable::parse_recoverable(text);
    let mut mistakes: Vec<Mistake> = errors.iter().map(mistake).collect();
    // Of a file that is not TOML, the rest says little.
    if !mistakes.is_empty() {
        return (RawConfig::default(), mistakes);
    }
    while mistakes.len() < MAX_MISTAKES {
        let error = match RawConfig::deserialize(toml::Deserializer::from(root.clone())) {
            Ok(raw) => return (raw, mistakes),
            Err(error) => error,
        };
        let removed = error.span().and_then(|span| remove(root.get_mut(), &span, &mut Vec::new()));
        let unknown = removed.as_ref().and_then(|removed| hint::unknown_key(&removed.path, removed.is_table));
        let is_of_type = unknown.is_none();
        let of_type = || match &removed {
            Some(Removed { path, .. }) => format!("{} {}", path.join("."), told(path, error.message())),
            None => error.message().to_owned(),
        };
        let message = unknown.unwrap_or_else(of_type);
        mistakes.push(Mistake { at: error.span().map(|span| span.start), message, is_of_type });
        if removed.is_none() {
            break;
        }
    }
    if mistakes.len() >= MAX_MISTAKES {
        let message = format!("and more: these are {MAX_MISTAKES} of them");
        mistakes.push(Mistake { at: Some(text.len()), message, is_of_type: false });
    }
    (RawConfig::default(), mistakes)
}

/// What serde says of a value, in the words of who wrote it, and without the value if it is a text, or may be a secret:
/// this goes to logs.
fn told(path: &[String], message: &str) -> String {
    let is_last_secret = path.last().is_some_and(|key| key.contains("key") || key == "hash");
    let is_secret = is_last_secret || path.iter().any(|key| key == "headers");
    let of_type = message.strip_prefix("invalid type: ").or_else(|| message.strip_prefix("invalid value: "));
    match of_type.and_then(|of_type| of_type.rsplit_once(", expected ")) {
        Some((found, expected)) => format!("must be {}, and is {}", wanted(expected), found_value(found, is_secret)),
        None if is_secret => "is not what it has to be".to_owned(),
        None => message.to_owned(),
    }
}

/// What serde calls a type, as people do.
fn wanted(expected: &str) -> &str {
    match expected {
        "u8" => "a whole number from 0 to 255",
        "u32" => "a whole number from 0 to 4294967295",
        "u16" | "u64" | "usize" => "a whole number from 0",
        "a nonzero u32" => "a whole number from 1",
        "f32" | "f64" => "a number",
        "a string" | "path string" => "a text",
        "a boolean" => "true or false",
        "a sequence" => "a list",
        "a map" => "a table",
        _ if expected.starts_with("struct ") => "a table",
        _ => expected,
    }
}

/// What serde found, as people would call it.
fn found_value(found: &str, is_secret: bool) -> &str {
    let value = found.split('`').nth(1);
    match (found.split(' ').next(), value) {
        (Some("string"), _) => "a text",
        (Some("sequence"), _) => "a list",
        (Some("map"), _) => "a table",
        (_, Some(value)) if !is_secret => value,
        (Some("integer" | "floating"), _) => "a number",
        _ => "something else",
    }
}

fn mistake(error: &toml::de::Error) -> Mistake {
    Mistake { at: error.span().map(|span| span.start), message: error.message().to_owned(), is_of_type: false }
}

/// What was taken out of the document.
struct Removed {
    path: Vec<String>,
    is_table: bool,
}

/// Removes the key that is, or whose value is, at these bytes.
fn remove(table: &mut DeTable<'_>, at: &Range<usize>, path: &mut Vec<String>) -> Option<Removed> {
    let is_at = |span: Range<usize>| span.contains(&at.start);
    let mut found = None;
    for (key, value) in table.iter_mut() {
        path.push(key.get_ref().to_string());
        if is_at(key.span()) {
            found = Some((key.get_ref().to_string(), path.clone()));
        } else if let Some(inner) = remove_inside(value, at, path) {
            return Some(inner);
        } else if is_at(value.span()) {
            found = Some((key.get_ref().to_string(), path.clone()));
        }
        path.pop();
        if found.is_some() {
            break;
        }
    }
    let (key, path) = found?;
    let value = table.remove(key.as_str())?;
    Some(Removed { path, is_table: is_table(value.get_ref()) })
}

/// Whether it is a table, or several of the same name.
fn is_table(value: &DeValue<'_>) -> bool {
    match value {
        DeValue::Table(_) => true,
        DeValue::Array(values) => values.iter().next().is_some_and(|first| is_table(first.get_ref())),
        _ => false,
    }
}

/// The same in a value's own tables.
fn remove_inside(value: &mut Spanned<DeValue<'_>>, at: &Range<usize>, path: &mut Vec<String>) -> Option<Removed> {
    match value.get_mut() {
        DeValue::Table(table) => remove(table, at, path),
        DeValue::Array(values) => values.iter_mut().find_map(|value| remove_inside(value, at, path)),
        _ => None,
    }
}

/// The byte at which the value of a key begins.
pub(super) fn position(text: &str, key: &str) -> Option<usize> {
    let root = DeTable::parse(text).ok()?;
    let mut table = root.get_ref();
    let mut at = None;
    for part in key.split('.') {
        let (name, index) = part.strip_suffix(']').and_then(|part| part.split_once('[')).unzip();
        // A key that is missing is missed where its table begins.
        let Some(value) = table.get(name.unwrap_or(part)) else { return at };
        let value = match index.and_then(|index| index.parse::<usize>().ok()) {
            Some(index) => value.get_ref().as_array()?.get(index)?,
            None => value,
        };
        at = Some(value.span().start);
        match value.get_ref() {
            DeValue::Table(inner) => table = inner,
            _ => return at,
        }
    }
    at
}

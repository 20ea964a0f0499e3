//! Everything that is wrong with a file at once, each with its line.
//!
//! serde stops at the first mistake. So what it stopped at is taken out of the document, and it is asked again, until
//! nothing is left to complain about.

use std::ops::Range;

use baton_schemas::sampling_fields::SamplingFields;
use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::keys::RawKey;
use super::own_models::{RawLoading, RawOwnModel};
use super::raw::{RawConfig, RawDeadlines, RawModel, RawTracing};
use super::upstream::RawUpstream;
use crate::engine_args::EngineArgs;

/// Mistakes that are reported. A file with more of them is no configuration.
const MAX_MISTAKES: usize = 100;

/// Names at least this alike (Jaro–Winkler) are probably misspellings of each other.
const ALIKE: f64 = 0.8;

/// A mistake, and the byte where it is.
pub(super) struct Mistake {
    pub(super) at: Option<usize>,
    pub(super) message: String,
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
        let message = removed.as_ref().map_or_else(
            || error.message().to_owned(),
            |path| unknown_key(path).unwrap_or_else(|| format!("{}: {}", path.join("."), told(path, error.message()))),
        );
        mistakes.push(Mistake { at: error.span().map(|span| span.start), message });
        if removed.is_none() {
            break;
        }
    }
    (RawConfig::default(), mistakes)
}

/// What serde says of a value, without the value where it may be a secret: this goes to logs.
fn told(path: &[String], message: &str) -> String {
    let is_secret = path.iter().any(|key| key.contains("key") || key == "headers");
    match message.rsplit_once(", expected ") {
        Some((_, expected)) if is_secret => format!("is not what it has to be: {expected}"),
        None if is_secret => "is not what it has to be".to_owned(),
        _ => message.to_owned(),
    }
}

fn mistake(error: &toml::de::Error) -> Mistake {
    Mistake { at: error.span().map(|span| span.start), message: error.message().to_owned() }
}

/// Removes the key that is, or whose value is, at these bytes. Returns its path.
fn remove(table: &mut DeTable<'_>, at: &Range<usize>, path: &mut Vec<String>) -> Option<Vec<String>> {
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
    table.remove(key.as_str())?;
    Some(path)
}

/// The same in a value's own tables.
fn remove_inside(value: &mut Spanned<DeValue<'_>>, at: &Range<usize>, path: &mut Vec<String>) -> Option<Vec<String>> {
    match value.get_mut() {
        DeValue::Table(table) => remove(table, at, path),
        DeValue::Array(values) => values.iter_mut().find_map(|value| remove_inside(value, at, path)),
        _ => None,
    }
}

/// What to say of a key if there is none of this name in its table.
fn unknown_key(path: &[String]) -> Option<String> {
    let (name, tables) = path.split_last()?;
    let tables: Vec<&str> = tables.iter().map(String::as_str).collect();
    let known = match tables[..] {
        [] => fields_of::<RawConfig>(),
        ["model"] => fields_of::<RawModel>(),
        ["model" | "models", "engine"] => fields_of::<EngineArgs>(),
        ["model" | "models", "sampling"] => fields_of::<SamplingFields>(),
        ["models"] => fields_of::<RawOwnModel>(),
        ["loading"] => fields_of::<RawLoading>(),
        ["deadlines"] => fields_of::<RawDeadlines>(),
        ["tracing"] => fields_of::<RawTracing>(),
        ["keys"] => fields_of::<RawKey>(),
        ["upstream"] => fields_of::<RawUpstream>(),
        _ => return None,
    };
    if known.contains(&name.as_str()) {
        return None;
    }
    let likeness = |field: &&&str| strsim::jaro_winkler(name, field);
    let nearest =
        known.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b))).filter(|near| likeness(near) >= ALIKE);
    Some(match nearest {
        Some(near) => format!("unknown key {name:?}; did you mean {near:?}?"),
        None => format!("unknown key {name:?}; there are {}", known.join(", ")),
    })
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

/// The names of a struct's fields, as serde knows them.
fn fields_of<T: for<'de> Deserialize<'de>>() -> &'static [&'static str] {
    let mut fields: &'static [&'static str] = &[];
    // Ends with the error below: all it is for are the fields.
    let _ = T::deserialize(Fields(&mut fields));
    fields
}

/// Asked for a struct, it notes the fields and gives up.
struct Fields<'a>(&'a mut &'static [&'static str]);

impl<'de> Deserializer<'de> for Fields<'_> {
    type Error = de::value::Error;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        *self.0 = fields;
        self.deserialize_any(visitor)
    }

    fn deserialize_any<V: Visitor<'de>>(self, _visitor: V) -> Result<V::Value, Self::Error> {
        Err(de::Error::custom("no value"))
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

//! Every mistake of a file at once, each with its line: unknown keys, values of a wrong type, numbers out of range.
//!
//! serde stops at the first mistake. So the document is first compared with the [`schema`](super::schema): wrong keys and
//! values are reported and removed, and serde reads the rest.

use std::ops::Range;

use serde::Deserialize;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::hint;
use super::raw::RawConfig;
use super::schema::{SchemaPlace, Takes};
use crate::utc_day::UtcDay;

/// The most mistakes that are reported. A file with more of them is no configuration.
const MAX_MISTAKES: usize = 100;

/// A mistake, and the byte where it is.
pub(super) struct Mistake {
    pub(super) at: Option<usize>,
    pub(super) message: String,
    /// True if the value was left out because of its type or range.
    pub(super) is_of_type: bool,
}

/// Reads the valid part of a file, and returns the mistakes in the rest.
pub(super) fn parse(text: &str) -> (RawConfig, Vec<Mistake>) {
    let (mut root, errors) = DeTable::parse_recoverable(text);
    // After a syntax error, further findings would mislead.
    if !errors.is_empty() && is_json(text) {
        let message = "this is JSON, and a configuration is TOML: `key = value` in lines, and tables as [name]. \
                       configs/single-machine.toml has every key"
            .to_owned();
        return (RawConfig::default(), vec![Mistake { at: None, message, is_of_type: false }]);
    }
    if !errors.is_empty() {
        return (RawConfig::default(), errors.iter().map(Mistake::of_parser).collect());
    }
    let mut check = Check { path: Vec::new(), mistakes: Vec::new() };
    check.table(root.get_mut(), SchemaPlace::root());
    let mut mistakes = check.mistakes;
    let raw = RawConfig::deserialize(toml::Deserializer::from(root)).unwrap_or_else(|error| {
        mistakes.push(Mistake::of_parser(&error));
        RawConfig::default()
    });
    if mistakes.len() > MAX_MISTAKES {
        mistakes.truncate(MAX_MISTAKES);
        let message = format!("and more: these are the first {MAX_MISTAKES}");
        mistakes.push(Mistake { at: Some(text.len()), message, is_of_type: false });
    }
    (raw, mistakes)
}

/// Returns true for a text that begins as a JSON object, which TOML never does.
fn is_json(text: &str) -> bool {
    text.trim_start_matches('\u{feff}').trim_start().starts_with('{')
}

impl Mistake {
    fn of_parser(error: &toml::de::Error) -> Mistake {
        let at = error.span().map(|span| span.start);
        Mistake { at, message: error.message().to_owned(), is_of_type: false }
    }
}

/// A key on the way from the top of the file.
struct KeyStep {
    key: String,
    /// The place in its list.
    index: Option<usize>,
    /// Its value may be a secret.
    is_secret: bool,
}

struct Check {
    path: Vec<KeyStep>,
    mistakes: Vec<Mistake>,
}

/// The most characters of a wrong word that a message repeats.
const MAX_SHOWN_CHARS: usize = 40;

/// Why a value is a mistake.
enum Wrong {
    Type {
        expected: String,
    },
    /// A string that is none of the words that belong here.
    Word {
        expected: String,
        found: String,
    },
    Range {
        least: f64,
        most: f64,
    },
}

impl Check {
    /// Reports the mistakes in a table and removes their keys.
    fn table(&mut self, table: &mut DeTable<'_>, place: SchemaPlace) {
        let mut wrong = Vec::new();
        for (key, value) in table.iter_mut() {
            let name = key.get_ref().to_string();
            let known = place.key(&name);
            let is_secret = place.is_secret() || known.is_some_and(SchemaPlace::is_secret);
            self.path.push(KeyStep { key: name.clone(), index: None, is_secret });
            let is_fine = match known {
                Some(place) => self.value(value, place),
                None => {
                    self.unknown(&key.span(), is_table(value.get_ref()));
                    false
                }
            };
            self.path.pop();
            if !is_fine {
                wrong.push(name);
            }
        }
        for name in wrong {
            table.remove(name.as_str());
        }
    }

    /// Reports the mistakes in a value. Returns false if the value itself is one.
    fn value(&mut self, value: &mut Spanned<DeValue<'_>>, place: SchemaPlace) -> bool {
        let span = value.span();
        match (value.get_mut(), place.takes()) {
            (DeValue::Table(table), Takes::Table) => {
                self.table(table, place);
                true
            }
            (DeValue::Array(values), Takes::List(item)) => {
                for (index, value) in values.iter_mut().enumerate() {
                    if let Some(step) = self.path.last_mut() {
                        step.index = Some(index);
                    }
                    if !self.value(value, item) {
                        return false;
                    }
                }
                true
            }
            (value, _) => match compare(value, place) {
                Ok(()) => true,
                Err(wrong) => {
                    self.wrong(&span, value, &wrong);
                    false
                }
            },
        }
    }

    fn unknown(&mut self, span: &Range<usize>, is_table: bool) {
        let path: Vec<&str> = self.path.iter().map(|step| step.key.as_str()).collect();
        let message = hint::unknown_key(&path, is_table);
        self.mistakes.push(Mistake { at: Some(span.start), message, is_of_type: false });
    }

    /// Reports a wrong value. The message goes to logs, so it repeats a text only if a few words are
    /// allowed, and no value that may be a secret.
    fn wrong(&mut self, span: &Range<usize>, value: &DeValue<'_>, wrong: &Wrong) {
        let at = Some(span.start);
        let with_index = |step: &KeyStep| match step.index {
            Some(index) => format!("{}[{index}]", step.key),
            None => step.key.clone(),
        };
        let path = self.path.iter().map(with_index).collect::<Vec<_>>().join(".");
        let is_secret = self.path.last().is_some_and(|step| step.is_secret);
        let message = match wrong {
            Wrong::Type { expected } => format!("{path} must be {expected} but is {}", found(value, is_secret)),
            Wrong::Word { expected, .. } if is_secret => format!("{path} must be {expected}"),
            Wrong::Word { expected, found } => format!("{path} must be {expected}, not {found:?}"),
            Wrong::Range { least, most } if *most == f64::INFINITY => format!("{path} must be at least {least}"),
            Wrong::Range { least, most } => format!("{path} must be between {least} and {most}"),
        };
        self.mistakes.push(Mistake { at, message, is_of_type: true });
    }
}

/// Compares a value that is neither a table nor a list where one belongs. A whole number may stand for any number.
fn compare(value: &DeValue<'_>, place: SchemaPlace) -> Result<(), Wrong> {
    let expected = || Wrong::Type { expected: place.expected() };
    let number = match (place.takes(), value) {
        (Takes::Text, DeValue::String(_)) | (Takes::Boolean, DeValue::Boolean(_)) => return Ok(()),
        (Takes::Day, DeValue::Datetime(day)) if day.time.is_none() => return Ok(()),
        (Takes::Day, DeValue::String(text)) if text.parse::<UtcDay>().is_ok() => return Ok(()),
        (Takes::OneOf(words), DeValue::String(text)) if words.contains(&text.as_ref()) => return Ok(()),
        (Takes::OneOf(_), DeValue::String(text)) => {
            return Err(Wrong::Word {
                expected: place.expected(),
                found: text.chars().take(MAX_SHOWN_CHARS).collect(),
            });
        }
        (Takes::AnyOf(forms), value) => {
            let results: Vec<_> = forms.into_iter().map(|form| compare(value, form)).collect();
            if results.iter().any(Result::is_ok) {
                return Ok(());
            }
            // One form takes words; the message names the others, too.
            let word = results.into_iter().find_map(|result| match result {
                Err(Wrong::Word { found, .. }) => Some(Wrong::Word { expected: place.expected(), found }),
                _ => None,
            });
            return Err(word.unwrap_or_else(expected));
        }
        (Takes::WholeNumber, DeValue::Integer(integer)) => {
            let number = i64::from_str_radix(integer.as_str(), integer.radix()).map_err(|_| expected())?;
            let number = number as f64;
            let (least, most) = place.type_range();
            if !(least..=most).contains(&number) {
                return Err(expected());
            }
            number
        }
        (Takes::Number, DeValue::Integer(integer)) => {
            i64::from_str_radix(integer.as_str(), integer.radix()).map_err(|_| expected())? as f64
        }
        (Takes::Number, DeValue::Float(float)) => float.as_str().parse().map_err(|_| expected())?,
        _ => return Err(expected()),
    };
    let (least, most) = place.range();
    if (least..=most).contains(&number) || (least, most) == (f64::NEG_INFINITY, f64::INFINITY) {
        return Ok(());
    }
    Err(Wrong::Range { least, most })
}

fn found<'a>(value: &'a DeValue<'_>, is_secret: bool) -> &'a str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
        DeValue::Integer(_) | DeValue::Float(_) if is_secret => "a number",
        DeValue::Integer(number) => number.as_str(),
        DeValue::Float(number) => number.as_str(),
        DeValue::Boolean(true) if !is_secret => "true",
        DeValue::Boolean(false) if !is_secret => "false",
        DeValue::Boolean(_) | DeValue::Datetime(_) => "something else",
    }
}

/// Returns true if it is a table, or several of the same name.
fn is_table(value: &DeValue<'_>) -> bool {
    match value {
        DeValue::Table(_) => true,
        DeValue::Array(values) => values.iter().next().is_some_and(|first| is_table(first.get_ref())),
        _ => false,
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

//! Integers of more than 64 bits in the arguments of earlier calls.
//!
//! A [`Value`] keeps them only as floats. So a call in a message lists them under a key of its own: where each stands in the call,
//! and its digits. Prompts and upstreams get the call with these digits, and without the list.

use std::collections::HashMap;

use serde::ser::{SerializeMap, SerializeSeq};
use serde::{Serialize, Serializer};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::notes;

/// The key of the list in a call.
const KEY: &str = "long_integers";

/// The most integers of a call that keep their digits.
const MAX_LISTED: usize = 64;

/// The most bytes of the keys that lead to one.
const MAX_PLACE_BYTES: usize = 1 << 10;

/// Adds the list of a call whose arguments are written as `json`, if that has such integers.
pub(crate) fn list(call: &mut Map<String, Value>, json: &str) {
    if !notes::has_long_integer(json.as_bytes()) {
        return;
    }
    let mut search = DigitSearch { place: ["function", "arguments"].map(String::from).into(), found: Vec::new() };
    if serde_json::from_str(json).map(|whole| search.find(whole)).is_err() || search.found.len() > MAX_LISTED {
        notes::rounded();
    }
    search.found.truncate(MAX_LISTED);
    call.insert(KEY.to_owned(), search.found.into());
}

struct DigitSearch {
    place: Vec<String>,
    found: Vec<Value>,
}

impl DigitSearch {
    fn find(&mut self, value: &RawValue) {
        let json = value.get();
        if self.found.len() > MAX_LISTED {
            return;
        }
        if let Ok(items) = serde_json::from_str::<Vec<&RawValue>>(json) {
            items.into_iter().enumerate().for_each(|(i, item)| self.find_at(i.to_string(), item));
        } else if let Ok(fields) = serde_json::from_str::<HashMap<String, &RawValue>>(json) {
            fields.into_iter().for_each(|(key, field)| self.find_at(key, field));
        } else if notes::has_long_integer(json.as_bytes()) {
            let n_bytes: usize = self.place.iter().map(String::len).sum();
            match json.parse::<i128>().is_ok() && n_bytes <= MAX_PLACE_BYTES {
                true => self.found.push(json!([self.place, json])),
                false => notes::rounded(),
            }
        }
    }

    fn find_at(&mut self, key: String, value: &RawValue) {
        self.place.push(key);
        self.find(value);
        self.place.pop();
    }
}

/// Returns the arguments of a call as JSON; `null` if it has none.
pub fn arguments_text(call: &Value) -> String {
    let whole = ExactCall(call).whole();
    let arguments = whole.inside("function").unwrap_or(whole).inside("arguments");
    arguments.and_then(|arguments| serde_json::to_string(&arguments).ok()).unwrap_or_else(|| "null".to_owned())
}

/// A call, or another value that may be one, with the integers as they were written.
pub struct ExactCall<'v>(pub &'v Value);

impl<'v> ExactCall<'v> {
    fn whole(&self) -> Exact<'v> {
        let listed = self.0.get(KEY).and_then(Value::as_array).into_iter().flatten();
        let long = listed.filter_map(|one| Some((one[0].as_array()?.as_slice(), one[1].as_str()?)));
        Exact { value: self.0, long: long.collect() }
    }
}

impl Serialize for ExactCall<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let whole = self.whole();
        let Some(fields) = self.0.as_object().filter(|_| !whole.long.is_empty()) else {
            return self.0.serialize(serializer);
        };
        let mut map = serializer.serialize_map(None)?;
        for key in fields.keys().filter(|key| *key != KEY) {
            map.serialize_entry(key, &whole.inside(key))?;
        }
        map.end()
    }
}

struct Exact<'v> {
    value: &'v Value,
    /// Where each long integer stands in it, and its digits.
    long: Vec<(&'v [Value], &'v str)>,
}

impl<'v> Exact<'v> {
    fn inside(&self, key: &str) -> Option<Exact<'v>> {
        let value = match self.value {
            Value::Array(items) => items.get(key.parse::<usize>().ok()?),
            value => value.get(key),
        };
        let inside = self.long.iter().filter_map(|(place, digits)| match place {
            [first, rest @ ..] if first == key => Some((rest, *digits)),
            _ => None,
        });
        Some(Exact { value: value?, long: inside.collect() })
    }
}

impl Serialize for Exact<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.long.is_empty() {
            return self.value.serialize(serializer);
        }
        match self.value {
            Value::Array(items) => {
                let mut list = serializer.serialize_seq(Some(items.len()))?;
                for i in 0..items.len() {
                    list.serialize_element(&self.inside(&i.to_string()))?;
                }
                list.end()
            }
            Value::Object(fields) => {
                let mut map = serializer.serialize_map(None)?;
                for key in fields.keys() {
                    map.serialize_entry(key, &self.inside(key))?;
                }
                map.end()
            }
            value => match self.long.iter().find_map(|(_, digits)| digits.parse::<i128>().ok()) {
                Some(integer) if value.is_number() => serializer.serialize_i128(integer),
                _ => value.serialize(serializer),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_integers_of_arguments_keep_their_digits() {
        for arguments in [
            r#"{"id":12345678901234567890123}"#,
            r#"{"a":[1,{"b/c":-12345678901234567890123},"12345678901234567890123"],"d":18446744073709551616}"#,
            r#"{"id":5,"long_integers":[0.5,20000000000000000000]}"#,
            r#"{"id":18446744073709551615}"#,
        ] {
            let value: Value = serde_json::from_str(arguments).unwrap();
            let mut call = Map::new();
            call.insert("function".to_owned(), json!({ "name": "f", "arguments": value }));
            list(&mut call, arguments);
            let call = Value::Object(call);
            assert_eq!(arguments_text(&call), arguments);
            let whole = serde_json::to_string(&ExactCall(&call)).unwrap();
            assert_eq!(whole, format!(r#"{{"function":{{"name":"f","arguments":{arguments}}}}}"#));
        }
    }
}

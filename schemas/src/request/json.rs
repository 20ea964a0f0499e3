//! A client's bytes → a JSON object, or a 400 that says why not.
//!
//! Duplicate keys are refused: two parsers that disagree on which one counts (a gateway that checks `model` in front
//! of us, say) are a way around the first. Depth is bounded by serde_json's own recursion limit of 128.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::invalid::InvalidRequest;

/// Reads one JSON object and nothing after it.
pub(crate) fn read_object(body: &[u8]) -> Result<Map<String, Value>, InvalidRequest> {
    // PowerShell and some editors write a byte-order mark in front of a file that `curl -d @file` then sends.
    let body = body.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(body);
    if body.trim_ascii().is_empty() {
        return Err(InvalidRequest::body("The request body is empty; it must be a JSON object."));
    }
    let mut reader = serde_json::Deserializer::from_slice(body);
    let value = Strict
        .deserialize(&mut reader)
        .and_then(|value| reader.end().map(|()| value))
        .map_err(|error| InvalidRequest::body(format!("The request body is not valid JSON: {error}.")))?;
    match value {
        Value::Object(object) => Ok(object),
        other => Err(InvalidRequest::body(format!(
            "The request body must be a JSON object, but is {}.",
            super::fields::kind(&other)
        ))),
    }
}

/// Builds a [`Value`] and refuses what `Value` itself would silently overwrite.
struct Strict;

impl<'de> DeserializeSeed<'de> for Strict {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut array = Vec::new();
        while let Some(item) = items.next_element_seed(Strict)? {
            array.push(item);
        }
        Ok(Value::Array(array))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            if object.contains_key(&key) {
                return Err(A::Error::custom(format_args!("duplicate key \"{}\"", key.escape_debug())));
            }
            let value = entries.next_value_seed(Strict)?;
            object.insert(key, value);
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `expected` is a part of the message, or the object itself.
    fn check(body: &[u8], expected: Result<Value, &str>) {
        match (read_object(body), expected) {
            (Ok(object), Ok(expected)) => assert_eq!(Value::Object(object), expected),
            (Err(error), Err(part)) => assert!(error.message.contains(part), "{}", error.message),
            (got, expected) => panic!("{got:?} instead of {expected:?}"),
        }
    }

    #[test]
    fn only_one_whole_sound_object_is_read() {
        check(
            br#"{"a":[1,-2,2.5,null,true,"x"],"b":{}}"#,
            Ok(serde_json::json!({"a":[1,-2,2.5,null,true,"x"],"b":{}})),
        );
        check(b"\xEF\xBB\xBF {}\n", Ok(serde_json::json!({})));
        check(b"", Err("empty"));
        check(b" \n", Err("empty"));
        check(b"[]", Err("is an array"));
        check(b"{", Err("EOF"));
        check(b"{} {}", Err("trailing"));
        check(br#"{"a":NaN}"#, Err("expected value"));
        check(br#"{"a":-Infinity}"#, Err("invalid number"));
        check(br#"{"a":1e999}"#, Err("number out of range"));
        check(b"{\"a\":\"\xFF\"}", Err("unicode"));
        check(b"\xFF\xFE{\0}\0", Err("expected value"));
        check(br#"{"a":"\ud83d"}"#, Err("hex escape"));
        check(br#"{"model":"x","model":"y"}"#, Err("duplicate key \"model\""));
        check(br#"{"a":{"b":1,"b":1}}"#, Err("duplicate key \"b\""));
        check("[".repeat(100_000).as_bytes(), Err("recursion limit"));
        check(format!("{{\"a\":{}", "{\"a\":".repeat(100_000)).as_bytes(), Err("recursion limit"));
    }
}

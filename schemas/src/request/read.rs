//! JSON → typed values, directly from the bytes.
//!
//! Only invalid JSON stops the reading. A value of the wrong type or out of range becomes a [`ValueProblem`], and the
//! rest of the body is read. The check of the body then reports the first problem with the field's full path. serde's
//! own errors are text and cannot carry that path. Values of undeclared fields are skipped, not built.
//!
//! The memory of what is built is bounded: see [`room`](super::room).
//!
//! Duplicate keys are refused, even in skipped values. If a gateway in front of this server used the first `model` and
//! this server the last, a client could bypass the gateway's check. serde_json limits the depth to 128.

use std::collections::HashSet;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use super::invalid::{InvalidRequest, quoted};
use super::room;
use crate::written_number;

/// A value, or the problem with it.
pub(crate) type Reading<T> = Result<T, ValueProblem>;

/// A problem with a value. The caller adds the path of the field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ValueProblem {
    /// The value has the wrong type.
    Type { expected: &'static str, is: &'static str },
    /// The type is right and the value is wrong. The text continues a sentence that starts with the field.
    Value(String),
}

impl fmt::Display for ValueProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ValueProblem::Type { expected, is } => write!(f, "must be {expected}, but is {is}"),
            ValueProblem::Value(problem) => f.write_str(problem),
        }
    }
}

impl ValueProblem {
    pub(crate) fn value(problem: impl Into<String>) -> Self {
        ValueProblem::Value(problem.into())
    }
}

/// A type that is read from JSON. There is a method for each JSON type; an implementation overrides those it accepts.
pub(crate) trait Read: Sized {
    /// The expected type with its article, for error messages.
    const EXPECTED: &'static str;

    /// The bytes that a value takes in memory, apart from its text. A type whose values are not kept takes none.
    const ROOM: usize = size_of::<Reading<Self>>() + room::ALLOCATION;

    /// Refuses a body without the required field with this path.
    fn missing(field: String) -> InvalidRequest {
        InvalidRequest::missing(field, "")
    }

    /// Creates the problem with a value of another type. `is` is that type with its article.
    fn wrong(is: &'static str) -> ValueProblem {
        ValueProblem::Type { expected: Self::EXPECTED, is }
    }

    fn null() -> Reading<Self> {
        Err(Self::wrong("null"))
    }

    fn boolean(_: bool) -> Reading<Self> {
        Err(Self::wrong("a boolean"))
    }

    fn number(_: &Number) -> Reading<Self> {
        Err(Self::wrong("a number"))
    }

    /// Reads a number that 64 bits do not hold: as the nearest float, if that is finite.
    fn long_number(text: &str) -> Reading<Self> {
        let nearest = text.parse().ok().and_then(Number::from_f64);
        nearest.map_or_else(|| Err(ValueProblem::value("is a number out of range")), |number| Self::number(&number))
    }

    fn string(_: &str) -> Reading<Self> {
        Err(Self::wrong("a string"))
    }

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        each_item(items, |_: Reading<Skipped>| ())?;
        Ok(Err(Self::wrong("an array")))
    }

    fn object<'de, A: MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
        each_field(fields, |_, fields| fields.next_value_seed(JsonReader::<Skipped>::new()).map(drop))?;
        Ok(Err(Self::wrong("an object")))
    }
}

/// Reads a body: one JSON value. Errors: invalid JSON, data after the value, or a value of the wrong type.
pub(crate) fn read<T: Read>(body: &[u8]) -> Result<T, InvalidRequest> {
    // PowerShell and some editors begin files with a byte-order mark, and `curl -d @file` sends it.
    let body = body.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(body);
    if body.trim_ascii().is_empty() {
        return Err(InvalidRequest::body("The request body is empty; it must be a JSON object."));
    }
    let marked = written_number::mark(body)
        .ok_or_else(|| InvalidRequest::body("The request body has too many numbers that 64 bits do not hold."))?;
    let mut json = serde_json::Deserializer::from_slice(&marked.json);
    room::begin();
    let reading = JsonReader::<T>::new()
        .deserialize(&mut json)
        .and_then(|reading| json.end().map(|()| reading))
        .map_err(|error| match room::is_exceeded() {
            true => InvalidRequest::body("The request body has too many values: shorten its longest array or object."),
            false => InvalidRequest::body(format!("The request body is not valid JSON: {error}.")),
        })?;
    reading.map_err(|problem| match problem {
        ValueProblem::Type { is, .. } => {
            InvalidRequest::body(format!("The request body must be a JSON object, but is {is}."))
        }
        ValueProblem::Value(problem) => InvalidRequest::body(problem),
    })
}

/// Reads JSON that stands in a string of the body, within the body's room. `None`: it is not valid, or does not fit.
pub(crate) fn read_written<T: Read>(json: &str) -> Option<Reading<T>> {
    let marked = written_number::mark(json.as_bytes())?;
    let mut written = serde_json::Deserializer::from_slice(&marked.json);
    let reading = JsonReader::new().deserialize(&mut written).ok()?;
    written.end().ok().map(|()| reading)
}

/// Reads all items of an array and passes each to `take`.
pub(crate) fn each_item<'de, T: Read, A: SeqAccess<'de>>(
    mut items: A,
    mut take: impl FnMut(Reading<T>),
) -> Result<(), A::Error> {
    while let Some(item) = items.next_element_seed(JsonReader::<T>::new())? {
        take(item);
    }
    Ok(())
}

/// Takes room for a value. Errors: the body has too many values.
fn take_room<E: Error>(n_bytes: usize) -> Result<(), E> {
    if room::take(n_bytes) { Ok(()) } else { Err(E::custom("too many values")) }
}

/// The room of a key: in the set of keys of its object, and in a [`Map`].
const KEY_ROOM: usize = size_of::<(u64, String, Value)>() + room::ALLOCATION;

/// The room of an array with an item, besides the item's: it begins with space for four.
const ARRAY_ROOM: usize = 3 * size_of::<Value>();

/// The room of a [`Map`] with a key: it begins with space for three.
const MAP_ROOM: usize = 3 * KEY_ROOM;

/// The room of a number that 64 bits do not hold.
pub(crate) const LONG_NUMBER_ROOM: usize = MAP_ROOM + Value::ROOM;

/// Passes each key of an object to `take`, which must read its value. Errors: a duplicate key, or one that clients must not
/// use.
pub(crate) fn each_field<'de, A: MapAccess<'de>>(
    mut fields: A,
    mut take: impl FnMut(String, &mut A) -> Result<(), A::Error>,
) -> Result<(), A::Error> {
    let mut seen = HashSet::new();
    while let Some(key) = fields.next_key::<String>()? {
        take_room(KEY_ROOM)?;
        if let Some(problem) = written_number::key_problem(&key) {
            return Err(A::Error::custom(problem));
        }
        if !seen.insert(key.clone()) {
            return Err(A::Error::custom(format_args!("duplicate key {}", quoted(&key))));
        }
        take(key, &mut fields)?;
    }
    room::give_back(seen.len() * KEY_ROOM);
    Ok(())
}

/// The serde seed that deserializes a [`Read`].
pub(crate) struct JsonReader<T>(PhantomData<T>);

impl<T> JsonReader<T> {
    pub(crate) fn new() -> Self {
        JsonReader(PhantomData)
    }
}

impl<'de, T: Read> DeserializeSeed<'de> for JsonReader<T> {
    type Value = Reading<T>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Reading<T>, D::Error> {
        take_room(T::ROOM)?;
        deserializer.deserialize_any(self)
    }
}

impl<'de, T: Read> Visitor<'de> for JsonReader<T> {
    type Value = Reading<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Reading<T>, E> {
        Ok(T::null())
    }

    fn visit_bool<E>(self, value: bool) -> Result<Reading<T>, E> {
        Ok(T::boolean(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Reading<T>, E> {
        Ok(T::number(&value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Reading<T>, E> {
        Ok(T::number(&value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Reading<T>, E> {
        Number::from_f64(value).map(|number| T::number(&number)).ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Reading<T>, E> {
        Ok(written_number::marked(value).map_or_else(|| T::string(value), T::long_number))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, items: A) -> Result<Reading<T>, A::Error> {
        T::array(items)
    }

    fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<Reading<T>, A::Error> {
        T::object(fields)
    }
}

/// Reads any value and drops it.
pub(crate) struct Skipped;

impl Read for Skipped {
    const EXPECTED: &'static str = "anything";
    const ROOM: usize = 0;

    fn null() -> Reading<Self> {
        Ok(Skipped)
    }

    fn boolean(_: bool) -> Reading<Self> {
        Ok(Skipped)
    }

    fn number(_: &Number) -> Reading<Self> {
        Ok(Skipped)
    }

    fn long_number(_: &str) -> Reading<Self> {
        Ok(Skipped)
    }

    fn string(_: &str) -> Reading<Self> {
        Ok(Skipped)
    }
}

impl<T: Read> Read for Option<T> {
    const EXPECTED: &'static str = T::EXPECTED;

    fn wrong(is: &'static str) -> ValueProblem {
        T::wrong(is)
    }

    fn null() -> Reading<Self> {
        Ok(None)
    }

    fn boolean(value: bool) -> Reading<Self> {
        T::boolean(value).map(Some)
    }

    fn number(value: &Number) -> Reading<Self> {
        T::number(value).map(Some)
    }

    fn long_number(text: &str) -> Reading<Self> {
        T::long_number(text).map(Some)
    }

    fn string(value: &str) -> Reading<Self> {
        T::string(value).map(Some)
    }

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        Ok(T::array(items)?.map(Some))
    }

    fn object<'de, A: MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
        Ok(T::object(fields)?.map(Some))
    }
}

impl Read for bool {
    const EXPECTED: &'static str = "true or false";

    fn boolean(value: bool) -> Reading<Self> {
        Ok(value)
    }
}

impl Read for String {
    const EXPECTED: &'static str = "a string";

    fn string(value: &str) -> Reading<Self> {
        Ok(value.to_owned())
    }
}

/// Free-form JSON, such as a schema or metadata.
impl Read for Value {
    const EXPECTED: &'static str = "anything";

    fn null() -> Reading<Self> {
        Ok(Value::Null)
    }

    fn boolean(value: bool) -> Reading<Self> {
        Ok(value.into())
    }

    fn number(value: &Number) -> Reading<Self> {
        Ok(Value::Number(value.clone()))
    }

    fn long_number(text: &str) -> Reading<Self> {
        // If it does not fit, the next value fails.
        room::take(LONG_NUMBER_ROOM);
        Ok(written_number::value_of(text))
    }

    fn string(value: &str) -> Reading<Self> {
        Ok(value.into())
    }

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        let mut array = Vec::new();
        each_item(items, |item: Reading<Value>| {
            if array.is_empty() {
                // If it does not fit, the next value fails.
                room::take(ARRAY_ROOM);
            }
            array.extend(item.ok());
        })?;
        Ok(Ok(Value::Array(array)))
    }

    fn object<'de, A: MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
        Ok(Map::object(fields)?.map(Value::Object))
    }
}

impl Read for Map<String, Value> {
    const EXPECTED: &'static str = "an object";

    fn object<'de, A: MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
        let mut object = Map::new();
        each_field(fields, |key, fields| {
            take_room(if object.is_empty() { MAP_ROOM } else { KEY_ROOM })?;
            if let Ok(value) = fields.next_value_seed(JsonReader::<Value>::new())? {
                object.insert(key, value);
            }
            Ok(())
        })?;
        Ok(Ok(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `expected` is a part of the message, or the object itself.
    fn check(body: &[u8], expected: Result<Value, &str>) {
        match (read::<Map<String, Value>>(body), expected) {
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
        check(br#"{"a":{"$baton.number":"1"}}"#, Err("the key $baton.number is reserved"));
        check(br#"{1e999:1}"#, Err("key must be a string"));
        check(br#"{"a":NaN}"#, Err("expected value"));
        check(br#"{"a":-Infinity}"#, Err("invalid number"));
        check(b"{\"a\":\"\xFF\"}", Err("unicode"));
        check(b"\xFF\xFE{\0}\0", Err("expected value"));
        check(br#"{"a":"\ud83d"}"#, Err("hex escape"));
        check(br#"{"model":"x","model":"y"}"#, Err("duplicate key \"model\""));
        check(br#"{"a":{"b":1,"b":1}}"#, Err("duplicate key \"b\""));
        check("[".repeat(100_000).as_bytes(), Err("recursion limit"));
        check(format!("{{\"a\":{}", "{\"a\":".repeat(100_000)).as_bytes(), Err("recursion limit"));
    }

    #[test]
    fn values_have_a_bound_and_skipped_ones_take_nothing() {
        let array = |unit: &str, n: usize| format!("{{\"a\":[{unit}{}]}}", format!(",{unit}").repeat(n - 1));
        let many = 1 << 20;
        for unit in ["0", "{}", "[]", r#"{"b":0}"#, "\"\""] {
            let body = array(unit, many);
            check(body.as_bytes(), Err("too many values"));
            assert!(read::<Object>(body.as_bytes()).is_ok(), "{unit}");
            // The next body has room again.
            check(b"{}", Ok(serde_json::json!({})));
        }
        let keys: Vec<_> = (0..many).map(|i| format!("\"{i}\":0")).collect();
        let keys = format!("{{{}}}", keys.join(","));
        assert!(matches!(read::<Object>(keys.as_bytes()), Err(error) if error.message.contains("too many values")));
        assert!(read::<Map<String, Value>>(array("0", 100_000).as_bytes()).is_ok());
        // An array with one item has space for four.
        assert!(read::<Map<String, Value>>(array("[0]", 100_000).as_bytes()).is_err());
    }

    #[test]
    fn what_is_skipped_is_checked_all_the_same() {
        for body in [r#"{"a":[{"b":1,"b":1}]}"#, r#"{"a":1e}"#, r#"{"a":"\ud83d"}"#, r#"{"a":[}"#] {
            assert!(matches!(read::<Object>(body.as_bytes()), Err(error) if error.param.is_none()), "{body}");
        }
        assert!(read::<Object>(br#"{"a":[{"b":[1,{}],"c":null,"d":1e999}]}"#).is_ok());
    }

    /// An object without fields.
    struct Object;

    impl Read for Object {
        const EXPECTED: &'static str = "an object";

        fn object<'de, A: MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
            Skipped::object(fields)?.ok();
            Ok(Ok(Object))
        }
    }
}

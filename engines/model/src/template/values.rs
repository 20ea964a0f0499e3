//! JSON as values of templates, and back, with all digits of its numbers.

use std::fmt;
use std::sync::Arc;

use baton_schemas::written_number::text_of;
use minijinja::value::{Object, ObjectRepr, Value, ValueKind};
use serde::ser::{Error, SerializeMap};
use serde::{Serialize, Serializer};
use serde_json::value::RawValue;

/// A number that neither minijinja's integers nor its floats hold. Templates can only print it.
#[derive(Debug)]
struct LongNumber(String);

impl Object for LongNumber {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns JSON as templates read it.
pub(super) fn value_of(json: &serde_json::Value) -> Value {
    match json {
        serde_json::Value::Array(items) => items.iter().map(value_of).collect(),
        serde_json::Value::Object(fields) => match text_of(json) {
            Some(number) => {
                number.parse::<i128>().map_or_else(|_| Value::from_object(LongNumber(number.to_owned())), Value::from)
            }
            None => fields.iter().map(|(key, field)| (Value::from(key.as_str()), value_of(field))).collect(),
        },
        other => Value::from_serialize(other),
    }
}

/// A template's value as JSON.
pub(super) struct Json<'v> {
    pub(super) value: &'v Value,
    pub(super) sorts_keys: bool,
}

impl Serialize for Json<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Json { value, sorts_keys } = *self;
        if let Some(LongNumber(number)) = value.downcast_object_ref() {
            return RawValue::from_string(number.clone()).map_err(S::Error::custom)?.serialize(serializer);
        }
        let inside = |value: &Value| value.try_iter().map(Vec::from_iter).map_err(S::Error::custom);
        match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => {
                let items = inside(value)?;
                serializer.collect_seq(items.iter().map(|value| Json { value, sorts_keys }))
            }
            ValueKind::Map => {
                let mut keys = inside(value)?;
                if sorts_keys {
                    keys.sort_by_cached_key(Value::to_string);
                }
                let mut map = serializer.serialize_map(Some(keys.len()))?;
                for key in &keys {
                    let value = value.get_item(key).map_err(S::Error::custom)?;
                    map.serialize_entry(key, &Json { value: &value, sorts_keys })?;
                }
                map.end()
            }
            _ => value.serialize(serializer),
        }
    }
}

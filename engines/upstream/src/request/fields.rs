//! The fields of a request to an upstream.

use baton_schemas::written_number::AsWritten;
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::Value;

/// A request with as many fields never grows its list.
const USUAL: usize = 16;

/// The fields of a JSON object, in the order in which they are sent. Requests have few of them, and all names are this
/// program's own, so a list is cheaper than a map.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Fields(Vec<(&'static str, Value)>);

impl Default for Fields {
    fn default() -> Self {
        Fields(Vec::with_capacity(USUAL))
    }
}

impl Fields {
    /// Sets a field in its place, or as the last one.
    pub(crate) fn set(&mut self, name: &'static str, value: impl Into<Value>) {
        match self.0.iter_mut().find(|field| field.0 == name) {
            Some(field) => field.1 = value.into(),
            None => self.0.push((name, value.into())),
        }
    }

    /// Returns a field's value.
    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        self.0.iter().find(|field| field.0 == name).map(|field| &field.1)
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    pub(crate) fn remove(&mut self, name: &str) {
        self.0.retain(|field| field.0 != name);
    }
}

impl Serialize for Fields {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        self.0.iter().try_for_each(|(name, value)| map.serialize_entry(name, &AsWritten(value)))?;
        map.end()
    }
}

impl From<Fields> for Value {
    fn from(fields: Fields) -> Value {
        Value::Object(fields.0.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_keep_their_order_and_are_set_once() {
        let mut fields = Fields::default();
        fields.set("b", 1);
        fields.set("a", "x");
        fields.set("b", 2);
        assert_eq!(serde_json::to_string(&fields).unwrap(), r#"{"b":2,"a":"x"}"#);
        assert_eq!((fields.get("b"), fields.contains("c")), (Some(&Value::from(2)), false));
        fields.remove("b");
        assert_eq!(Value::from(fields), serde_json::json!({ "a": "x" }));
    }
}

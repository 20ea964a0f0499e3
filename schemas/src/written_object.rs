//! A JSON object that is passed on as it was written, so that no digit of its numbers is lost.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use crate::written_number;

/// The text of a JSON object, without white space between its parts.
#[derive(Debug, Clone, Serialize, JsonSchema)]
#[serde(transparent)]
#[schemars(with = "Map<String, Value>", inline)]
pub struct WrittenObject(Box<RawValue>);

impl WrittenObject {
    /// Reads an object. `None`: the text is something else, or nested deeper than 128 levels.
    pub fn read(json: &str) -> Option<WrittenObject> {
        written_number::parse(json).filter(Value::is_object)?;
        RawValue::from_string(without_space(json)).ok().map(WrittenObject)
    }
}

/// JSON without the white space between its parts. Some replies are lines, which must have no line ends within.
fn without_space(json: &str) -> String {
    let (mut in_string, mut is_escaped) = (false, false);
    let mut kept = |c: &char| {
        let is_kept = in_string || !c.is_ascii_whitespace();
        in_string ^= *c == '"' && !is_escaped;
        is_escaped = in_string && *c == '\\' && !is_escaped;
        is_kept
    };
    json.chars().filter(|c| kept(c)).collect()
}

impl From<Map<String, Value>> for WrittenObject {
    fn from(object: Map<String, Value>) -> WrittenObject {
        WrittenObject(serde_json::value::to_raw_value(&object).expect("a map of values is JSON"))
    }
}

impl Default for WrittenObject {
    fn default() -> Self {
        Map::new().into()
    }
}

impl PartialEq for WrittenObject {
    fn eq(&self, other: &Self) -> bool {
        self.0.get() == other.0.get()
    }
}

impl Eq for WrittenObject {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_keeps_its_digits_and_no_space() {
        let read = |json: &str| WrittenObject::read(json).map(|object| serde_json::to_string(&object).unwrap());
        let lines = "\n{\"a\":\r\n12345678901234567890123}\n";
        assert_eq!(read(lines).as_deref(), Some(r#"{"a":12345678901234567890123}"#));
        let spaced = r#"{"a b\\": "c\" d", "e": [ "\\\" f", 1 ] }"#;
        assert_eq!(read(spaced).as_deref(), Some(r#"{"a b\\":"c\" d","e":["\\\" f",1]}"#));
        assert_eq!(read("{}").as_deref(), Some("{}"));
        for other in ["[1]", "1", "\"x\"", "{\"a\":", "{} {}", ""] {
            assert_eq!(read(other), None, "{other}");
        }
    }
}

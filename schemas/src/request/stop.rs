//! Strings before which generation ends.

use serde_json::Value;

use super::fields::{Fields, wrong_type};
use super::invalid::InvalidRequest;

/// Each stop string is searched for in every step. OpenAI allows 4, llama-server's users send more.
pub(crate) const MAX_STOPS: usize = 16;
/// Text that could begin a stop string is held back, so a longer one only delays the stream.
pub(crate) const MAX_STOP_CHARS: usize = 1024;

/// Reads `stop`: a string, an array of strings, or nothing.
pub(crate) fn parse(fields: Fields<'_>) -> Result<Vec<String>, InvalidRequest> {
    parse_named(fields, "stop")
}

/// The same under another name.
pub(crate) fn parse_named(fields: Fields<'_>, field: &str) -> Result<Vec<String>, InvalidRequest> {
    let name = fields.name(field);
    let stops = match fields.get(field) {
        None => return Ok(Vec::new()),
        Some(one @ Value::String(_)) => std::slice::from_ref(one),
        Some(Value::Array(many)) => many,
        Some(other) => return Err(wrong_type(&name, "a string or an array of strings", other)),
    };
    if stops.len() > MAX_STOPS {
        let problem = format!("must have at most {MAX_STOPS} entries, but has {}", stops.len());
        return Err(InvalidRequest::at(name, problem));
    }
    stops.iter().map(|stop| one_stop(stop, &name)).collect()
}

fn one_stop(value: &Value, name: &str) -> Result<String, InvalidRequest> {
    match value {
        Value::String(text) if text.is_empty() => Err(InvalidRequest::at(name, "must not have an empty string")),
        Value::String(text) if text.chars().nth(MAX_STOP_CHARS).is_some() => {
            Err(InvalidRequest::at(name, format_args!("must not be longer than {MAX_STOP_CHARS} characters")))
        }
        Value::String(text) => Ok(text.clone()),
        other => Err(wrong_type(name, "a string or an array of strings", other)),
    }
}

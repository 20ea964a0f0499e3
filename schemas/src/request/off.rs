//! Fields that change the answer and cannot be honoured: refused, unless they are switched off.

use serde_json::Value;

use super::fields::Fields;
use super::invalid::InvalidRequest;

/// A field, what it asks for, and the number that asks for nothing.
pub(crate) type Constraint = (&'static str, &'static str, f64);

/// Refuses the first of these that asks for something.
pub(crate) fn refuse(fields: Fields<'_>, constraints: &[Constraint]) -> Result<(), InvalidRequest> {
    let earnest = |(field, _, off): &&Constraint| fields.get(field).is_some_and(|value| !asks_for_nothing(value, *off));
    constraints
        .iter()
        .find(earnest)
        .map_or(Ok(()), |(field, what, _)| Err(InvalidRequest::unsupported(fields.name(field), what)))
}

/// Front ends send every field they know, most of them switched off.
pub(crate) fn asks_for_nothing(value: &Value, off: f64) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(on) => !on,
        Value::Number(number) => number.as_f64() == Some(off),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}

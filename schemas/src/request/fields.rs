//! Reading typed, range-checked fields out of a JSON object. A null counts as missing: many SDKs send every optional
//! field they know as null.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use super::invalid::InvalidRequest;

/// An object and where it stands in the body, so that an error can name the field.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    object: &'a Map<String, Value>,
    path: &'a str,
}

impl<'a> Fields<'a> {
    /// The body itself.
    pub(crate) fn root(object: &'a Map<String, Value>) -> Self {
        Fields { object, path: "" }
    }

    /// An object inside the body, at `path`.
    pub(crate) fn at(value: &'a Value, path: &'a str) -> Result<Self, InvalidRequest> {
        match value {
            Value::Object(object) => Ok(Fields { object, path }),
            other => Err(wrong_type(path, "an object", other)),
        }
    }

    /// The full name of a field, for `param`.
    pub(crate) fn name(&self, field: &str) -> String {
        if self.path.is_empty() { field.to_owned() } else { format!("{}.{field}", self.path) }
    }

    /// A value that is there and not null.
    pub(crate) fn get(&self, field: &str) -> Option<&'a Value> {
        self.object.get(field).filter(|value| !value.is_null())
    }

    /// Whether a key is there, null or not.
    pub(crate) fn has_key(&self, field: &str) -> bool {
        self.object.contains_key(field)
    }

    /// The model's name, which every dialect has under `model`.
    pub(crate) fn model(&self) -> Result<String, InvalidRequest> {
        let model = self.string("model")?.filter(|model| !model.is_empty());
        model.map(str::to_owned).ok_or_else(|| InvalidRequest::at("model", "is missing; /v1/models lists the models"))
    }

    pub(crate) fn boolean(&self, field: &str) -> Result<Option<bool>, InvalidRequest> {
        self.typed(field, "true or false", Value::as_bool)
    }

    pub(crate) fn string(&self, field: &str) -> Result<Option<&'a str>, InvalidRequest> {
        self.typed(field, "a string", |value| value.as_str())
    }

    pub(crate) fn array(&self, field: &str) -> Result<Option<&'a [Value]>, InvalidRequest> {
        self.typed(field, "an array", |value| value.as_array().map(Vec::as_slice))
    }

    pub(crate) fn object(&self, field: &str) -> Result<Option<&'a Map<String, Value>>, InvalidRequest> {
        self.typed(field, "an object", |value| value.as_object())
    }

    /// A number in a range. Narrowed to f32, which is what samplers compute in; the range keeps it finite.
    pub(crate) fn number(&self, field: &str, range: RangeInclusive<f64>) -> Result<Option<f32>, InvalidRequest> {
        let Some(wide) = self.typed(field, "a number", Value::as_f64)? else { return Ok(None) };
        in_range(wide, &range).map(Some).ok_or_else(|| {
            let (low, high) = range.into_inner();
            InvalidRequest::at(self.name(field), format_args!("must be from {low} to {high}, but is {wide}"))
        })
    }

    /// An integer in a range. `5.0` is one: languages without integers write it so.
    pub(crate) fn integer(&self, field: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, InvalidRequest> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let Value::Number(number) = value else { return Err(wrong_type(&self.name(field), "an integer", value)) };
        let integer = whole(value).and_then(|integer| i64::try_from(integer).ok());
        integer.filter(|integer| range.contains(integer)).map(Some).ok_or_else(|| {
            let (low, high) = range.into_inner();
            let problem = format!("must be an integer from {low} to {high}, but is {number}");
            InvalidRequest::at(self.name(field), problem)
        })
    }

    /// An integer of at most 64 bits, signed or not.
    pub(crate) fn wide_integer(&self, field: &str) -> Result<Option<i128>, InvalidRequest> {
        let Some(value) = self.get(field) else { return Ok(None) };
        whole(value)
            .map(Some)
            .ok_or_else(|| InvalidRequest::at(self.name(field), "must be an integer of at most 64 bits"))
    }

    fn typed<T>(
        &self,
        field: &str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, InvalidRequest> {
        let Some(value) = self.get(field) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| wrong_type(&self.name(field), expected, value))
    }
}

/// A field of the wrong type.
pub(crate) fn wrong_type(param: &str, expected: &str, value: &Value) -> InvalidRequest {
    InvalidRequest::at(param, format_args!("must be {expected}, but is {}", kind(value)))
}

/// What a value is, with its article, for messages.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// A number inside a range, narrowed.
pub(crate) fn in_range(value: f64, range: &RangeInclusive<f64>) -> Option<f32> {
    range.contains(&value).then_some(value as f32)
}

/// The integer that a JSON number is, if it is one.
fn whole(value: &Value) -> Option<i128> {
    if let Some(integer) = value.as_i64() {
        return Some(integer.into());
    }
    if let Some(integer) = value.as_u64() {
        return Some(integer.into());
    }
    let float = value.as_f64()?;
    // 2^63: beyond it a float no longer says which integer was meant.
    (float.fract() == 0.0 && float.abs() < 9_223_372_036_854_775_808.0).then_some(float as i128)
}

//! Types of values in bodies: numbers with ranges, names, words, tokens.

use std::marker::PhantomData;
use std::ops::RangeInclusive;

use schemars::{JsonSchema, json_schema};
use serde::de::value::StrDeserializer;
use serde::de::{DeserializeOwned, IntoDeserializer, SeqAccess};
use serde_json::{Number as JsonNumber, Value};

use super::invalid::InvalidRequest;
use super::read::{Read, Reading, ValueProblem, each_item};
use super::schema::described;
use crate::token::Token;

/// The largest 32-bit count.
pub(crate) const MAX_U32: i64 = u32::MAX as i64;

/// An integer from `MIN` to `MAX`. `5.0` is accepted: languages without integers write 5 like that.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Integer<const MIN: i64, const MAX: i64>(pub(crate) i64);

impl<const MIN: i64, const MAX: i64> Integer<MIN, MAX> {
    /// Returns the number as a count, or `None` if it is negative.
    pub(crate) fn count(self) -> Option<u32> {
        u32::try_from(self.0).ok()
    }
}

impl<const MIN: i64, const MAX: i64> Read for Integer<MIN, MAX> {
    const EXPECTED: &'static str = "an integer";

    fn number(number: &JsonNumber) -> Reading<Self> {
        let integer = whole(number).and_then(|integer| i64::try_from(integer).ok());
        integer
            .filter(|integer| (MIN..=MAX).contains(integer))
            .map(Integer)
            .ok_or_else(|| ValueProblem::Value(format!("must be an integer from {MIN} to {MAX}, but is {number}")))
    }
}

described!([const MIN: i64, const MAX: i64] Integer<MIN, MAX>: |_generator| {
    json_schema!({ "type": "integer", "format": "int64", "minimum": MIN, "maximum": MAX })
});

/// An integer of at most 64 bits, signed or not.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WideInteger(pub(crate) i128);

impl Read for WideInteger {
    const EXPECTED: &'static str = "an integer of at most 64 bits";

    fn wrong(_: &'static str) -> ValueProblem {
        ValueProblem::value(format!("must be {}", Self::EXPECTED))
    }

    fn number(number: &JsonNumber) -> Reading<Self> {
        whole(number).map(WideInteger).ok_or_else(|| Self::wrong("a number"))
    }
}

described!([] WideInteger: |_generator| json_schema!({ "type": "integer", "minimum": i64::MIN, "maximum": u64::MAX }));

/// Returns the integer that a JSON number stands for, if it is whole.
fn whole(number: &JsonNumber) -> Option<i128> {
    if let Some(integer) = number.as_i64() {
        return Some(integer.into());
    }
    if let Some(integer) = number.as_u64() {
        return Some(integer.into());
    }
    let float = number.as_f64()?;
    // 2^63. Larger floats do not identify one integer.
    (float.fract() == 0.0 && float.abs() < 9_223_372_036_854_775_808.0).then_some(float as i128)
}

/// The range of a [`Real`].
pub(crate) trait Range {
    const RANGE: RangeInclusive<f64>;
}

/// A number in a range, as an f32: samplers compute in f32. The range keeps it finite.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Real<R>(pub(crate) f32, PhantomData<R>);

impl<R: Range> Read for Real<R> {
    const EXPECTED: &'static str = "a number";

    fn number(number: &JsonNumber) -> Reading<Self> {
        let wide = number.as_f64().ok_or_else(|| Self::wrong("a number"))?;
        if R::RANGE.contains(&wide) {
            return Ok(Real(wide as f32, PhantomData));
        }
        let (low, high) = R::RANGE.into_inner();
        Err(ValueProblem::Value(format!("must be from {low} to {high}, but is {wide}")))
    }
}

described!([R: Range] Real<R>: |_generator| {
    json_schema!({ "type": "number", "format": "double", "minimum": R::RANGE.start(), "maximum": R::RANGE.end() })
});

/// The problem with a value that must have something in it.
pub(crate) const EMPTY: &str = "must not be empty";

/// A text of at least one character.
#[derive(Debug, JsonSchema)]
#[schemars(inline, extend("minLength" = 1))]
pub(crate) struct NonEmpty(pub(crate) String);

impl Read for NonEmpty {
    const EXPECTED: &'static str = String::EXPECTED;

    fn string(text: &str) -> Reading<Self> {
        if text.is_empty() { Err(ValueProblem::value(EMPTY)) } else { Ok(NonEmpty(text.to_owned())) }
    }
}

/// The most characters of a model's name. Replies and errors repeat it.
const MAX_MODEL_NAME: usize = 1024;

/// A model's public name.
#[derive(Debug, JsonSchema)]
#[schemars(inline, extend("minLength" = 1, "maxLength" = MAX_MODEL_NAME))]
pub(crate) struct ModelName(pub(crate) String);

impl Read for ModelName {
    const EXPECTED: &'static str = String::EXPECTED;

    fn missing(field: String) -> InvalidRequest {
        InvalidRequest::missing(field, "GET /v1/models lists the models.")
    }

    fn string(name: &str) -> Reading<Self> {
        if name.is_empty() {
            return Err(ValueProblem::value("must not be empty; GET /v1/models lists the models"));
        }
        if name.chars().nth(MAX_MODEL_NAME).is_some() {
            return Err(ValueProblem::value(format!("must not be longer than {MAX_MODEL_NAME} characters")));
        }
        Ok(ModelName(name.to_owned()))
    }
}

/// One of several words: a variant of the enum `W`, as serde names it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Word<W>(pub(crate) W);

/// The words of a [`Word`].
pub(crate) trait Words: DeserializeOwned {
    /// The problem with another word or with none, e.g. "must be float or base64".
    const WRONG: &'static str;
}

impl<W: Words> Read for Word<W> {
    const EXPECTED: &'static str = String::EXPECTED;

    fn missing(field: String) -> InvalidRequest {
        InvalidRequest::at(field, W::WRONG)
    }

    fn string(word: &str) -> Reading<Self> {
        let deserializer: StrDeserializer<'_, serde::de::value::Error> = word.into_deserializer();
        W::deserialize(deserializer).map(Word).map_err(|_| ValueProblem::value(W::WRONG))
    }
}

described!([W: JsonSchema] Word<W>: as W);

/// A JSON Schema (draft 2020-12) of at most 20,000 values and 512 KiB of names and strings, nested at most 64 deep. Type
/// and size are checked later, with [`check_schema`](crate::constraint::check_schema).
#[derive(Debug, Clone)]
pub(crate) struct SchemaObject(pub(crate) Value);

impl Read for SchemaObject {
    const EXPECTED: &'static str = Value::EXPECTED;

    fn boolean(value: bool) -> Reading<Self> {
        Value::boolean(value).map(SchemaObject)
    }

    fn number(value: &JsonNumber) -> Reading<Self> {
        Value::number(value).map(SchemaObject)
    }

    fn string(value: &str) -> Reading<Self> {
        Value::string(value).map(SchemaObject)
    }

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        Ok(Value::array(items)?.map(SchemaObject))
    }

    fn object<'de, A: serde::de::MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
        Ok(Value::object(fields)?.map(SchemaObject))
    }
}

described!([] SchemaObject: |_generator| json_schema!({
    "description": "A JSON Schema (draft 2020-12) of at most 20,000 values and 512 KiB of names and strings, nested at \
        most 64 deep. A keyword that sampling cannot enforce is a 400.",
    "type": "object",
    "additionalProperties": true,
}));

/// An array of token ids. An id outside the vocabulary is a 400.
#[derive(Debug)]
pub(crate) struct Tokens(pub(crate) Vec<Token>);

/// The problem with an item that is not a token id.
pub(crate) const NOT_A_TOKEN: &str = "has an item that is not a token's id";

impl Read for Tokens {
    const EXPECTED: &'static str = "an array";

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        let mut tokens = Vec::new();
        let mut is_sound = true;
        each_item(items, |item: Reading<TokenId>| match item {
            Ok(token) if is_sound => tokens.push(token.0),
            _ => is_sound = false,
        })?;
        Ok(if is_sound { Ok(Tokens(tokens)) } else { Err(ValueProblem::value(NOT_A_TOKEN)) })
    }
}

described!([] Tokens: as Vec<TokenId>);

/// A token's number in the model's vocabulary. A number outside it is a 400.
#[derive(Debug, Clone, Copy, JsonSchema)]
#[schemars(inline, extend("maximum" = u32::MAX))]
pub(crate) struct TokenId(pub(crate) Token);

impl Read for TokenId {
    const EXPECTED: &'static str = "a token's id";
    const ROOM: usize = size_of::<Token>();

    fn number(number: &JsonNumber) -> Reading<Self> {
        let token = number.as_u64().and_then(|id| Token::try_from(id).ok());
        token.map(TokenId).ok_or_else(|| Self::wrong("a number"))
    }
}

//! The one rule by which replies of other servers are read: leniently where nothing is at stake, strictly where text, calls
//! or the end of a reply are. `docs/upstreams.md` has it as a table; each type here is a row.
//!
//! Null, an empty list and a missing field are nothing everywhere. A field that has none of these types is not read, so
//! nothing that a server adds reaches a client.

mod members;
mod said;
mod tree;

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error, IgnoredAny, MapAccess, SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;

pub(crate) use self::members::ForeignObject;
pub(crate) use self::said::{Said, SaidPart};
pub(crate) use self::tree::tree;
use crate::UpstreamError;

/// The most calls in one reply, and so in one of its events.
pub(crate) const MAX_CALLS: usize = 128;

/// The bytes of a JSON text without the byte order mark that some servers put before it.
pub(crate) fn without_mark(json: &[u8]) -> &[u8] {
    json.strip_prefix("\u{FEFF}".as_bytes()).unwrap_or(json)
}

/// A count of tokens. Anything that is no whole number from 0 is unknown. Lenient: Baton estimates what it is not told.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Count(pub(crate) Option<u32>);

impl Count {
    /// The count in a field of a tree of values.
    pub(crate) fn of(value: Option<&Value>) -> Option<u32> {
        match value? {
            Value::Number(number) => Count::of_number(&number.to_string()),
            Value::String(text) => text.trim().parse().ok(),
            Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => None,
        }
    }

    fn of_number(digits: &str) -> Option<u32> {
        let wide =
            || digits.parse::<f64>().ok().filter(|n| n.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(n));
        digits.parse().ok().or_else(|| wide().map(|n| n as u32))
    }
}

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Count, D::Error> {
        // Not by a visitor: a number beyond all ranges and a text with half a character are errors before it is asked.
        let raw = <&RawValue>::deserialize(value)?.get();
        Ok(Count(match raw.as_bytes().first() {
            Some(b'"') => serde_json::from_str::<String>(raw).ok().and_then(|text| text.trim().parse().ok()),
            Some(b'-' | b'0'..=b'9') => Count::of_number(raw),
            _ => None,
        }))
    }
}

/// An object that the reply's text, calls or end are in. Strict: another type is an error.
pub(crate) type Needed<T> = Object<T, true>;

/// An object that nothing depends on, such as the usage. Lenient: another type is nothing.
pub(crate) type Aside<T> = Object<T, false>;

/// See [`Needed`] and [`Aside`].
#[derive(Debug)]
pub(crate) struct Object<T, const NEEDED: bool>(pub(crate) Option<T>);

impl<T, const NEEDED: bool> Default for Object<T, NEEDED> {
    fn default() -> Self {
        Object(None)
    }
}

impl<'de, T: ForeignObject<'de>> Deserialize<'de> for Aside<T> {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        // Not by a visitor: see `Count`.
        let raw = <&RawValue>::deserialize(value)?.get();
        match raw.starts_with('{') {
            true => serde_json::from_str::<Needed<T>>(raw).map(|object| Object(object.0)).map_err(D::Error::custom),
            false => Ok(Object(None)),
        }
    }
}

impl<'de, T: ForeignObject<'de>> Deserialize<'de> for Needed<T> {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        struct ObjectVisitor<T>(PhantomData<T>);

        impl<T> ObjectVisitor<T> {
            /// The result for another type.
            fn other<E: Error>(is_empty: bool) -> Result<Needed<T>, E> {
                if is_empty { Ok(Object(None)) } else { Err(E::custom("an object was expected")) }
            }
        }

        impl<'de, T: ForeignObject<'de>> Visitor<'de> for ObjectVisitor<T> {
            type Value = Needed<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, object: A) -> Result<Self::Value, A::Error> {
                members::read(object).map(|object| Object(Some(object)))
            }

            fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
                Self::other(true)
            }

            // Some languages write an empty object as an empty list.
            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
                let n_items = skip_list(list)?;
                Self::other(n_items == 0)
            }

            fn visit_bool<E: Error>(self, _: bool) -> Result<Self::Value, E> {
                Self::other(false)
            }

            fn visit_u64<E: Error>(self, _: u64) -> Result<Self::Value, E> {
                Self::other(false)
            }

            fn visit_i64<E: Error>(self, _: i64) -> Result<Self::Value, E> {
                Self::other(false)
            }

            fn visit_f64<E: Error>(self, _: f64) -> Result<Self::Value, E> {
                Self::other(false)
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
                Self::other(text.is_empty())
            }
        }

        value.deserialize_any(ObjectVisitor(PhantomData))
    }
}

/// A list of at most `MAX` items. Strict: another type, or more items, is an error. Some languages write an empty list as an
/// empty object.
#[derive(Debug)]
pub(crate) struct List<T, const MAX: usize>(pub(crate) Vec<T>);

impl<T, const MAX: usize> Default for List<T, MAX> {
    fn default() -> Self {
        List(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>, const MAX: usize> Deserialize<'de> for List<T, MAX> {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        struct ListVisitor<T, const MAX: usize>(PhantomData<T>);

        impl<'de, T: Deserialize<'de>, const MAX: usize> Visitor<'de> for ListVisitor<T, MAX> {
            type Value = List<T, MAX>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MAX} items")
            }

            fn visit_unit<E>(self) -> Result<Self::Value, E> {
                Ok(List(Vec::new()))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Self::Value, A::Error> {
                match object.next_key::<IgnoredAny>()? {
                    Some(_) => Err(A::Error::invalid_type(Unexpected::Map, &self)),
                    None => Ok(List(Vec::new())),
                }
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = list.next_element()? {
                    // A list of empty objects takes many times the memory of its text.
                    if items.len() == MAX {
                        return Err(A::Error::custom(format_args!("a list of more than {MAX} items")));
                    }
                    items.push(item);
                }
                Ok(List(items))
            }
        }

        value.deserialize_any(ListVisitor(PhantomData))
    }
}

/// A word that only helps to understand other fields, or an id. A number is its digits. Lenient: another type is empty.
#[derive(Debug, Default)]
pub(crate) struct ForeignWord(pub(crate) String);

impl<'de> Deserialize<'de> for ForeignWord {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<ForeignWord, D::Error> {
        let raw = <&RawValue>::deserialize(value)?.get();
        let is_number = raw.starts_with(|c: char| c.is_ascii_digit() || c == '-');
        Ok(ForeignWord(if is_number { raw.to_owned() } else { serde_json::from_str(raw).unwrap_or_default() }))
    }
}

/// A call, or a piece of one.
#[derive(Deserialize)]
pub(crate) struct ForeignCall<'a> {
    /// Its number in the reply. Strict: an unreadable one is an error.
    #[serde(default)]
    pub(crate) index: Option<Count>,
    #[serde(default)]
    pub(crate) id: ForeignWord,
    #[serde(borrow, default)]
    pub(crate) function: Needed<ForeignFunction<'a>>,
}

impl<'de: 'a, 'a> ForeignObject<'de> for ForeignCall<'a> {
    const ASIDE: &'static [&'static str] = &["id"];
}

impl<'de: 'a, 'a> ForeignObject<'de> for ForeignFunction<'a> {
    const ASIDE: &'static [&'static str] = &[];
}

impl<'a> ForeignCall<'a> {
    /// A call in the older form, which has neither a number nor an id.
    pub(crate) fn of(function: ForeignFunction<'a>) -> ForeignCall<'a> {
        ForeignCall { index: None, id: ForeignWord::default(), function: Object(Some(function)) }
    }
}

/// The function of a call.
#[derive(Default, Deserialize)]
pub(crate) struct ForeignFunction<'a> {
    #[serde(default)]
    pub(crate) name: Option<String>,
    #[serde(borrow, default)]
    arguments: Option<&'a RawValue>,
}

/// The arguments of a call, or a piece of them.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ForeignArguments {
    Nothing,
    /// An object without members: the call has none, or none yet. Some servers write it before the text.
    EmptyObject,
    /// JSON, or a piece of it.
    Text(String),
}

impl ForeignArguments {
    /// Returns true if there is no more than white space.
    pub(crate) fn is_blank(&self) -> bool {
        match self {
            ForeignArguments::Nothing => true,
            ForeignArguments::EmptyObject => false,
            ForeignArguments::Text(text) => text.trim().is_empty(),
        }
    }
}

impl ForeignFunction<'_> {
    /// The arguments: a text, or an object, which is its JSON. Errors: they are neither.
    pub(crate) fn arguments(&self) -> Result<ForeignArguments, UpstreamError> {
        let raw = self.arguments.map_or("null", RawValue::get);
        match raw.as_bytes().first() {
            // Some languages write an empty object as an empty list.
            Some(b'{' | b'[') if is_nothing(raw) => Ok(ForeignArguments::EmptyObject),
            _ if is_nothing(raw) => Ok(ForeignArguments::Nothing),
            Some(b'{') => Ok(ForeignArguments::Text(raw.to_owned())),
            Some(b'"') => serde_json::from_str(raw).map(ForeignArguments::Text).map_err(UpstreamError::malformed),
            _ => Err(UpstreamError::malformed("a call whose arguments are neither a text nor an object")),
        }
    }
}

/// Returns true if a field is present and holds something.
pub(crate) fn is_present(field: Option<&RawValue>) -> bool {
    field.is_some_and(|raw| !is_nothing(raw.get()))
}

fn is_nothing(json: &str) -> bool {
    let is_empty = |open, close| {
        json.strip_prefix(open).and_then(|rest| rest.strip_suffix(close)).is_some_and(|inside| inside.trim().is_empty())
    };
    matches!(json, "null" | "false" | "\"\"") || is_empty('[', ']') || is_empty('{', '}')
}

/// Returns the number of items.
fn skip_list<'de, A: SeqAccess<'de>>(mut list: A) -> Result<usize, A::Error> {
    let mut n_items = 0;
    while list.next_element::<IgnoredAny>()?.is_some() {
        n_items += 1;
    }
    Ok(n_items)
}

#[cfg(test)]
mod tests;

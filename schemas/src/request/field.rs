//! The fields of a body: [`object!`](super::object) declares an object once, and it is read, named in errors and
//! described in `/openapi.json` from that.
//!
//! ```text
//! object! {
//!     /// The description in /openapi.json.
//!     pub struct ChatBody {
//!         /// Must be there.
//!         model: Required<ModelName>,
//!         /// May be missing or null.
//!         n: Field<Integer<1, 16>>,
//!         /// The fields of another object, beside these.
//!         #[schemars(flatten)]
//!         sampling: SamplingBody,
//!     }
//! }
//! ```
//!
//! `by "type" { variants }` after the struct describes an object whose fields depend on one word: see
//! [`schema`](super::schema).

use schemars::{JsonSchema, Schema};
use serde::de::{MapAccess, SeqAccess};

use super::invalid::InvalidRequest;
use super::read::{JsonReader, Read, Reading, Skipped, ValueProblem, each_field, each_item};
use super::schema::described;

/// A member of an object: one field, or a group of fields.
pub(crate) trait ObjectMember {
    /// It is a field that must be there.
    const IS_REQUIRED: bool;

    /// Nothing was read yet. A field keeps its name.
    fn named(name: &'static str) -> Self;

    /// Reads the value of `key` if this is its field. Returns false if it is not, and has read nothing then.
    fn accept<'de, A: MapAccess<'de>>(
        &mut self,
        name: &'static str,
        key: &str,
        fields: &mut A,
    ) -> Result<bool, A::Error>;
}

/// The name of a field inside the object at `at`; the body itself is at `""`.
pub(crate) fn join(at: &str, name: &str) -> String {
    if at.is_empty() { name.to_owned() } else { format!("{at}.{name}") }
}

/// The error for a missing field `name` of the object at `at`.
pub(crate) fn missing(at: &str, name: &str) -> InvalidRequest {
    InvalidRequest::at(join(at, name), "is missing")
}

/// A field that may be missing. Null counts as missing: many SDKs send every optional field they know as null.
///
/// One word in size while it is missing, since an array may have millions of empty objects.
#[derive(Debug)]
pub(crate) struct Field<T>(Option<Box<Present<T>>>);

#[derive(Debug)]
struct Present<T> {
    name: &'static str,
    reading: Reading<Option<T>>,
}

impl<T> Field<T> {
    /// The value, if there is one. `at` is where the object stands in the body.
    pub(crate) fn get(self, at: &str) -> Result<Option<T>, InvalidRequest> {
        let Some(present) = self.0 else { return Ok(None) };
        present.reading.map_err(|problem| InvalidRequest::at(join(at, present.name), problem))
    }

    /// Returns the value of a field that is required here, though not in every variant of its object.
    pub(crate) fn required(self, name: &str, at: &str) -> Result<T, InvalidRequest> {
        self.get(at)?.ok_or_else(|| missing(at, name))
    }

    /// The same field, where only `expected` is right.
    pub(crate) fn expecting(mut self, wanted: &'static str) -> Self {
        if let Some(Err(ValueProblem::Type { expected, .. })) = self.0.as_mut().map(|present| &mut present.reading) {
            *expected = wanted;
        }
        self
    }

    /// The field, which is missing from then on.
    pub(crate) fn take(&mut self) -> Self {
        Field(self.0.take())
    }

    /// The value, if there is one of the right type.
    pub(crate) fn sound(self) -> Option<T> {
        self.0?.reading.ok()?
    }

    /// The same, without taking it.
    pub(crate) fn peek(&self) -> Option<&T> {
        self.0.as_ref()?.reading.as_ref().ok()?.as_ref()
    }

    /// Returns true if the key is there, whatever its value.
    pub(crate) fn has_key(&self) -> bool {
        self.0.is_some()
    }

    /// Returns true if there is a value other than null, even one of the wrong type.
    pub(crate) fn is_given(&self) -> bool {
        self.0.as_ref().is_some_and(|present| !matches!(present.reading, Ok(None)))
    }
}

impl<T: Read> ObjectMember for Field<T> {
    const IS_REQUIRED: bool = false;

    fn named(_: &'static str) -> Self {
        Field(None)
    }

    fn accept<'de, A: MapAccess<'de>>(
        &mut self,
        name: &'static str,
        key: &str,
        fields: &mut A,
    ) -> Result<bool, A::Error> {
        if key != name {
            return Ok(false);
        }
        let reading = fields.next_value_seed(JsonReader::<Option<T>>::new())?;
        self.0 = Some(Box::new(Present { name, reading }));
        Ok(true)
    }
}

described!([T: JsonSchema] Field<T>: as Option<T>);

/// A field that must be there.
#[derive(Debug)]
pub(crate) struct Required<T> {
    name: &'static str,
    field: Field<T>,
}

impl<T: Read> Required<T> {
    /// The value. `at` is where the object stands in the body.
    pub(crate) fn get(self, at: &str) -> Result<T, InvalidRequest> {
        let name = self.name;
        self.field.get(at)?.ok_or_else(|| InvalidRequest::at(join(at, name), T::MISSING))
    }

    /// Returns true if there is a value other than null, even one of the wrong type.
    pub(crate) fn is_given(&self) -> bool {
        self.field.is_given()
    }

    /// The value, if there is one.
    pub(crate) fn optional(self, at: &str) -> Result<Option<T>, InvalidRequest> {
        self.field.get(at)
    }

    /// The value, if there is one of the right type.
    pub(crate) fn sound(self) -> Option<T> {
        self.field.sound()
    }
}

impl<T: Read> ObjectMember for Required<T> {
    const IS_REQUIRED: bool = true;

    fn named(name: &'static str) -> Self {
        Required { name, field: Field(None) }
    }

    fn accept<'de, A: MapAccess<'de>>(
        &mut self,
        name: &'static str,
        key: &str,
        fields: &mut A,
    ) -> Result<bool, A::Error> {
        self.field.accept(name, key, fields)
    }
}

described!([T: JsonSchema] Required<T>: as T);

/// An array, each item of which is read or has its own problem.
#[derive(Debug)]
pub(crate) struct Items<T>(Vec<Reading<T>>);

impl<T> Default for Items<T> {
    fn default() -> Self {
        Items(Vec::new())
    }
}

impl<T> Items<T> {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Each item with its place, e.g. `messages[0]`, where the array stands at `at`.
    pub(crate) fn each(self, at: &str) -> impl Iterator<Item = Result<(String, T), InvalidRequest>> {
        self.0.into_iter().enumerate().map(move |(idx, reading)| {
            let place = format!("{at}[{idx}]");
            match reading {
                Ok(item) => Ok((place, item)),
                Err(problem) => Err(InvalidRequest::at(place, problem)),
            }
        })
    }

    /// The items of the right type.
    pub(crate) fn sound(self) -> impl Iterator<Item = T> {
        self.0.into_iter().flatten()
    }
}

impl<T> FromIterator<Reading<T>> for Items<T> {
    fn from_iter<I: IntoIterator<Item = Reading<T>>>(items: I) -> Self {
        Items(items.into_iter().collect())
    }
}

impl<T: Read> Read for Items<T> {
    const EXPECTED: &'static str = "an array";

    fn array<'de, A: SeqAccess<'de>>(items: A) -> Result<Reading<Self>, A::Error> {
        let mut read = Vec::new();
        each_item(items, |item| read.push(item))?;
        Ok(Ok(Items(read)))
    }
}

described!([T: JsonSchema] Items<T>: as Vec<T>);

/// Reads the fields of an object.
pub(crate) fn read_fields<'de, O: ObjectMember, A: MapAccess<'de>>(fields: A) -> Result<Reading<O>, A::Error> {
    let mut object = O::named("");
    each_field(fields, |key, fields| {
        if !object.accept("", &key, fields)? {
            fields.next_value_seed(JsonReader::<Skipped>::new())?.ok();
        }
        Ok(())
    })?;
    Ok(Ok(object))
}

/// Lists as required what must be there. schemars takes every field for required that is no `Option`.
pub(crate) fn mark_required(schema: &mut Schema, fields: &[(&'static str, bool)]) {
    if let Some(required) = schema.get_mut("required").and_then(serde_json::Value::as_array_mut) {
        let is_optional = |name: &str| fields.iter().any(|(field, is_required)| plain(field) == name && !is_required);
        required.retain(|name| !name.as_str().is_some_and(is_optional));
        if required.is_empty() {
            schema.remove("required");
        }
    }
}

/// A field's name in JSON.
pub(crate) const fn plain(name: &'static str) -> &'static str {
    match name.as_bytes() {
        [b'r', b'#', ..] => name.split_at(2).1,
        _ => name,
    }
}

/// Declares an object of [`ObjectMember`]s. See the module.
macro_rules! object {
    (
        $(#[$about:meta])*
        $vis:vis struct $object:ident { $($(#[$of:meta])* $field:ident: $type:ty,)* }
        $(by $tag:literal { $($variant:expr,)* })?
    ) => {
        #[derive(Debug, schemars::JsonSchema)]
        #[schemars(transform = Self::describe)]
        $(#[$about])*
        $vis struct $object {
            $($(#[$of])* pub(crate) $field: $type,)*
        }

        impl $object {
            fn describe(schema: &mut schemars::Schema) {
                let fields = [$((stringify!($field), <$type as $crate::request::field::ObjectMember>::IS_REQUIRED)),*];
                $crate::request::field::mark_required(schema, &fields);
                $($crate::request::schema::split(schema, $tag, &[$($variant),*]);)?
            }
        }

        impl $crate::request::field::ObjectMember for $object {
            const IS_REQUIRED: bool = false;

            fn named(_: &'static str) -> Self {
                $object {
                    $($field: $crate::request::field::ObjectMember::named($crate::request::field::plain(stringify!($field))),)*
                }
            }

            fn accept<'de, A: serde::de::MapAccess<'de>>(
                &mut self,
                _: &'static str,
                key: &str,
                fields: &mut A,
            ) -> Result<bool, A::Error> {
                Ok($(self.$field.accept(const { $crate::request::field::plain(stringify!($field)) }, key, fields)? ||)* false)
            }
        }

        impl $crate::request::read::Read for $object {
            const EXPECTED: &'static str = "an object";

            fn object<'de, A: serde::de::MapAccess<'de>>(
                fields: A,
            ) -> Result<$crate::request::read::Reading<Self>, A::Error> {
                $crate::request::field::read_fields(fields)
            }
        }
    };
}
pub(crate) use object;

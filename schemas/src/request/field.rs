//! The fields of a body. [`object!`](super::object) declares an object once; reading, the names in errors and the
//! description in `/openapi.json` follow from that declaration.
//!
//! ```text
//! object! {
//!     /// The description in /openapi.json.
//!     pub struct ChatBody {
//!         /// A required field.
//!         model: Required<ModelName>,
//!         /// An optional field: it may be missing or null.
//!         n: Field<Integer<1, 16>>,
//!         /// The fields of another object, next to these.
//!         #[schemars(flatten)]
//!         sampling: SamplingBody,
//!     }
//! }
//! ```
//!
//! `by "type" { variants }` after the struct describes an object whose fields depend on the word in its field `type`:
//! see [`schema`](super::schema). `skipped by path::of::function` names a function that tells whether an object is skipped
//! whatever its fields say, so none of them is noted.

use schemars::{JsonSchema, Schema};
use serde::de::{MapAccess, SeqAccess};

use super::demand::Demand;
use super::invalid::InvalidRequest;
use super::notes;
pub(crate) use super::place::join;
use super::place::{self, Inside, PathStep};
use super::read::{JsonReader, Read, Reading, ValueProblem, each_field, each_item};
use super::schema::described;

/// A member of an object: one field, or a group of fields.
pub(crate) trait ObjectMember {
    /// True for a required field.
    const IS_REQUIRED: bool;

    /// Creates the member before anything is read. A field keeps its name for errors.
    fn named(name: &'static str) -> Self;

    /// Reads the value of `key` if it belongs to this member. Returns false, and reads nothing, if it does not.
    fn accept<'de, A: MapAccess<'de>>(
        &mut self,
        name: &'static str,
        key: &str,
        fields: &mut A,
    ) -> Result<bool, A::Error>;

    /// Returns true for an object that is skipped whatever its fields say.
    fn is_skipped(&self) -> bool {
        false
    }
}

/// Creates the error for a missing field of the object at `at`.
pub(crate) fn missing(at: &str, name: &str) -> InvalidRequest {
    InvalidRequest::missing(join(at, name), "")
}

/// An optional field. Null counts as missing: many SDKs send every optional field that they know as null.
///
/// A missing field takes one machine word, because an array may have millions of empty objects.
#[derive(Debug)]
pub(crate) struct Field<T>(Option<Box<Present<T>>>);

#[derive(Debug)]
struct Present<T> {
    name: &'static str,
    reading: Reading<Option<T>>,
}

impl<T> Field<T> {
    /// Returns the value, if there is one. `at` is the path of the object. Errors: the value is wrong.
    pub(crate) fn get(self, at: &str) -> Result<Option<T>, InvalidRequest> {
        let Some(present) = self.0 else { return Ok(None) };
        present.reading.map_err(|problem| InvalidRequest::at(join(at, present.name), problem))
    }

    /// Returns the value of a field that is required here, though not in every variant of its object.
    pub(crate) fn required(self, name: &str, at: &str) -> Result<T, InvalidRequest> {
        self.get(at)?.ok_or_else(|| missing(at, name))
    }

    /// Changes the expected type in the error of a value of the wrong type.
    pub(crate) fn expecting(mut self, wanted: &'static str) -> Self {
        if let Some(Err(ValueProblem::Type { expected, .. })) = self.0.as_mut().map(|present| &mut present.reading) {
            *expected = wanted;
        }
        self
    }

    /// Moves the field out and leaves a missing one.
    pub(crate) fn take(&mut self) -> Self {
        Field(self.0.take())
    }

    /// Returns the value, ignoring one of the wrong type.
    pub(crate) fn sound(self) -> Option<T> {
        self.0?.reading.ok()?
    }

    /// Borrows the value, ignoring one of the wrong type.
    pub(crate) fn peek(&self) -> Option<&T> {
        self.0.as_ref()?.reading.as_ref().ok()?.as_ref()
    }

    /// Returns true if the body has the key, with any value or null.
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
        let _inside = Inside::of(PathStep::Field(name));
        let reading = fields.next_value_seed(JsonReader::<Option<T>>::new())?;
        self.0 = Some(Box::new(Present { name, reading }));
        Ok(true)
    }
}

described!([T: JsonSchema] Field<T>: as Option<T>);

/// A required field.
#[derive(Debug)]
pub(crate) struct Required<T> {
    name: &'static str,
    field: Field<T>,
}

impl<T: Read> Required<T> {
    /// Returns the value. `at` is the path of the object. Errors: it is missing or wrong.
    pub(crate) fn get(self, at: &str) -> Result<T, InvalidRequest> {
        let name = self.name;
        self.field.get(at)?.ok_or_else(|| T::missing(join(at, name)))
    }

    /// Returns true if there is a value other than null, even one of the wrong type.
    pub(crate) fn is_given(&self) -> bool {
        self.field.is_given()
    }

    /// Returns the value, if there is one. For fields whose absence has an error of its own.
    pub(crate) fn optional(self, at: &str) -> Result<Option<T>, InvalidRequest> {
        self.field.get(at)
    }

    /// Returns the value, ignoring one of the wrong type.
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

/// An array. Each item is a value or has a problem of its own.
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

    /// Iterates over the items and their paths, e.g. `messages[0]`. `at` is the path of the array.
    pub(crate) fn each(self, at: &str) -> impl Iterator<Item = Result<(String, T), InvalidRequest>> {
        self.0.into_iter().enumerate().map(move |(idx, reading)| {
            let place = format!("{at}[{idx}]");
            match reading {
                Ok(item) => Ok((place, item)),
                Err(problem) => Err(InvalidRequest::at(place, problem)),
            }
        })
    }

    /// Iterates over the items, ignoring those of the wrong type.
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
        let _inside = Inside::of(PathStep::Item);
        let mut read = Vec::new();
        each_item(items, |item| read.push(item))?;
        Ok(Ok(Items(read)))
    }
}

described!([T: JsonSchema] Items<T>: as Vec<T>);

/// Reads an object. Fields that it does not declare are skipped, and noted if it is a part of a body. A body that lists other
/// servers' fields declares [`Foreign`](super::foreign::Foreign).
pub(crate) fn read_fields<'de, O: ObjectMember, A: MapAccess<'de>>(fields: A) -> Result<Reading<O>, A::Error> {
    let mut object = O::named("");
    let before = notes::mark();
    each_field(fields, |key, fields| {
        if !object.accept("", &key, fields)? {
            let demand = fields.next_value_seed(JsonReader::<Demand>::new())?.unwrap_or(Demand::Other);
            place::note(&key, &demand);
        }
        Ok(())
    })?;
    if object.is_skipped() {
        notes::back_to(before);
    }
    Ok(Ok(object))
}

/// Removes optional fields from the list of required ones: to schemars, every field that is not an `Option` is
/// required.
pub(crate) fn mark_required(schema: &mut Schema, fields: &[(&'static str, bool)]) {
    if let Some(required) = schema.get_mut("required").and_then(serde_json::Value::as_array_mut) {
        let is_optional = |name: &str| fields.iter().any(|(field, is_required)| plain(field) == name && !is_required);
        required.retain(|name| !name.as_str().is_some_and(is_optional));
        if required.is_empty() {
            schema.remove("required");
        }
    }
}

/// Returns a field's name in JSON: `type` for `r#type`.
pub(crate) const fn plain(name: &'static str) -> &'static str {
    match name.as_bytes() {
        [b'r', b'#', ..] => name.split_at(2).1,
        _ => name,
    }
}

/// Declares an object of [`ObjectMember`]s: see the module's documentation.
macro_rules! object {
    (
        $(#[$about:meta])*
        $vis:vis struct $object:ident { $($(#[$of:meta])* $field:ident: $type:ty,)* }
        $(by $tag:literal { $($variant:expr,)* })?
        $(skipped by $is_skipped:path)?
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

            $(fn is_skipped(&self) -> bool {
                $is_skipped(self)
            })?
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

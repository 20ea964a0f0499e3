//! Describes objects whose fields depend on the word in one of them, such as `type` or `role`.
//!
//! Such an object is read as one flat type, because the word may come last. `/openapi.json` shows its variants: the
//! fields that each requires and those that it may have.

use schemars::Schema;
use serde_json::{Map, Value, json};

/// One variant of an object.
#[derive(Clone, Copy)]
pub(crate) struct Variant {
    /// The words that select the variant.
    pub(crate) words: &'static [&'static str],
    /// If not empty, any word except these selects it instead.
    pub(crate) but: &'static [&'static str],
    /// A missing word selects it, too.
    pub(crate) is_default: bool,
    /// Required fields that must not be null.
    pub(crate) needs: &'static [&'static str],
    /// Required fields that may be null.
    pub(crate) needs_key: &'static [&'static str],
    /// Optional fields.
    pub(crate) may_have: &'static [&'static str],
    /// For required fields with several forms: the indices of the forms that the variant allows.
    pub(crate) forms: &'static [(&'static str, &'static [usize])],
}

impl Variant {
    pub(crate) const NEW: Variant =
        Variant { words: &[], but: &[], is_default: false, needs: &[], needs_key: &[], may_have: &[], forms: &[] };
}

/// Splits the flat description of an object into variants, selected by the field `tag`.
pub(crate) fn split(schema: &mut Schema, tag: &str, variants: &[Variant]) {
    let object = schema.ensure_object();
    let Some(Value::Object(properties)) = object.remove("properties") else { return };
    object.remove("type");
    object.remove("required");
    match variants {
        [one] => {
            let Value::Object(one) = one.schema(tag, &properties) else { return };
            object.extend(one);
        }
        several => {
            let variants: Vec<Value> = several.iter().map(|variant| variant.schema(tag, &properties)).collect();
            object.insert("anyOf".to_owned(), variants.into());
        }
    }
}

/// Implements `JsonSchema` for a type: like another type, or with a schema of its own. A `named` type becomes a
/// component of `/openapi.json`; others are described in place. The type's generic parameters come first.
macro_rules! described {
    ([$($generics:tt)*] $type:ty: as $other:ty) => {
        impl<$($generics)*> schemars::JsonSchema for $type {
            fn inline_schema() -> bool {
                <$other>::inline_schema()
            }

            fn schema_name() -> std::borrow::Cow<'static, str> {
                <$other>::schema_name()
            }

            fn schema_id() -> std::borrow::Cow<'static, str> {
                <$other>::schema_id()
            }

            fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
                <$other>::json_schema(generator)
            }
        }
    };
    ([$($generics:tt)*] $type:ty: |$generator:ident| $schema:expr) => {
        impl<$($generics)*> schemars::JsonSchema for $type {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> std::borrow::Cow<'static, str> {
                std::any::type_name::<Self>().into()
            }

            fn json_schema($generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
                $schema
            }
        }
    };
    ([$($generics:tt)*] $type:ty: named $name:expr, |$generator:ident| $schema:expr) => {
        impl<$($generics)*> schemars::JsonSchema for $type {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                $name.into()
            }

            fn json_schema($generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
                $schema
            }
        }
    };
}
pub(crate) use described;

/// Declares a type that only describes some variants of an object and is never read.
macro_rules! view {
    ($(#[doc = $about:literal])* $name:ident of $object:ty: $($variant:expr),* $(,)?) => {
        pub(crate) enum $name {}

        $crate::request::schema::described!([] $name: named stringify!($name), |generator| {
            let mut schema = <$object as schemars::JsonSchema>::json_schema(generator);
            schema.insert("description".to_owned(), concat!($($about),*).trim().into());
            $crate::request::schema::split(&mut schema, "type", &[$($variant),*]);
            schema
        });
    };
}
pub(crate) use view;

impl Variant {
    fn schema(&self, tag: &str, properties: &Map<String, Value>) -> Value {
        let property = |name: &str| properties.get(name).cloned().unwrap_or_else(|| json!({}));
        let mut own = Map::new();
        let mut required: Vec<&str> = Vec::new();
        let mut words: Vec<Value> = self.words.iter().map(|&word| word.into()).collect();
        let mut tag_schema = without_null(property(tag));
        if self.is_default {
            words.push(Value::Null);
            tag_schema["type"] = json!(["string", "null"]);
        } else {
            required.push(tag);
        }
        if self.but.is_empty() {
            tag_schema["enum"] = words.into();
        } else {
            tag_schema["not"] = json!({ "enum": self.but });
        }
        own.insert(tag.to_owned(), tag_schema);
        for &name in self.needs {
            let forms = self.forms.iter().find(|(field, _)| *field == name).map(|(_, forms)| *forms);
            own.insert(name.to_owned(), with_forms(without_null(property(name)), forms));
        }
        for &name in self.needs_key.iter().chain(self.may_have) {
            own.insert(name.to_owned(), property(name));
        }
        required.extend(self.needs.iter().chain(self.needs_key));
        let mut schema = json!({ "type": "object", "properties": own });
        if !required.is_empty() {
            schema["required"] = json!(required);
        }
        schema
    }
}

/// Keeps only the forms of a schema at these indices.
fn with_forms(mut schema: Value, places: Option<&[usize]>) -> Value {
    let Some(places) = places else { return schema };
    if let Some(forms) = schema.get_mut("anyOf").and_then(Value::as_array_mut) {
        let mut place = 0..;
        forms.retain(|_| place.next().is_some_and(|place| places.contains(&place)));
    }
    without_null(schema)
}

/// Removes null from a schema. If one form is left, it becomes the schema.
fn without_null(mut schema: Value) -> Value {
    let is_null = |schema: &Value| schema["type"] == "null";
    if let Some(kinds) = schema.get_mut("type").and_then(Value::as_array_mut) {
        kinds.retain(|kind| kind != "null");
        if let [kind] = &kinds[..] {
            schema["type"] = kind.clone();
        }
    }
    if let Some(words) = schema.get_mut("enum").and_then(Value::as_array_mut) {
        words.retain(|word| !word.is_null());
    }
    if let Some(mut forms) = schema.get_mut("anyOf").and_then(Value::as_array_mut).map(std::mem::take) {
        forms.retain(|form| !is_null(form));
        match <[Value; 1]>::try_from(forms) {
            Ok([Value::Object(form)]) => {
                let outer = schema.as_object_mut();
                if let Some(outer) = outer {
                    outer.remove("anyOf");
                    for (key, value) in form {
                        outer.entry(key).or_insert(value);
                    }
                }
            }
            Ok([form]) => schema["anyOf"] = json!([form]),
            Err(forms) => schema["anyOf"] = forms.into(),
        }
    }
    schema
}

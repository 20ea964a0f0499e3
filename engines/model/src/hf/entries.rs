//! JSON objects with many fields, read without a tree of values: one byte of a file may become some hundred of a tree.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// The most fields. Mixture-of-experts models that store each expert as a tensor have some 10⁵ tensors.
pub(super) const MAX_ENTRIES: usize = 1 << 19;

/// The longest name, bytes. Known ones have less than 100.
const MAX_NAME_BYTES: usize = 256;

/// The most dimensions of a tensor.
const MAX_DIMS: usize = 8;

/// The key of a header's texts, which nothing here reads.
const METADATA: &str = "__metadata__";

/// The fields of an object in their order, without `__metadata__`.
pub(super) struct NamedEntries<T>(pub(super) Vec<(String, T)>);

/// A bounded name.
pub(super) struct Name(pub(super) String);

/// A bounded list of dimensions.
pub(super) struct Dims(pub(super) Vec<u64>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for NamedEntries<T> {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        json.deserialize_map(NamedEntriesVisitor(PhantomData))
    }
}

struct NamedEntriesVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for NamedEntriesVisitor<T> {
    type Value = NamedEntries<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<NamedEntries<T>, M::Error> {
        let mut entries = Vec::new();
        while let Some(Name(name)) = map.next_key()? {
            if name == METADATA {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            entries.push((name, map.next_value()?));
            if entries.len() > MAX_ENTRIES {
                return Err(M::Error::custom(format_args!("more than {MAX_ENTRIES} entries")));
            }
        }
        Ok(NamedEntries(entries))
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        json.deserialize_str(NameVisitor)
    }
}

struct NameVisitor;

impl Visitor<'_> for NameVisitor {
    type Value = Name;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Name, E> {
        match name.len() {
            0..=MAX_NAME_BYTES => Ok(Name(name.to_owned())),
            n_bytes => Err(E::custom(format_args!("a name of {n_bytes} bytes, and {MAX_NAME_BYTES} are allowed"))),
        }
    }
}

impl<'de> Deserialize<'de> for Dims {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        json.deserialize_seq(DimsVisitor)
    }
}

struct DimsVisitor;

impl<'de> Visitor<'de> for DimsVisitor {
    type Value = Dims;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of dimensions")
    }

    fn visit_seq<S: SeqAccess<'de>>(self, mut list: S) -> Result<Dims, S::Error> {
        let mut dims = Vec::new();
        while let Some(dim) = list.next_element()? {
            if dims.len() == MAX_DIMS {
                return Err(S::Error::custom(format_args!("a shape with more than {MAX_DIMS} dimensions")));
            }
            dims.push(dim);
        }
        Ok(Dims(dims))
    }
}

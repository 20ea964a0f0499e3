//! The members of an object, read so that those that nothing depends on cannot spoil the others.

use std::borrow::Cow;

use serde::Deserialize;
use serde::de::value::{CowStrDeserializer, MapAccessDeserializer};
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess};
use serde_json::value::RawValue;

use super::is_nothing;

/// An object of a reply.
pub(crate) trait ForeignObject<'de>: Deserialize<'de> {
    /// The members that may come twice: the last one that holds something counts. Any other that does is an error.
    const ASIDE: &'static [&'static str];
}

/// Reads an object. A member whose name is no text is skipped.
pub(super) fn read<'de, T: ForeignObject<'de>, A: MapAccess<'de>>(object: A) -> Result<T, A::Error> {
    T::deserialize(MapAccessDeserializer::new(Members { object, aside: T::ASIDE, kept: Vec::new(), next: None }))
}

struct Members<'de, A> {
    object: A,
    aside: &'static [&'static str],
    /// The members of `aside` that have come. They are read after all others.
    kept: Vec<(&'static str, &'de RawValue)>,
    /// The value of the one of them that is read.
    next: Option<&'de RawValue>,
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Members<'de, A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, A::Error> {
        while let Some(name) = self.object.next_key::<&RawValue>()? {
            let Some(name) = text_of(name.get()) else {
                self.object.next_value::<IgnoredAny>()?;
                continue;
            };
            let Some(aside) = self.aside.iter().find(|aside| **aside == name) else {
                return seed.deserialize(CowStrDeserializer::new(name)).map(Some);
            };
            let value: &RawValue = self.object.next_value()?;
            match self.kept.iter_mut().find(|(name, _)| name == aside) {
                Some((_, kept)) if !is_nothing(value.get()) => *kept = value,
                Some(_) => {}
                None => self.kept.push((aside, value)),
            }
        }
        let Some((name, value)) = self.kept.pop() else { return Ok(None) };
        self.next = Some(value);
        seed.deserialize(CowStrDeserializer::new(Cow::Borrowed(name))).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        match self.next.take() {
            Some(value) => seed.deserialize(value).map_err(A::Error::custom),
            None => self.object.next_value_seed(seed),
        }
    }
}

/// The text that a JSON string means. `None`: it has half a character.
fn text_of(json: &str) -> Option<Cow<'_, str>> {
    let inside = json.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'))?;
    if inside.contains('\\') { serde_json::from_str(json).ok().map(Cow::Owned) } else { Some(Cow::Borrowed(inside)) }
}

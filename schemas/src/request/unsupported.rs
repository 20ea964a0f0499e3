//! Unsupported fields that would change the answer. They are refused by name, because ignoring them would silently give
//! a wrong answer. A field leaves its list when the feature is built.

use std::marker::PhantomData;

use serde::de::{MapAccess, SeqAccess};
use serde_json::Number;

use super::field::{ObjectMember, join};
use super::invalid::InvalidRequest;
use super::read::{JsonReader, Read, Reading, Skipped};

/// A field that is refused.
#[derive(Debug)]
pub(crate) struct RefusedField {
    pub(crate) field: &'static str,
    /// The feature, for the error message.
    pub(crate) feature: &'static str,
    /// The number that switches the feature off: front ends send every field that they know, most of them switched off.
    /// `None`: every value is refused.
    pub(crate) off: Option<f64>,
}

/// A list of refused fields.
pub(crate) trait RefusedFields: std::fmt::Debug {
    const FIELDS: &'static [RefusedField];
}

/// The fields of a body that are on the list `L`. `/openapi.json` does not mention them.
#[derive(Debug)]
pub(crate) struct Unsupported<L> {
    /// The index in the list of the first field that asks for its feature.
    first: Option<usize>,
    list: PhantomData<L>,
}

impl<L: RefusedFields> Unsupported<L> {
    /// Refuses the first field that asks for its feature. `at` is the path of the object with the fields.
    pub(crate) fn check(self, at: &str) -> Result<(), InvalidRequest> {
        match self.first.map(|idx| &L::FIELDS[idx]) {
            Some(refused) => Err(InvalidRequest::unsupported(join(at, refused.field), refused.feature)),
            None => Ok(()),
        }
    }
}

impl<L: RefusedFields> ObjectMember for Unsupported<L> {
    const IS_REQUIRED: bool = false;

    fn named(_: &'static str) -> Self {
        Unsupported { first: None, list: PhantomData }
    }

    fn accept<'de, A: MapAccess<'de>>(&mut self, _: &'static str, key: &str, fields: &mut A) -> Result<bool, A::Error> {
        let Some(idx) = L::FIELDS.iter().position(|refused| refused.field == key) else { return Ok(false) };
        let demand = fields.next_value_seed(JsonReader::<Demand>::new())?;
        if demand.is_ok_and(|demand| demand.is_one(L::FIELDS[idx].off)) {
            self.first = Some(self.first.map_or(idx, |first| first.min(idx)));
        }
        Ok(true)
    }
}

/// Tells if a value of any type requests a feature.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Demand {
    /// Null.
    Missing,
    /// `false`, or an empty string, array or object.
    Off,
    /// A number, which may mean off.
    Number(f64),
    /// Any other value.
    On,
}

impl Demand {
    /// Returns true if the value asks for the feature. The number `off` does not.
    pub(crate) fn is_one(self, off: Option<f64>) -> bool {
        match self {
            Demand::Missing => false,
            Demand::Off => off.is_none(),
            Demand::Number(number) => off != Some(number),
            Demand::On => true,
        }
    }

    fn unless(is_off: bool) -> Reading<Demand> {
        Ok(if is_off { Demand::Off } else { Demand::On })
    }
}

impl Read for Demand {
    const EXPECTED: &'static str = "anything";
    const ROOM: usize = 0;

    fn null() -> Reading<Self> {
        Ok(Demand::Missing)
    }

    fn boolean(value: bool) -> Reading<Self> {
        Demand::unless(!value)
    }

    fn number(value: &Number) -> Reading<Self> {
        Ok(value.as_f64().map_or(Demand::On, Demand::Number))
    }

    fn string(value: &str) -> Reading<Self> {
        Demand::unless(value.is_empty())
    }

    fn array<'de, A: SeqAccess<'de>>(mut items: A) -> Result<Reading<Self>, A::Error> {
        let is_empty = items.next_element_seed(JsonReader::<Skipped>::new())?.is_none();
        Skipped::array(items)?.ok();
        Ok(Demand::unless(is_empty))
    }

    fn object<'de, A: MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
        let mut is_empty = true;
        super::read::each_field(fields, |_, fields| {
            is_empty = false;
            fields.next_value_seed(JsonReader::<Skipped>::new()).map(drop)
        })?;
        Ok(Demand::unless(is_empty))
    }
}

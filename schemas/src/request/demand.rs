//! Tells whether a value of any type asks for something.

use serde::de::{MapAccess, SeqAccess};
use serde_json::Number;

use super::read::{JsonReader, Read, Reading, Skipped};

/// The longest word that can switch a feature off.
const MAX_WORD: usize = 32;

/// What a value asks for, without knowing what its field means.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Demand {
    /// Null.
    Missing,
    /// `false`, or an empty string, array or object.
    Empty,
    /// `true`.
    True,
    /// A number.
    Number(f64),
    /// A short text.
    Word(Box<str>),
    /// Any other value.
    Other,
}

/// The values of a field that ask for nothing: front ends send every field that they know, most of them switched off.
/// Null is always one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Off {
    /// `false`, and empty strings, arrays and objects.
    pub(crate) empty: bool,
    /// `true`.
    pub(crate) truth: bool,
    pub(crate) numbers: &'static [f64],
    pub(crate) words: &'static [&'static str],
}

impl Off {
    /// Every value asks for the feature.
    pub(crate) const NEVER: Off = Off { empty: false, truth: false, numbers: &[], words: &[] };
    /// `false`, 0, and what is empty.
    pub(crate) const ZERO: Off = Off { empty: true, numbers: &[0.0], ..Off::NEVER };
    /// The same, or the number 1.
    pub(crate) const ONE: Off = Off { empty: true, numbers: &[1.0], ..Off::NEVER };
    /// The same, or any number that limits nothing.
    pub(crate) const UNLIMITED: Off = Off { empty: true, numbers: &[0.0, -1.0], ..Off::NEVER };
    /// The same, or -1. A budget of 0 asks for nothing at all.
    pub(crate) const BUDGET: Off = Off { empty: true, numbers: &[-1.0], ..Off::NEVER };
    /// `true`, which is the default.
    pub(crate) const TRUE: Off = Off { truth: true, ..Off::NEVER };
}

impl Demand {
    /// Returns true if the value asks for the feature.
    pub(crate) fn is_one(&self, off: &Off) -> bool {
        match self {
            Demand::Missing => false,
            Demand::Empty => !off.empty,
            Demand::True => !off.truth,
            Demand::Number(number) => !off.numbers.contains(number),
            Demand::Word(word) => !off.words.contains(&&**word),
            Demand::Other => true,
        }
    }

    fn unless(is_empty: bool) -> Reading<Demand> {
        Ok(if is_empty { Demand::Empty } else { Demand::Other })
    }
}

impl Read for Demand {
    const EXPECTED: &'static str = "anything";
    const ROOM: usize = 0;

    fn null() -> Reading<Self> {
        Ok(Demand::Missing)
    }

    fn boolean(value: bool) -> Reading<Self> {
        Ok(if value { Demand::True } else { Demand::Empty })
    }

    fn number(value: &Number) -> Reading<Self> {
        Ok(value.as_f64().map_or(Demand::Other, Demand::Number))
    }

    fn string(value: &str) -> Reading<Self> {
        match value.len() {
            1..=MAX_WORD => Ok(Demand::Word(value.into())),
            n_bytes => Demand::unless(n_bytes == 0),
        }
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

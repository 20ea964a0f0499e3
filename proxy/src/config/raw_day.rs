//! A day as the file has it: `2026-12-31`, with or without quotes.

use std::borrow::Cow;
use std::fmt;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::utc_day::UtcDay;

/// A day (UTC).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawDay(pub UtcDay);

/// The form of a day, for messages.
pub(super) const EXPECTED: &str = "a day such as 2026-12-31";

impl JsonSchema for RawDay {
    fn schema_name() -> Cow<'static, str> {
        "RawDay".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "format": "date", "x-expected": EXPECTED })
    }
}

impl<'de> Deserialize<'de> for RawDay {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<RawDay, D::Error> {
        deserializer.deserialize_any(DayVisitor)
    }
}

struct DayVisitor;

impl<'de> Visitor<'de> for DayVisitor {
    type Value = RawDay;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(EXPECTED)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<RawDay, E> {
        text.parse().map(RawDay).map_err(|_| E::custom(format_args!("must be {EXPECTED}")))
    }

    /// TOML's own dates come as a map with one entry.
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawDay, A::Error> {
        match map.next_entry::<String, String>()? {
            Some((_, text)) => self.visit_str(&text),
            None => Err(A::Error::custom(format_args!("must be {EXPECTED}"))),
        }
    }
}

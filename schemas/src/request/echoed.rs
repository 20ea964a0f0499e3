//! A value that is read, and that replies repeat.

use serde::de::MapAccess;
use serde_json::{Map, Value};

use super::read::{Read, Reading, ValueProblem, read_written};
use super::schema::described;
use crate::written_number::AsWritten;

/// A value that replies repeat exactly as the client wrote it.
#[derive(Debug)]
pub(crate) struct Echoed<T> {
    pub(crate) read: T,
    pub(crate) written: Value,
}

impl<T: Read> Read for Echoed<T> {
    const EXPECTED: &'static str = T::EXPECTED;

    fn wrong(is: &'static str) -> ValueProblem {
        T::wrong(is)
    }

    fn string(value: &str) -> Reading<Self> {
        T::string(value).map(|read| Echoed { read, written: value.into() })
    }

    fn object<'de, A: MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
        let written = Map::object(fields)?.map(Value::Object);
        Ok(written.and_then(|written| {
            let text = AsWritten(&written).to_string();
            let read = read_written(&text).unwrap_or_else(|| Err(T::wrong("an object")))?;
            Ok(Echoed { read, written })
        }))
    }
}

described!([T: schemars::JsonSchema] Echoed<T>: as T);

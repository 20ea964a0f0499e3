//! Numbers that neither an integer nor a float of 64 bits holds, such as `12345678901234567890123`, `1e999` and `1e-400`.
//!
//! A [`Value`] would keep the nearest float. Where a client's JSON is passed on (schemas, arguments of calls, variables of
//! templates), such a number is an object with one key and the number's text instead, between processes, too. [`AsWritten`]
//! writes the number again: for upstreams, prompts and replies. Objects of clients with this key are refused.
//!
//! serde_json parses a number before anybody sees its text, so `mark` turns such numbers into strings before a text is
//! read. Its feature `arbitrary_precision` would turn all numbers of all types into texts, and serde's buffered ones
//! (`flatten`, `untagged`) into objects.

use std::borrow::Cow;
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::LazyLock;

use serde::de::IgnoredAny;
use serde::ser::Error;
use serde::{Serialize, Serializer};
use serde_json::value::RawValue;
use serde_json::{Map, Number, Value, json};

/// The key of such a number's text.
const KEY: &str = "$baton.number";

/// What a string begins with that stands for a number. Random, so no client's string does.
static MARK: LazyLock<String> = LazyLock::new(|| format!("{KEY} {:016x} ", RandomState::new().build_hasher().finish()));

/// The most such numbers in one text. Each takes 40 times its bytes.
const MAX_MARKED: usize = 1 << 16;

/// Every float keeps as many digits.
const SURELY_KEPT: usize = 15;

/// A longer fraction is passed on as a text, even if its digits are zeros.
const LONGEST_KEPT: usize = 400;

/// JSON in which such numbers are marked strings.
pub(crate) struct MarkedJson<'j> {
    pub(crate) json: Cow<'j, [u8]>,
    pub(crate) n_marked: usize,
}

/// Marks the numbers of a JSON text, which may be invalid. `None`: they are more than [`MAX_MARKED`].
pub(crate) fn mark(json: &[u8]) -> Option<MarkedJson<'_>> {
    let (mut marked, mut n_marked) = (Vec::new(), 0);
    let (mut copied, mut at) = (0, 0);
    while let Some(byte) = json.get(at) {
        let begun = at;
        match byte {
            b'"' => at += string_bytes(&json[at..]),
            b'-' | b'0'..=b'9' => at += number_bytes(&json[at..]),
            _ => at += 1,
        }
        let number = &json[begun..at];
        if *byte != b'"' && !is_kept(number) {
            n_marked += 1;
            for part in [&json[copied..begun], b"\"", MARK.as_bytes(), number, b"\""] {
                marked.extend_from_slice(part);
            }
            copied = at;
        }
        if n_marked > MAX_MARKED {
            return None;
        }
    }
    if n_marked == 0 {
        return Some(MarkedJson { json: json.into(), n_marked });
    }
    marked.extend_from_slice(&json[copied..]);
    Some(MarkedJson { json: marked.into(), n_marked })
}

/// The bytes of the string that a text begins with.
fn string_bytes(json: &[u8]) -> usize {
    let mut at = 1;
    while let Some(byte) = json.get(at) {
        match byte {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    json.len()
}

/// The bytes of the number that a text begins with.
fn number_bytes(json: &[u8]) -> usize {
    json.iter().take_while(|byte| matches!(byte, b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-')).count()
}

/// Returns true if a [`Value`] keeps a number. The parser finds the mistake of what is none.
fn is_kept(token: &[u8]) -> bool {
    let has_exponent = token.iter().any(|byte| matches!(byte, b'e' | b'E'));
    if token.len() <= SURELY_KEPT && !has_exponent {
        return true;
    }
    let text = str::from_utf8(token).unwrap_or_default();
    let is_same = if has_exponent || token.contains(&b'.') {
        keeps(text)
    } else {
        text.parse::<u64>().is_ok() || text.parse::<i64>().is_ok()
    };
    is_same || !is_number(text)
}

/// Returns true if a float keeps a fraction.
fn keeps(fraction: &str) -> bool {
    if fraction.len() > LONGEST_KEPT {
        return false;
    }
    let Ok(float) = fraction.parse::<f64>() else { return false };
    // As most are written.
    float.to_string() == fraction || float.is_finite() && Decimal::of(fraction) == Decimal::of(&format!("{float:e}"))
}

fn is_number(text: &str) -> bool {
    let has_ends =
        text.starts_with(|c: char| c == '-' || c.is_ascii_digit()) && text.ends_with(|c: char| c.is_ascii_digit());
    has_ends && serde_json::from_str::<IgnoredAny>(text).is_ok()
}

/// The value of a number: digits without zeros at the ends, and the power of ten of the last one.
#[derive(PartialEq)]
struct Decimal {
    is_negative: bool,
    digits: String,
    exponent: i64,
}

impl Decimal {
    /// `None`: the exponent has more than 64 bits.
    fn of(number: &str) -> Option<Decimal> {
        let (mantissa, exponent) = number.split_once(['e', 'E']).unwrap_or((number, "0"));
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let all = format!("{}{fraction}", whole.trim_start_matches('-'));
        let kept = all.trim_end_matches('0');
        let digits = kept.trim_start_matches('0').to_owned();
        let n_shifted = (all.len() - kept.len()) as i64 - fraction.len() as i64;
        let exponent = exponent.parse::<i64>().ok()?.checked_add(n_shifted)?;
        let exponent = if digits.is_empty() { 0 } else { exponent };
        Some(Decimal { is_negative: whole.starts_with('-'), digits, exponent })
    }
}

impl MarkedJson<'_> {
    /// The value of the whole text. `None`: it is no JSON, or has a key that clients must not use.
    pub(crate) fn value(&self) -> Option<Value> {
        let mut value = serde_json::from_slice(&self.json).ok()?;
        restore(&mut value).then_some(value)
    }
}

/// Returns a value's numbers to it. Returns false if it has a key that clients must not use.
fn restore(value: &mut Value) -> bool {
    match value {
        Value::String(text) => {
            if let Some(number) = marked(text).map(value_of) {
                *value = number;
            }
            true
        }
        Value::Array(items) => items.iter_mut().all(restore),
        Value::Object(fields) => fields.iter_mut().all(|(key, field)| key_problem(key).is_none() && restore(field)),
        Value::Null | Value::Bool(_) | Value::Number(_) => true,
    }
}

/// The number that a string stands for, if it is a marked one.
pub(crate) fn marked(text: &str) -> Option<&str> {
    text.strip_prefix(MARK.as_str())
}

/// What is wrong with a key that no client's object may have.
pub(crate) fn key_problem(key: &str) -> Option<&'static str> {
    if key == KEY { Some("the key $baton.number is reserved") } else { marked(key).map(|_| "key must be a string") }
}

pub(crate) fn value_of(number: &str) -> Value {
    json!({ KEY: number })
}

/// Reads JSON with all digits of its numbers. `None`: it is none, or its numbers do not fit.
pub fn parse(json: &str) -> Option<Value> {
    mark(json.as_bytes())?.value()
}

/// Returns the text of a number that 64 bits do not hold.
pub fn text_of(value: &Value) -> Option<&str> {
    let fields = value.as_object().filter(|fields| fields.len() == 1)?;
    // Another process may have sent it, and it is written without quotes.
    fields.get(KEY)?.as_str().filter(|text| is_number(text))
}

/// Returns the nearest number of 64 bits, if a value is a number.
pub(crate) fn nearest(value: &Value) -> Option<Number> {
    match text_of(value) {
        Some(text) => Number::from_f64(text.parse::<f64>().ok()?.clamp(f64::MIN, f64::MAX)),
        None => value.as_number().cloned(),
    }
}

/// Writes JSON with all digits of its numbers.
pub struct AsWritten<'v, T>(pub &'v T);

impl Serialize for AsWritten<'_, Value> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Value::Array(items) => AsWritten(items).serialize(serializer),
            Value::Object(fields) => match text_of(self.0) {
                Some(text) => RawValue::from_string(text.to_owned()).map_err(S::Error::custom)?.serialize(serializer),
                None => AsWritten(fields).serialize(serializer),
            },
            other => other.serialize(serializer),
        }
    }
}

impl Serialize for AsWritten<'_, Vec<Value>> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(AsWritten))
    }
}

impl Serialize for AsWritten<'_, Map<String, Value>> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, AsWritten(value))))
    }
}

impl fmt::Display for AsWritten<'_, Value> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}

/// Writes a field as [`AsWritten`] does.
pub(crate) fn as_written<T: 'static, S: Serializer>(field: &T, serializer: S) -> Result<S::Ok, S::Error>
where
    for<'v> AsWritten<'v, T>: Serialize,
{
    AsWritten(field).serialize(serializer)
}

/// Returns the arguments of a call as JSON; `null` if it has none.
pub fn arguments_text(call: &Value) -> String {
    let arguments = call.get("function").unwrap_or(call).get("arguments");
    AsWritten(arguments.unwrap_or(&Value::Null)).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_with_the_digits_that_they_were_read_with() {
        for json in [
            r#"{"id":12345678901234567890123}"#,
            r#"{"a":[1,{"b/c":-12345678901234567890123},"12345678901234567890123"],"d":18446744073709551616}"#,
            r#"[1e999,-1e999,1e-400,0.1234567890123456789,1E+400,10000000000000000000000]"#,
            r#"{"\"":1e999,"a\\":1e-999,"[1e999":"\\\"1e999"}"#,
            "1e999",
        ] {
            assert_eq!(AsWritten(&parse(json).unwrap()).to_string(), json);
        }
        let long = format!("[{}]", "9".repeat(400));
        assert_eq!(AsWritten(&parse(&long).unwrap()).to_string(), long);
    }

    #[test]
    fn numbers_that_64_bits_hold_stay_numbers() {
        for json in [
            "18446744073709551615",
            "-9223372036854775808",
            "0.30000000000000004",
            "1.7976931348623157e308",
            "5e-324",
            "1e22",
            "-0.0",
            "0e999",
            "100000000000000000000000e-20",
            "0.1000000000000000000000000",
            "1.0",
            "2E2",
            "-1e-7",
        ] {
            assert!(parse(json).unwrap().is_number(), "{json}");
        }
    }

    #[test]
    fn what_is_no_json_and_what_stands_for_a_number_is_refused() {
        let own_key = format!(r#"{{"a":[{{"{KEY}":"1e999"}}]}}"#);
        for json in [
            "01234567890123456789012",
            "1e",
            "-",
            "1e999e",
            "1.e999",
            "{1e999:1}",
            "[1e999",
            "\"1e999",
            "1e999 1",
            "--1e999",
            &own_key,
            &own_key.replace('$', "\\u0024"),
        ] {
            assert_eq!(parse(json), None, "{json}");
        }
        // Never written without quotes.
        for text in ["", "1,2", "1 ", "\"", "NaN", "{}", "1]"] {
            let value = value_of(text);
            assert_eq!((text_of(&value), AsWritten(&value).to_string()), (None, value.to_string()));
        }
        let many = |n| format!("[{}1e999]", "1e999,".repeat(n - 1));
        assert!(parse(&many(MAX_MARKED)).is_some() && parse(&many(MAX_MARKED + 1)).is_none());
    }
}

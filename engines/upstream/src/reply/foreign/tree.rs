//! Whole replies as trees, of which a value that no tree can hold spoils nothing else.

use serde::de::IgnoredAny;
use serde_json::Value;

use super::without_mark;

/// Reads JSON. A number beyond all ranges is null, and a text with half a character is empty. The caller bounds how many values
/// there are.
pub(crate) fn tree(json: &[u8]) -> Result<Value, serde_json::Error> {
    let json = without_mark(json);
    serde_json::from_slice(json).or_else(|error| match with_readable_values(json) {
        Some(readable) => serde_json::from_slice(&readable),
        None => Err(error),
    })
}

/// The JSON with something else for values that cannot be read. `None`: there are none.
fn with_readable_values(json: &[u8]) -> Option<Vec<u8>> {
    let mut readable = Vec::with_capacity(json.len());
    let mut is_other = false;
    let mut rest = json;
    while let Some(first) = rest.first() {
        let (n_bytes, replacement) = match first {
            b'"' => {
                let n_bytes = string_bytes(rest);
                let text = &rest[..n_bytes];
                let is_json = serde_json::from_slice::<IgnoredAny>(text).is_ok();
                (n_bytes, (is_json && serde_json::from_slice::<String>(text).is_err()).then_some("\"\""))
            }
            b'-' | b'0'..=b'9' => {
                let is_part = |byte: &u8| matches!(byte, b'-' | b'+' | b'.' | b'e' | b'E' | b'0'..=b'9');
                let n_bytes = rest.iter().take_while(|byte| is_part(byte)).count();
                (n_bytes, is_beyond_range(&rest[..n_bytes]).then_some("null"))
            }
            _ => (1, None),
        };
        let (value, after) = rest.split_at(n_bytes);
        readable.extend_from_slice(replacement.map_or(value, str::as_bytes));
        is_other |= replacement.is_some();
        rest = after;
    }
    is_other.then_some(readable)
}

/// Returns true for a number of JSON that no tree can hold.
fn is_beyond_range(number: &[u8]) -> bool {
    serde_json::from_slice::<IgnoredAny>(number).is_ok() && serde_json::from_slice::<Value>(number).is_err()
}

/// The bytes of the string that begins here, with its quotes.
fn string_bytes(json: &[u8]) -> usize {
    let mut is_escaped = false;
    let end = json.iter().skip(1).position(|byte| {
        let is_end = *byte == b'"' && !is_escaped;
        is_escaped = *byte == b'\\' && !is_escaped;
        is_end
    });
    end.map_or(json.len(), |at| at + 2)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_value_that_cannot_be_read_spoils_no_other() {
        for (text, expected) in [
            (r#"{"a":1e999,"b":[1.5,"x"]}"#, json!({ "a": null, "b": [1.5, "x"] })),
            (r#"{"a":"\ud800","b\\\"":"-1e999"}"#, json!({ "a": "", "b\\\"": "-1e999" })),
            (r#"{"\ud800":[-1e999],"b":2}"#, json!({ "": [null], "b": 2 })),
            (r#"[1,"a\"b",true]"#, json!([1, "a\"b", true])),
        ] {
            assert_eq!(tree(text.as_bytes()).unwrap(), expected, "{text}");
        }
        for broken in [r#"{"a":1e999"#, r#"{"a":"\ud800}"#, "[1e999,]", "", "nul"] {
            assert!(tree(broken.as_bytes()).is_err(), "{broken}");
        }
        // What is no JSON number stays an error.
        assert!(tree(b"[1..2,01]").is_err());
    }
}

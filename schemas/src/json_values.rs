//! How much memory JSON takes as a tree of values. A tree takes up to 70 times the memory of its text, so the number of
//! values is limited before a tree is built.

use serde_json::Value;

/// Counts the values and keys of a JSON text: an upper bound, also for invalid JSON.
pub fn count_values(json: &[u8]) -> usize {
    let mut is_in_string = false;
    let mut is_escaped = false;
    let mut n = 1;
    for byte in json {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_in_string => is_escaped = true,
            b'"' => is_in_string = !is_in_string,
            b',' | b':' | b'[' | b'{' if !is_in_string => n += 1,
            _ => {}
        }
    }
    n
}

/// Returns the bytes that a tree of values takes, itself included. Reads the whole tree.
pub fn memory_bytes(value: &Value) -> usize {
    /// The hash of a key and its place in the table.
    const ENTRY: usize = 3 * size_of::<usize>();
    let inside = match value {
        Value::String(text) => text.capacity(),
        Value::Array(items) => {
            let unused = items.capacity() - items.len();
            unused * size_of::<Value>() + items.iter().map(memory_bytes).sum::<usize>()
        }
        Value::Object(fields) => {
            let key = |key: &String| size_of::<String>() + key.capacity() + ENTRY;
            fields.iter().map(|(name, field)| key(name) + memory_bytes(field)).sum()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    };
    size_of::<Value>() + inside
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_tree_takes_its_values_its_keys_and_its_texts() {
        let of = |value: &Value| memory_bytes(value) - size_of::<Value>();
        assert_eq!(of(&json!(1)), 0);
        assert!((1000..1100).contains(&of(&json!("x".repeat(1000)))));
        assert_eq!(of(&json!([1])), size_of::<Value>());
        let object = of(&json!({ "k".repeat(1000): "x".repeat(1000) }));
        assert!((2000..2300).contains(&object), "{object}");
    }

    #[test]
    fn values_are_counted_outside_strings() {
        let check = |json: &str, expected: usize| assert_eq!(count_values(json.as_bytes()), expected, "{json}");
        check("", 1);
        check("[]", 2);
        check("[1,2,3]", 4);
        check(r#"{"a":{"b":[]}}"#, 6);
        check(r#""a,b,[{\",,\\""#, 1);
        check(r#"["\\",0]"#, 3);
    }
}

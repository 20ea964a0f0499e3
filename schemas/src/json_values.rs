//! The number of values in a JSON text, from its bytes. A tree of values takes up to 70 times the memory of its text, so
//! their number is limited before a tree is built.

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

#[cfg(test)]
mod tests {
    use super::*;

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

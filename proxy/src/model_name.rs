//! Compares spellings of model names.

/// The tag that Ollama's clients append to a name without one.
const DEFAULT_TAG: &str = ":latest";

/// Returns true if two names mean the same model: case and the default tag are ignored.
pub fn are_same(one: &str, other: &str) -> bool {
    bare(one).eq_ignore_ascii_case(bare(other))
}

/// Equal for names that mean the same model, and only for these.
pub fn key(name: &str) -> String {
    bare(name).to_ascii_lowercase()
}

fn bare(name: &str) -> &str {
    match name.len().checked_sub(DEFAULT_TAG.len()).and_then(|at| name.split_at_checked(at)) {
        Some((bare, tag)) if !bare.is_empty() && tag.eq_ignore_ascii_case(DEFAULT_TAG) => bare,
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn case_and_the_default_tag_make_no_difference() {
        let check = |one: &str, other: &str, expected: bool| {
            assert_eq!((are_same(one, other), key(one) == key(other)), (expected, expected), "{one} {other}");
        };
        check("m", "M", true);
        check("m", "m:latest", true);
        check("m:LATEST", "m", true);
        check("m:latest", "M:latest", true);
        check("m", "m:q4", false);
        check("m:q4", "m:q4:latest", true);
        check(":latest", "", false);
        check("ü", "ü:latest", true);
        check("日本:latesü", "日本", false);
    }
}

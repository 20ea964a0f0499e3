//! How much work a pattern is that ignores case.
//!
//! `regex-syntax` looks for the other case of each character of each class: of a million characters, 4 ms. A class that is nested
//! in others may be looked at again by each of them, and by each operation on it.

/// Counts the classes and operations in a pattern for which thousands of characters may be compared with their other case.
pub(super) fn n_folded(pattern: &str) -> usize {
    let Some(skips_spaces) = flags(pattern) else { return 0 };
    if skips_spaces {
        // The ends of a class then depend on spaces and comments.
        return pattern.bytes().filter(|byte| b"[&-~".contains(byte)).count();
    }
    let mut n = 0;
    // The classes that are open, and whether they have more than single characters of ASCII.
    let mut open: Vec<bool> = Vec::new();
    let mut chars = pattern.chars().peekable();
    while let Some(c) = chars.next() {
        let is_wide = match c {
            '\\' => match chars.next() {
                Some('p' | 'P') => {
                    n += 1;
                    true
                }
                escaped => escaped.is_some_and(|c| "xuUwWDS".contains(c)),
            },
            '[' => {
                let is_of_posix = chars.next_if_eq(&':').is_some();
                let is_negated = chars.next_if_eq(&'^').is_some();
                // The first one does not end a class.
                chars.next_if_eq(&']');
                open.push(is_of_posix && is_negated);
                continue;
            }
            ']' => open.pop().inspect(|is_wide| n += usize::from(*is_wide)).unwrap_or(false),
            '&' | '-' | '~' if !open.is_empty() && chars.next_if_eq(&c).is_some() => {
                n += 2;
                continue;
            }
            c => !c.is_ascii(),
        };
        open.last_mut().into_iter().for_each(|outer| *outer |= is_wide);
    }
    n + open.into_iter().filter(|is_wide| *is_wide).count()
}

/// Returns `Some` if the pattern ignores case: true if it ignores spaces, too.
fn flags(pattern: &str) -> Option<bool> {
    let groups = pattern.split("(?").skip(1).filter_map(|group| Some(&group[..group.find([':', ')'])?]));
    let flags: Vec<&str> = groups.filter(|flags| flags.chars().all(|c| c.is_ascii_alphabetic() || c == '-')).collect();
    let has = |flag: char| flags.iter().any(|flags| flags.contains(flag));
    has('i').then(|| has('x'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_class_of_many_characters_counts_wherever_it_is() {
        for (pattern, n) in [
            // Case counts, or there is nothing but ASCII.
            (r"[\W][¡-ÿ]", 0),
            (r"(?P<i>[\W])(?:[\W])(?s)[\W](?-u)", 0),
            (r"(?i)^[a-z0-9._%+-]+@[a-z\d.-]+\.[a-z]{2,}[[:alpha:]]\[", 0),
            // Classes with other characters.
            (r"(?i)[\x{80}-\x{10FFFF}][a][\W\D]", 2),
            ("(?s-i:[¡-\u{10ffff}])é", 1),
            ("(?mi)[[:^ascii:]]", 2),
            (r"(?i)\p{L}\W[\PL]", 3),
            // Nested ones, and those that are closed late or never.
            ("(?i)[[[[¡-ÿ]]]]", 4),
            ("(?i)[]¡-ÿ][^]¡-ÿ]", 2),
            ("(?i)[[:[:[:¡-ÿ]]]]", 4),
            ("(?i)[a[¡", 1),
            // Operations look at both sides.
            (r"(?i)[\w&&a--b~~[é]]", 8),
            ("(?ix)[ ]¡-ÿ]", 2),
        ] {
            assert_eq!(n_folded(pattern), n, "{pattern}");
        }
    }
}

//! Regular expressions of JSON Schema, which are ECMA-262's, in the syntax of Rust's `regex`.

use std::iter::Peekable;
use std::str::Chars;

/// Returns the pattern in the syntax of Rust's `regex`. `None`: it needs what no automaton has, such as look-ahead or a
/// reference to a group.
pub(super) fn of_ecma(pattern: &str) -> Option<String> {
    let mut reader = Reader { rest: pattern.chars().peekable(), written: String::with_capacity(pattern.len()) };
    while let Some(c) = reader.rest.next() {
        reader.char(c)?;
    }
    Some(reader.written)
}

struct Reader<'p> {
    rest: Peekable<Chars<'p>>,
    written: String,
}

impl Reader<'_> {
    fn char(&mut self, c: char) -> Option<()> {
        match c {
            '\\' => self.escape(false)?,
            '[' => self.class()?,
            '(' => self.group()?,
            '{' if !self.is_repetition() => self.written.push_str("\\{"),
            '}' if !self.ends_repetition() => self.written.push_str("\\}"),
            ']' => self.written.push_str("\\]"),
            _ => self.written.push(c),
        }
        Some(())
    }

    /// Returns true if `{` is followed by `n}`, `n,}` or `n,m}`.
    fn is_repetition(&self) -> bool {
        let inside: String = self.rest.clone().take_while(|&c| c != '}').take(16).collect();
        let (least, most) = inside.split_once(',').unwrap_or((&inside, ""));
        let is_number = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        let ends = self.rest.clone().nth(inside.chars().count()) == Some('}');
        ends && !least.is_empty() && is_number(least) && is_number(most)
    }

    /// Returns true if the text so far opens a repetition that `}` ends.
    fn ends_repetition(&self) -> bool {
        let digits = self.written.trim_end_matches(|c: char| c.is_ascii_digit() || c == ',');
        digits.len() < self.written.len() && digits.ends_with('{') && !digits.ends_with("\\{")
    }

    /// A group; `None` for look-around.
    fn group(&mut self) -> Option<()> {
        self.written.push('(');
        let ahead: String = self.rest.clone().take(3).collect();
        match ["?=", "?!", "?<=", "?<!"].iter().any(|form| ahead.starts_with(form)) {
            true => None,
            false => Some(()),
        }
    }

    /// A class, whose `[`, `&`, `~` and repeated `-` are plain characters. Rust's would nest, intersect and subtract.
    fn class(&mut self) -> Option<()> {
        let is_negated = self.rest.next_if_eq(&'^').is_some();
        if self.rest.next_if_eq(&']').is_some() {
            // Nothing, or any character.
            self.written.push_str(if is_negated { "(?s:.)" } else { "[^\\s\\S]" });
            return Some(());
        }
        self.written.push_str(if is_negated { "[^" } else { "[" });
        let mut before = None;
        loop {
            let c = self.rest.next()?;
            match c {
                ']' => break,
                '\\' => self.escape(true)?,
                '[' | '&' | '~' | '^' => self.written.extend(['\\', c]),
                '-' if before == Some('-') => self.written.push_str("\\-"),
                _ => self.written.push(c),
            }
            before = Some(c);
        }
        self.written.push(']');
        Some(())
    }

    fn escape(&mut self, in_class: bool) -> Option<()> {
        let c = self.rest.next()?;
        match c {
            'b' if in_class => self.written.push_str("\\x08"),
            // Word boundaries, and references to groups.
            'b' | 'B' | 'k' | '1'..='9' => return None,
            // Anchors in other notations, and letters in this one: nobody means the letters.
            'A' | 'z' | 'Z' => return None,
            'p' | 'P' => {
                self.rest.next_if_eq(&'{')?;
                let property: String = self.rest.by_ref().take_while(|&c| c != '}').collect();
                self.written.extend(['\\', c, '{']);
                self.written.push_str(&property);
                self.written.push('}');
            }
            'd' | 'D' | 'w' | 'W' | 's' | 'S' | 't' | 'n' | 'r' | 'f' | 'v' | 'x' => self.written.extend(['\\', c]),
            '0' => self.written.push_str("\\x00"),
            'c' => {
                let letter = self.rest.next().filter(char::is_ascii_alphabetic)?;
                self.code(u32::from(letter) % 32)?;
            }
            'u' => self.unicode()?,
            _ if c.is_ascii_alphanumeric() || !c.is_ascii() => self.written.push(c),
            _ => self.written.extend(['\\', c]),
        }
        Some(())
    }

    /// `\uXXXX`, where two may be one character, or `\u{X}`.
    fn unicode(&mut self) -> Option<()> {
        if self.rest.next_if_eq(&'{').is_some() {
            let digits: String = std::iter::from_fn(|| self.rest.next_if(char::is_ascii_hexdigit)).collect();
            self.rest.next_if_eq(&'}')?;
            return self.code(u32::from_str_radix(&digits, 16).ok()?);
        }
        let first = self.four_digits()?;
        if !(0xD800..0xDC00).contains(&first) {
            return self.code(first);
        }
        self.rest.next_if_eq(&'\\')?;
        self.rest.next_if_eq(&'u')?;
        let second = self.four_digits().filter(|code| (0xDC00..0xE000).contains(code))?;
        self.code(0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00))
    }

    fn four_digits(&mut self) -> Option<u32> {
        let digits: String = self.rest.by_ref().take(4).collect();
        u32::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 4)
    }

    fn code(&mut self, code: u32) -> Option<()> {
        char::from_u32(code)?;
        self.written.push_str(&format!("\\x{{{code:x}}}"));
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_mean_what_ecma_says() {
        for (ecma, rust) in [
            ("^[[a]{2}$", "^[\\[a]{2}$"),
            ("^[a-z&&b~~c--d]+$", "^[a-z\\&\\&b\\~\\~c-\\-d]+$"),
            ("[^]", "(?s:.)"),
            ("a{,3}{x}", "a\\{,3\\}\\{x\\}"),
            ("a{2,}b{1,3}", "a{2,}b{1,3}"),
            ("a{1x}{2}", "a\\{1x\\}{2}"),
            ("\\/\\-\\u00e9\\u{1F600}\\cA", "\\/\\-\\x{e9}\\x{1f600}\\x{1}"),
            ("\\uD83D\\uDE00", "\\x{1f600}"),
            ("[\\b\\]\\[]", "[\\x08\\]\\[]"),
            ("(?:a|b)(?<n>c)", "(?:a|b)(?<n>c)"),
            ("]", "\\]"),
            ("^\\p{L}{3}[\\p{Lu}]\\P{Script=Greek}$", "^\\p{L}{3}[\\p{Lu}]\\P{Script=Greek}$"),
        ] {
            assert_eq!(of_ecma(ecma).as_deref(), Some(rust), "{ecma}");
        }
        for beyond in ["(?=a)", "(?!a)", "(?<=a)", "(?<!a)", "(a)\\1", "\\bword\\b", "[a", "\\", "\\uD83D", "\\Aa\\z"] {
            assert_eq!(of_ecma(beyond), None, "{beyond}");
        }
    }
}

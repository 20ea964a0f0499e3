//! A grammar as one regular expression, in the syntax of Rust's `regex`.

use std::collections::HashMap;

use super::lark::{Grammar, GrammarExpr, read};
use super::{GrammarError, MAX_CHAIN, MAX_GRAMMAR, MAX_WRITTEN};

/// Returns the regular expression of the texts that a Lark grammar allows. Errors: the grammar is wrong, a rule refers to
/// itself, or the result is too large.
pub(crate) fn pattern_of(lark: &str) -> Result<String, GrammarError> {
    PatternWriter::new(&read(lark)?)?.whole()
}

/// Removes the anchors of a regular expression that the whole text must match with them and without.
pub(crate) fn whole(regex: &str) -> &str {
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    match regex.strip_suffix('$') {
        Some(inner) if !inner.ends_with('\\') => inner,
        _ => regex,
    }
}

/// Writes rules as regular expressions.
pub(super) struct PatternWriter<'g> {
    grammar: &'g Grammar,
    /// Rules that are written already.
    known: HashMap<&'g str, String>,
    /// The rules that are being written, the outermost first.
    open: Vec<&'g str>,
    /// The pattern of ignored texts, which may follow each terminal; empty if nothing is ignored.
    ignored: String,
    /// The bytes of the rules that are written.
    n_written: usize,
}

impl<'g> PatternWriter<'g> {
    pub(super) fn new(grammar: &'g Grammar) -> Result<Self, GrammarError> {
        let mut writer =
            PatternWriter { grammar, known: HashMap::new(), open: Vec::new(), ignored: String::new(), n_written: 0 };
        let ignored = grammar.ignored.iter().map(|expr| writer.expr(expr)).collect::<Result<Vec<_>, _>>()?;
        if !ignored.is_empty() {
            writer.ignored = format!("(?:{})*", ignored.join("|"));
            writer.known.clear();
        }
        Ok(writer)
    }

    /// Writes the whole grammar.
    pub(super) fn whole(&mut self) -> Result<String, GrammarError> {
        let start = self.name(&self.grammar.start)?;
        sized(format!("{}{start}", self.ignored))
    }

    fn name(&mut self, name: &str) -> Result<String, GrammarError> {
        let Some((name, expr)) = self.grammar.rules.get_key_value(name) else {
            return Err(GrammarError::NoRule(name.to_owned()));
        };
        let bare = match self.known.get(name.as_str()) {
            Some(known) => known.clone(),
            None => self.rule(name, expr)?,
        };
        let is_terminal = self.grammar.has_terminals && is_terminal(name);
        Ok(if is_terminal { format!("{bare}{}", self.ignored) } else { bare })
    }

    /// Writes a rule for the first time.
    fn rule(&mut self, name: &'g str, expr: &'g GrammarExpr) -> Result<String, GrammarError> {
        if self.open.contains(&name) {
            return Err(GrammarError::Recursive(name.to_owned()));
        }
        if self.open.len() == MAX_CHAIN {
            return Err(GrammarError::TooDeep);
        }
        self.open.push(name);
        // Nothing is ignored inside a terminal.
        let is_terminal = self.grammar.has_terminals && is_terminal(name);
        let ignored = if is_terminal { std::mem::take(&mut self.ignored) } else { self.ignored.clone() };
        let written = self.expr(expr)?;
        self.ignored = ignored;
        self.open.pop();
        self.n_written += written.len();
        if self.n_written > MAX_WRITTEN {
            return Err(GrammarError::TooLarge);
        }
        self.known.insert(name, written.clone());
        Ok(written)
    }

    /// Writes an expression as a group that repetitions can follow.
    pub(super) fn expr(&mut self, expr: &'g GrammarExpr) -> Result<String, GrammarError> {
        let written = match expr {
            GrammarExpr::Text { text, any_case: false } => format!("(?:{}){}", escaped(text), self.ignored),
            GrammarExpr::Text { text, any_case: true } => format!("(?i:{}){}", escaped(text), self.ignored),
            GrammarExpr::Regex { body, flags } => format!("(?{flags}:{body}){}", self.ignored),
            GrammarExpr::Range(first, last) => {
                format!("[{}-{}]{}", escaped(&first.to_string()), escaped(&last.to_string()), self.ignored)
            }
            GrammarExpr::Name(name) => self.name(name)?,
            GrammarExpr::Sequence(items) => self.joined(items, "")?,
            GrammarExpr::OneOf(items) => self.joined(items, "|")?,
            GrammarExpr::Repeat { expr, min, max } => {
                let max = max.map(|max| max.to_string()).unwrap_or_default();
                format!("(?:{}){{{min},{max}}}", self.expr(expr)?)
            }
        };
        sized(written)
    }

    fn joined(&mut self, items: &'g [GrammarExpr], by: &str) -> Result<String, GrammarError> {
        let mut joined = String::from("(?:");
        for (at, item) in items.iter().enumerate() {
            if at > 0 {
                joined.push_str(by);
            }
            joined.push_str(&self.expr(item)?);
            joined = sized(joined)?;
        }
        joined.push(')');
        Ok(joined)
    }
}

/// Terminals have names in capitals.
pub(super) fn is_terminal(name: &str) -> bool {
    name.trim_start_matches('_').starts_with(|c: char| c.is_ascii_uppercase())
}

fn sized(pattern: String) -> Result<String, GrammarError> {
    if pattern.len() > MAX_GRAMMAR { Err(GrammarError::TooLarge) } else { Ok(pattern) }
}

/// Escapes the characters that have a meaning in regular expressions.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => escaped.push_str("\\n"),
            '\r' => escaped.push_str("\\r"),
            '\t' => escaped.push_str("\\t"),
            c if c.is_control() => escaped.push_str(&format!("\\x{{{:x}}}", u32::from(c))),
            c => {
                if c.is_ascii_punctuation() && c != '/' && c != '<' && c != '>' {
                    escaped.push('\\');
                }
                escaped.push(c);
            }
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(lark: &str, expected: &str) {
        assert_eq!(pattern_of(lark).as_deref(), Ok(expected), "{lark}");
    }

    #[test]
    fn rules_are_put_together() {
        check("start: \"a\"", "(?:a)");
        check("start: \"a\" | \"b.\"i\n", "(?:(?:a)|(?i:b\\.))");
        check(
            "start: x+ y?\nx: \"a\" -> one\n  | \"b\"\nY: /c\\/[\\/]/s\ny: Y~2..3",
            "(?:(?:(?:(?:a)|(?:b))){1,}(?:(?:(?s:c/[/])){2,3}){0,1})",
        );
        check("?start: [\"a\"] \"0\"..\"9\" // the end\n# nothing\n", "(?:(?:(?:a)){0,1}[0-9])");
        check("%import common.LF\nstart: \"\\\"\\\\\\u0041\" LF", "(?:(?:\\\"\\\\A)(?:\\n))");
        check(
            "%import common (INT, WORD)\n%import common.CR -> END\nstart.2: INT{2} WORD{,3} (\n  END\n)",
            "(?:(?:(?:[0-9]+)){2,2}(?:(?:[A-Za-z]+)){0,3}(?:\\r))",
        );
    }

    #[test]
    fn anchors_of_a_regular_expression_change_nothing() {
        assert_eq!([whole("^a$"), whole("a"), whole("a\\$"), whole("^$")], ["a", "a", "a\\$", ""]);
    }

    #[test]
    fn ignored_texts_may_follow_terminals() {
        check(
            "%ignore / /\nstart: A b\nA: B \"x\"\nB: \"y\"\nb: \"z\"",
            "(?:(?: ))*(?:(?:(?:y)(?:x))(?:(?: ))*(?:z)(?:(?: ))*)",
        );
    }

    #[test]
    fn what_cannot_be_written_is_named() {
        let refused = |lark: &str| pattern_of(lark).unwrap_err().to_string();
        assert_eq!(refused("a: \"b\""), "has no rule named start");
        assert_eq!(refused("start: b"), "has no rule named b");
        assert!(refused("start: \"(\" start \")\" | \"x\"").contains("start refers to itself"));
        assert_eq!(refused("start: \"a\n\""), "line 1: a text does not end");
        assert_eq!(refused("\nstart \"a\""), "line 2: ':' is expected");
        assert_eq!(refused("start: <|im_end|>"), "line 1: \"<\" is not supported");
        assert_eq!(refused("start: \"a\"\n%json {}"), "line 2: the directive \"json\" is not supported");
        assert_eq!(refused("%import common.SQL\n"), "line 1: the library 'common' has no \"SQL\" here");
        assert_eq!(refused("start: /a/x"), "line 1: the flag x of a regular expression is not supported");
        assert_eq!(refused("start: \"a\"\nstart: \"b\""), "line 2: the rule \"start\" is defined twice");
        assert!(refused(&format!("start: {}", "(".repeat(100))).contains("nested too deeply"));
        let doubling: String = (0..40).map(|i| format!("r{i}: r{n} r{n}\n", n = i + 1)).collect();
        assert!(refused(&format!("start: r0\n{doubling}r40: \"x\"")).contains("too large"));
        let chain: String = (0..5000).map(|i| format!("r{i}:r{}\n", i + 1)).collect();
        assert!(refused(&format!("start:r0\n{chain}")).contains("more than 64 times"));
        let wide: String = (0..1000).map(|i| format!("r{i}:a\n")).collect();
        let all: Vec<String> = (0..1000).map(|i| format!("r{i}")).collect();
        let wide = format!("start:{}\n{wide}a:\"{}\"", all.join("|"), "x".repeat(20_000));
        assert!(refused(&wide).contains("too large"));
        assert!(refused(&"x".repeat(MAX_GRAMMAR + 1)).contains("longer than 64 KiB"));
    }
}

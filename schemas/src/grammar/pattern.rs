//! A grammar as one regular expression, in the syntax of Rust's `regex`.

use std::collections::HashMap;
use std::ops::Range;

use super::lark::{Grammar, GrammarExpr, read};
use super::{GrammarError, MAX_CHAIN, MAX_GRAMMAR, WriteBudget};

/// Returns the regular expression of the texts that a Lark grammar allows. Errors: the grammar is wrong, a rule refers to
/// itself, or the result is too large.
pub(crate) fn pattern_of(lark: &str, budget: &mut WriteBudget) -> Result<String, GrammarError> {
    PatternWriter::new(&read(lark)?, budget)?.whole()
}

/// Removes the anchors of a regular expression that the whole text must match with them and without.
pub(crate) fn whole(regex: &str) -> &str {
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    match regex.strip_suffix('$') {
        Some(inner) if !inner.ends_with('\\') => inner,
        _ => regex,
    }
}

/// Writes rules as regular expressions, all into one text. A regular expression cannot refer to another one, so a rule
/// stands in it once for each mention; each copy is taken from the budget first.
pub(super) struct PatternWriter<'g, 'b> {
    grammar: &'g Grammar,
    budget: &'b mut WriteBudget,
    /// The patterns that are written, one after the other.
    text: String,
    /// Where the last pattern begins.
    begin: usize,
    /// The pattern of ignored texts, which may follow each terminal; empty if nothing is ignored.
    ignored: Range<usize>,
    /// Nothing is ignored inside a terminal.
    is_in_terminal: bool,
    /// Where rules stand that are written already, by their name and by whether they are a part of a terminal.
    known: HashMap<(&'g str, bool), Range<usize>>,
    /// The rules that are being written, the outermost first.
    open: Vec<&'g str>,
}

impl<'g, 'b> PatternWriter<'g, 'b> {
    pub(super) fn new(grammar: &'g Grammar, budget: &'b mut WriteBudget) -> Result<Self, GrammarError> {
        let mut writer = PatternWriter {
            grammar,
            budget,
            text: String::new(),
            begin: 0,
            ignored: 0..0,
            is_in_terminal: true,
            known: HashMap::new(),
            open: Vec::new(),
        };
        if !grammar.ignored.is_empty() {
            writer.joined(&grammar.ignored, "|")?;
            writer.push("*")?;
        }
        writer.ignored = 0..writer.text.len();
        writer.is_in_terminal = false;
        Ok(writer)
    }

    /// Writes the whole grammar.
    pub(super) fn whole(mut self) -> Result<String, GrammarError> {
        // The ignored texts, which the whole may begin with, stand at the beginning already.
        let grammar = self.grammar;
        self.name(&grammar.start)?;
        Ok(self.text)
    }

    /// Writes one expression as a pattern of its own.
    pub(super) fn pattern(&mut self, expr: &'g GrammarExpr) -> Result<String, GrammarError> {
        self.begin = self.text.len();
        self.expr(expr)?;
        Ok(self.text[self.begin..].to_owned())
    }

    /// Takes a part of a rule from the budget of the patterns.
    pub(super) fn take_rule(&mut self) -> Result<(), GrammarError> {
        self.budget.take_rule()
    }

    fn name(&mut self, name: &str) -> Result<(), GrammarError> {
        let Some((name, expr)) = self.grammar.rules.get_key_value(name) else {
            return Err(GrammarError::NoRule(name.to_owned()));
        };
        let is_terminal = self.grammar.has_terminals && is_terminal(name);
        let is_inside = self.is_in_terminal;
        self.is_in_terminal = is_inside || is_terminal;
        match self.known.get(&(name.as_str(), self.is_in_terminal)).cloned() {
            Some(known) => self.copy(known)?,
            None => self.rule(name, expr)?,
        }
        self.is_in_terminal = is_inside;
        if is_terminal { self.ignored() } else { Ok(()) }
    }

    /// Writes a rule for the first time.
    fn rule(&mut self, name: &'g str, expr: &'g GrammarExpr) -> Result<(), GrammarError> {
        if self.open.contains(&name) {
            return Err(GrammarError::Recursive(name.to_owned()));
        }
        if self.open.len() == MAX_CHAIN {
            return Err(GrammarError::TooDeep);
        }
        self.open.push(name);
        let begin = self.text.len();
        self.expr(expr)?;
        self.open.pop();
        self.known.insert((name, self.is_in_terminal), begin..self.text.len());
        Ok(())
    }

    /// Writes an expression as a group that repetitions can follow.
    fn expr(&mut self, expr: &'g GrammarExpr) -> Result<(), GrammarError> {
        match expr {
            GrammarExpr::Text { text, any_case } => {
                self.push(if *any_case { "(?i:" } else { "(?:" })?;
                self.escaped(text)?;
                self.push(")")?;
                self.ignored()
            }
            GrammarExpr::Regex { body, flags } => {
                for part in ["(?", flags, ":", body, ")"] {
                    self.push(part)?;
                }
                self.ignored()
            }
            GrammarExpr::Range(first, last) => {
                self.push("[")?;
                self.escaped(first.encode_utf8(&mut [0; 4]))?;
                self.push("-")?;
                self.escaped(last.encode_utf8(&mut [0; 4]))?;
                self.push("]")?;
                self.ignored()
            }
            GrammarExpr::Name(name) => self.name(name),
            GrammarExpr::Sequence(items) => self.joined(items, ""),
            GrammarExpr::OneOf(items) => self.joined(items, "|"),
            GrammarExpr::Repeat { expr, min, max } => {
                self.push("(?:")?;
                self.expr(expr)?;
                let max = max.map(|max| max.to_string()).unwrap_or_default();
                self.push(&format!("){{{min},{max}}}"))
            }
        }
    }

    fn joined(&mut self, items: &'g [GrammarExpr], by: &str) -> Result<(), GrammarError> {
        self.push("(?:")?;
        for (at, item) in items.iter().enumerate() {
            if at > 0 {
                self.push(by)?;
            }
            self.expr(item)?;
        }
        self.push(")")
    }

    /// Writes the pattern of ignored texts, where it may stand.
    fn ignored(&mut self) -> Result<(), GrammarError> {
        if self.is_in_terminal { Ok(()) } else { self.copy(self.ignored.clone()) }
    }

    fn push(&mut self, piece: &str) -> Result<(), GrammarError> {
        self.take(piece.len())?;
        self.text.push_str(piece);
        Ok(())
    }

    /// Writes again what stands here.
    fn copy(&mut self, place: Range<usize>) -> Result<(), GrammarError> {
        self.take(place.len())?;
        self.text.extend_from_within(place);
        Ok(())
    }

    /// Takes room for what is written next. Errors: the pattern becomes too large, or the budget is used up.
    fn take(&mut self, n_bytes: usize) -> Result<(), GrammarError> {
        if self.text.len() - self.begin + n_bytes > MAX_GRAMMAR {
            return Err(GrammarError::TooLarge);
        }
        self.budget.take(n_bytes)
    }

    /// Writes a text, and escapes the characters that have a meaning in regular expressions.
    fn escaped(&mut self, text: &str) -> Result<(), GrammarError> {
        for c in text.chars() {
            match c {
                '\n' => self.push("\\n")?,
                '\r' => self.push("\\r")?,
                '\t' => self.push("\\t")?,
                c if c.is_control() => self.push(&format!("\\x{{{:x}}}", u32::from(c)))?,
                c => {
                    if c.is_ascii_punctuation() && c != '/' && c != '<' && c != '>' {
                        self.push("\\")?;
                    }
                    self.push(c.encode_utf8(&mut [0; 4]))?;
                }
            }
        }
        Ok(())
    }
}

/// Terminals have names in capitals.
pub(super) fn is_terminal(name: &str) -> bool {
    name.trim_start_matches('_').starts_with(|c: char| c.is_ascii_uppercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(lark: &str, expected: &str) {
        assert_eq!(pattern_of(lark, &mut WriteBudget::default()).as_deref(), Ok(expected), "{lark}");
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
        // The same rule inside a terminal and outside.
        check("%ignore / /\nstart: A b\nA: b\nb: \"z\"", "(?:(?: ))*(?:(?:z)(?:(?: ))*(?:z)(?:(?: ))*)");
    }

    #[test]
    fn ignored_texts_are_sized_before_they_are_joined() {
        for (n_ignored, n_rules) in [(2_400, 60), (1_400, 20)] {
            let chain: String = (0..n_rules).map(|i| format!("r{i}: r{}\n", i + 1)).collect();
            let ignored = "%ignore A\n".repeat(n_ignored);
            let grammar = format!("start: r0\n{chain}r{n_rules}: A\nA: \"{}\"\n{ignored}", "x".repeat(30_000));
            let mut budget = WriteBudget::default();
            assert_eq!(pattern_of(&grammar, &mut budget), Err(GrammarError::TooLarge));
            assert!(budget.taken() <= MAX_GRAMMAR, "{}", budget.taken());
        }
    }

    #[test]
    fn what_cannot_be_written_is_named() {
        let refused = |lark: &str| pattern_of(lark, &mut WriteBudget::default()).unwrap_err().to_string();
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

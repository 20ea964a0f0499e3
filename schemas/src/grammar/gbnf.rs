//! Reads grammars in llama.cpp's notation, GBNF.

use std::iter::Peekable;
use std::str::Chars;

use super::lark::{Grammar, GrammarExpr};
use super::{GrammarError, MAX_DEPTH, MAX_GRAMMAR};
use crate::request::invalid::quoted;

/// Returns true if a grammar is in this notation.
pub(super) fn is_gbnf(source: &str) -> bool {
    source.contains("::=")
}

pub(super) fn read(source: &str) -> Result<Grammar, GrammarError> {
    if source.len() > MAX_GRAMMAR {
        return Err(GrammarError::TooLong);
    }
    let mut reader = GbnfReader { chars: source.chars().peekable(), line: 1, grammar: Grammar::starting_with("root") };
    reader.skip(true);
    while reader.chars.peek().is_some() {
        reader.rule()?;
        reader.skip(true);
    }
    Ok(reader.grammar)
}

struct GbnfReader<'s> {
    chars: Peekable<Chars<'s>>,
    line: usize,
    grammar: Grammar,
}

impl GbnfReader<'_> {
    fn rule(&mut self) -> Result<(), GrammarError> {
        let name = self.name()?;
        self.skip(false);
        for sign in "::=".chars() {
            self.expect(sign)?;
        }
        self.skip(true);
        let expr = self.alternatives(0)?;
        if self.grammar.rules.insert(name.clone(), expr).is_some() {
            return Err(self.wrong(format_args!("the rule {} is defined twice", quoted(&name))));
        }
        match self.chars.peek() {
            None | Some('\n') => Ok(()),
            Some(_) => Err(self.wrong("what follows the rule is not understood")),
        }
    }

    fn alternatives(&mut self, depth: usize) -> Result<GrammarExpr, GrammarError> {
        if depth > MAX_DEPTH {
            return Err(self.wrong("is nested too deeply"));
        }
        let mut options = vec![self.sequence(depth)?];
        while self.take('|') {
            self.skip(true);
            options.push(self.sequence(depth)?);
        }
        Ok(if options.len() == 1 { options.remove(0) } else { GrammarExpr::OneOf(options) })
    }

    fn sequence(&mut self, depth: usize) -> Result<GrammarExpr, GrammarError> {
        let mut items = Vec::new();
        loop {
            let item = match self.chars.peek().copied() {
                Some('"') => {
                    self.chars.next();
                    let mut text = String::new();
                    while !self.take('"') {
                        text.push(self.char()?);
                    }
                    GrammarExpr::Text { text, any_case: false }
                }
                Some('[') => self.class()?,
                Some('.') => {
                    self.chars.next();
                    GrammarExpr::Regex { body: ".".to_owned(), flags: "s".to_owned() }
                }
                Some('(') => {
                    self.chars.next();
                    self.skip(true);
                    let inner = self.alternatives(depth + 1)?;
                    self.skip(true);
                    self.expect(')')?;
                    inner
                }
                Some(c) if c.is_ascii_alphabetic() => GrammarExpr::Name(self.name()?),
                _ => break,
            };
            self.skip(depth > 0);
            items.push(self.repeated(item)?);
            // Inside a group a line continues on the next one.
            self.skip(depth > 0);
        }
        Ok(if items.len() == 1 { items.remove(0) } else { GrammarExpr::Sequence(items) })
    }

    fn repeated(&mut self, item: GrammarExpr) -> Result<GrammarExpr, GrammarError> {
        let (min, max) = match self.chars.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => {
                self.chars.next();
                let min = self.number()?.unwrap_or(0);
                let max = if self.take(',') { self.number()? } else { Some(min) };
                if self.chars.peek() != Some(&'}') {
                    return Err(self.wrong("'}' is expected"));
                }
                (min, max)
            }
            _ => return Ok(item),
        };
        self.chars.next();
        Ok(GrammarExpr::Repeat { expr: Box::new(item), min, max })
    }

    /// Reads a class of characters, `[a-z]` or `[^"\\]`.
    fn class(&mut self) -> Result<GrammarExpr, GrammarError> {
        self.expect('[')?;
        let mut body = String::from(if self.take('^') { "[^" } else { "[" });
        let n_opening = body.len();
        while !self.take(']') {
            body.push_str(&code(self.char()?));
            if self.chars.peek() == Some(&'-') {
                self.chars.next();
                if self.chars.peek() == Some(&']') {
                    body.push_str(&code('-'));
                } else {
                    body.push('-');
                    body.push_str(&code(self.char()?));
                }
            }
        }
        if body.len() == n_opening {
            return Err(self.wrong("a class has no characters"));
        }
        body.push(']');
        Ok(GrammarExpr::Regex { body, flags: String::new() })
    }

    /// Reads one character of a text or a class.
    fn char(&mut self) -> Result<char, GrammarError> {
        let c = match self.chars.next() {
            None | Some('\n') => return Err(self.wrong("a text or a class does not end")),
            Some('\\') => match self.chars.next() {
                Some('n') => '\n',
                Some('r') => '\r',
                Some('t') => '\t',
                Some('x') => self.code_point(2)?,
                Some('u') => self.code_point(4)?,
                Some('U') => self.code_point(8)?,
                Some(c @ ('"' | '\\' | '[' | ']' | '-' | '^' | '/' | '.')) => c,
                _ => return Err(self.wrong("unknown escape")),
            },
            Some(c) => c,
        };
        Ok(c)
    }

    fn code_point(&mut self, n_digits: usize) -> Result<char, GrammarError> {
        let digits: String = self.chars.by_ref().take(n_digits).collect();
        let code = u32::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == n_digits);
        code.and_then(char::from_u32).ok_or_else(|| self.wrong(format_args!("{} is no character", quoted(&digits))))
    }

    fn number(&mut self) -> Result<Option<u32>, GrammarError> {
        let mut digits = String::new();
        while let Some(digit) = self.chars.next_if(char::is_ascii_digit) {
            digits.push(digit);
        }
        if digits.is_empty() {
            return Ok(None);
        }
        digits.parse().map(Some).map_err(|_| self.wrong(format_args!("{} is too large", quoted(&digits))))
    }

    fn name(&mut self) -> Result<String, GrammarError> {
        let mut name = String::new();
        while let Some(c) = self.chars.next_if(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_')) {
            name.push(c);
        }
        if name.is_empty() { Err(self.wrong("a rule's name is expected")) } else { Ok(name) }
    }

    fn expect(&mut self, sign: char) -> Result<(), GrammarError> {
        if self.take(sign) { Ok(()) } else { Err(self.wrong(format_args!("'{sign}' is expected"))) }
    }

    fn take(&mut self, sign: char) -> bool {
        self.chars.next_if_eq(&sign).is_some()
    }

    /// Skips white space and comments.
    fn skip(&mut self, with_lines: bool) {
        while let Some(c) = self.chars.peek().copied() {
            match c {
                '\n' if with_lines => self.line += 1,
                '#' => {
                    while self.chars.next_if(|c| *c != '\n').is_some() {}
                    continue;
                }
                '\n' => return,
                c if c.is_whitespace() => {}
                _ => return,
            }
            self.chars.next();
        }
    }

    fn wrong(&self, problem: impl std::fmt::Display) -> GrammarError {
        GrammarError::Syntax { line: self.line, problem: problem.to_string() }
    }
}

/// Writes a character for a class of a regular expression.
fn code(c: char) -> String {
    if c.is_ascii_alphanumeric() { c.to_string() } else { format!("\\x{{{:x}}}", u32::from(c)) }
}

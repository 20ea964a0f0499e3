//! Reads grammars in Lark's notation.

use std::collections::HashMap;
use std::iter::Peekable;
use std::str::Chars;

use super::{GrammarError, MAX_DEPTH, MAX_GRAMMAR};
use crate::request::invalid::quoted;

/// A grammar: its rules and terminals by name.
#[derive(Debug)]
pub(super) struct Grammar {
    pub(super) rules: HashMap<String, GrammarExpr>,
    /// The name of the rule for the whole text.
    pub(super) start: String,
    /// Rules with a name in capitals are terminals.
    pub(super) has_terminals: bool,
    /// Texts that may stand between any two terminals (`%ignore`).
    pub(super) ignored: Vec<GrammarExpr>,
}

/// The right side of a rule.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum GrammarExpr {
    /// A text, exactly or in any case.
    Text {
        text: String,
        any_case: bool,
    },
    /// A regular expression without its slashes, and its flags.
    Regex {
        body: String,
        flags: String,
    },
    /// One character of a range.
    Range(char, char),
    /// Another rule or terminal.
    Name(String),
    Sequence(Vec<GrammarExpr>),
    OneOf(Vec<GrammarExpr>),
    Repeat {
        expr: Box<GrammarExpr>,
        min: u32,
        max: Option<u32>,
    },
}

impl Grammar {
    fn new() -> Self {
        Grammar { rules: HashMap::new(), start: "start".to_owned(), has_terminals: true, ignored: Vec::new() }
    }

    /// Creates an empty grammar without terminals.
    pub(super) fn starting_with(start: &str) -> Self {
        Grammar { start: start.to_owned(), has_terminals: false, ..Grammar::new() }
    }
}

impl GrammarExpr {
    /// Adds the names of the rules that the expression refers to.
    pub(super) fn references<'e>(&'e self, names: &mut Vec<&'e str>) {
        match self {
            GrammarExpr::Name(name) => names.push(name),
            GrammarExpr::Sequence(items) | GrammarExpr::OneOf(items) => {
                items.iter().for_each(|item| item.references(names));
            }
            GrammarExpr::Repeat { expr, .. } => expr.references(names),
            GrammarExpr::Text { .. } | GrammarExpr::Regex { .. } | GrammarExpr::Range(..) => {}
        }
    }
}

/// Lark's library of terminals, as far as its patterns are the same in every implementation.
const COMMON: &[(&str, &str)] = &[
    ("DIGIT", "[0-9]"),
    ("HEXDIGIT", "[0-9A-Fa-f]"),
    ("INT", "[0-9]+"),
    ("SIGNED_INT", "[+-]?[0-9]+"),
    ("DECIMAL", r"[0-9]+\.[0-9]*|\.[0-9]+"),
    ("FLOAT", r"[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"),
    ("SIGNED_FLOAT", r"[+-]?(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"),
    ("NUMBER", r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"),
    ("SIGNED_NUMBER", r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"),
    ("ESCAPED_STRING", r#""(?:[^"\\\n]|\\.)*""#),
    ("LCASE_LETTER", "[a-z]"),
    ("UCASE_LETTER", "[A-Z]"),
    ("LETTER", "[A-Za-z]"),
    ("WORD", "[A-Za-z]+"),
    ("CNAME", "[_A-Za-z][_A-Za-z0-9]*"),
    ("WS_INLINE", r"[ \t]+"),
    ("WS", r"[ \t\f\r\n]+"),
    ("CR", r"\r"),
    ("LF", r"\n"),
    ("NEWLINE", r"(?:\r?\n)+"),
];

/// A word of the notation.
#[derive(Debug, Clone, PartialEq)]
enum Lexeme {
    Name(String),
    Text { text: String, any_case: bool },
    Regex { body: String, flags: String },
    Number(u32),
    Directive(String),
    Arrow,
    Dots,
    Sign(char),
    NewLine,
}

pub(super) fn read(source: &str) -> Result<Grammar, GrammarError> {
    if source.len() > MAX_GRAMMAR {
        return Err(GrammarError::TooLong);
    }
    let mut reader = LarkReader { words: words(source)?, at: 0, grammar: Grammar::new() };
    while reader.statement()? {}
    Ok(reader.grammar)
}

/// Splits a grammar into words, each with the line on which it stands.
fn words(source: &str) -> Result<Vec<(Lexeme, usize)>, GrammarError> {
    let mut words = Vec::new();
    let mut line = 1;
    let mut chars = source.chars().peekable();
    while let Some(c) = chars.next() {
        let wrong = |problem: String| GrammarError::Syntax { line, problem };
        let next = chars.peek().copied();
        let word = match c {
            '\n' => {
                words.push((Lexeme::NewLine, line));
                line += 1;
                continue;
            }
            c if c.is_whitespace() => continue,
            '#' => {
                skip_line(&mut chars);
                continue;
            }
            '/' if next == Some('/') => {
                skip_line(&mut chars);
                continue;
            }
            '"' => {
                let body = until('"', &mut chars).ok_or_else(|| wrong("a text does not end".to_owned()))?;
                let any_case = chars.next_if_eq(&'i').is_some();
                let text = unescaped(&body).ok_or_else(|| wrong(format!("unknown escape in {}", quoted(&body))))?;
                Lexeme::Text { text, any_case }
            }
            '/' => {
                let body =
                    until('/', &mut chars).ok_or_else(|| wrong("a regular expression does not end".to_owned()))?;
                let mut flags = String::new();
                while let Some(flag) = chars.next_if(char::is_ascii_alphabetic) {
                    match flag {
                        'i' | 'm' | 's' => flags.push(flag),
                        'u' | 'l' => {}
                        _ => return Err(wrong(format!("the flag {flag} of a regular expression is not supported"))),
                    }
                }
                Lexeme::Regex { body: body.replace("\\/", "/"), flags }
            }
            '-' if next == Some('>') => {
                chars.next();
                Lexeme::Arrow
            }
            '.' if next == Some('.') => {
                chars.next();
                Lexeme::Dots
            }
            '%' => Lexeme::Directive(name(None, &mut chars)),
            c if c.is_ascii_digit() => {
                let mut number = c.to_string();
                while let Some(digit) = chars.next_if(char::is_ascii_digit) {
                    number.push(digit);
                }
                Lexeme::Number(number.parse().map_err(|_| wrong(format!("{} is too large", quoted(&number))))?)
            }
            c if c.is_ascii_alphabetic() || c == '_' => Lexeme::Name(name(Some(c), &mut chars)),
            c if "!?*+|()[]{}:,.~".contains(c) => Lexeme::Sign(c),
            c => return Err(wrong(format!("{} is not supported", quoted(&c.to_string())))),
        };
        words.push((word, line));
    }
    Ok(words)
}

fn skip_line(chars: &mut Peekable<Chars<'_>>) {
    while chars.next_if(|c| *c != '\n').is_some() {}
}

/// Takes the text up to `end`, with its escapes. `None`: it does not end on its line.
fn until(end: char, chars: &mut Peekable<Chars<'_>>) -> Option<String> {
    let mut body = String::new();
    loop {
        match chars.next()? {
            '\n' => return None,
            c if c == end => return Some(body),
            '\\' => body.extend(['\\', chars.next()?]),
            c => body.push(c),
        }
    }
}

fn name(first: Option<char>, chars: &mut Peekable<Chars<'_>>) -> String {
    let mut name = String::from_iter(first);
    while let Some(c) = chars.next_if(|c| c.is_ascii_alphanumeric() || *c == '_') {
        name.push(c);
    }
    name
}

/// Resolves the escapes of a text.
fn unescaped(body: &str) -> Option<String> {
    let mut text = String::new();
    let mut chars = body.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            text.push(c);
            continue;
        }
        text.push(match chars.next()? {
            'n' => '\n',
            't' => '\t',
            'r' => '\r',
            'f' => '\u{c}',
            'b' => '\u{8}',
            c @ ('"' | '\\' | '/' | '\'') => c,
            'x' => code_point(&mut chars, 2)?,
            'u' => code_point(&mut chars, 4)?,
            _ => return None,
        });
    }
    Some(text)
}

fn code_point(chars: &mut Chars<'_>, n_digits: usize) -> Option<char> {
    let digits: String = chars.by_ref().take(n_digits).collect();
    let code = u32::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == n_digits)?;
    char::from_u32(code)
}

struct LarkReader {
    words: Vec<(Lexeme, usize)>,
    at: usize,
    grammar: Grammar,
}

impl LarkReader {
    /// Reads a rule or a directive. Returns false at the end.
    fn statement(&mut self) -> Result<bool, GrammarError> {
        while self.take(&Lexeme::NewLine) {}
        // Marks for the shape of parse trees, which do not exist here.
        while self.take(&Lexeme::Sign('?')) || self.take(&Lexeme::Sign('!')) {}
        match self.next() {
            None => return Ok(false),
            Some(Lexeme::Directive(word)) => match word.as_str() {
                "import" => self.import()?,
                "ignore" => {
                    let ignored = self.alternatives(0)?;
                    self.grammar.ignored.push(ignored);
                }
                _ => return Err(self.wrong(format_args!("the directive {} is not supported", quoted(&word)))),
            },
            Some(Lexeme::Name(name)) => {
                if self.take(&Lexeme::Sign('.')) && !matches!(self.next(), Some(Lexeme::Number(_))) {
                    return Err(self.wrong("a priority is a number"));
                }
                self.expect(':')?;
                let expr = self.alternatives(0)?;
                if self.grammar.rules.insert(name.clone(), expr).is_some() {
                    return Err(self.wrong(format_args!("the rule {} is defined twice", quoted(&name))));
                }
            }
            Some(_) => return Err(self.wrong("a rule begins with its name")),
        }
        match self.next() {
            None | Some(Lexeme::NewLine) => Ok(true),
            Some(_) => Err(self.wrong("what follows the rule is not understood")),
        }
    }

    /// Reads `%import common.NAME`, `%import common.NAME -> OTHER` or `%import common (NAME, …)`.
    fn import(&mut self) -> Result<(), GrammarError> {
        if self.next() != Some(Lexeme::Name("common".to_owned())) {
            return Err(self.wrong("only the library 'common' can be imported"));
        }
        if self.take(&Lexeme::Sign('.')) {
            let name = self.name()?;
            let other = if self.take(&Lexeme::Arrow) { self.name()? } else { name.clone() };
            return self.import_one(&name, other);
        }
        self.expect('(')?;
        loop {
            let name = self.name()?;
            self.import_one(&name, name.clone())?;
            if !self.take(&Lexeme::Sign(',')) {
                return self.expect(')');
            }
        }
    }

    fn import_one(&mut self, name: &str, other: String) -> Result<(), GrammarError> {
        let Some((_, body)) = COMMON.iter().find(|(common, _)| *common == name) else {
            return Err(self.wrong(format_args!("the library 'common' has no {} here", quoted(name))));
        };
        let expr = GrammarExpr::Regex { body: (*body).to_owned(), flags: String::new() };
        self.grammar.rules.insert(other, expr);
        Ok(())
    }

    fn alternatives(&mut self, depth: usize) -> Result<GrammarExpr, GrammarError> {
        if depth > MAX_DEPTH {
            return Err(self.wrong("is nested too deeply"));
        }
        let mut options = vec![self.sequence(depth)?];
        loop {
            // Inside a group, and before an alternative, a line continues on the next one.
            let mark = self.at;
            while self.take(&Lexeme::NewLine) {}
            if self.take(&Lexeme::Sign('|')) {
                options.push(self.sequence(depth)?);
            } else {
                if depth == 0 {
                    self.at = mark;
                }
                break;
            }
        }
        Ok(if options.len() == 1 { options.remove(0) } else { GrammarExpr::OneOf(options) })
    }

    fn sequence(&mut self, depth: usize) -> Result<GrammarExpr, GrammarError> {
        let mut items = Vec::new();
        loop {
            while depth > 0 && self.take(&Lexeme::NewLine) {}
            let Some(item) = self.item(depth)? else { break };
            items.push(self.repeated(item)?);
        }
        if self.take(&Lexeme::Arrow) {
            self.name()?;
        }
        Ok(if items.len() == 1 { items.remove(0) } else { GrammarExpr::Sequence(items) })
    }

    /// Reads one item without its repetition. `None`: the next word begins no item.
    fn item(&mut self, depth: usize) -> Result<Option<GrammarExpr>, GrammarError> {
        let item = match self.peek() {
            Some(Lexeme::Text { text, any_case }) => GrammarExpr::Text { text: text.clone(), any_case: *any_case },
            Some(Lexeme::Regex { body, flags }) => GrammarExpr::Regex { body: body.clone(), flags: flags.clone() },
            Some(Lexeme::Name(name)) => GrammarExpr::Name(name.clone()),
            Some(Lexeme::Sign('(')) => {
                self.at += 1;
                let inner = self.alternatives(depth + 1)?;
                self.expect(')')?;
                return Ok(Some(inner));
            }
            Some(Lexeme::Sign('[')) => {
                self.at += 1;
                let inner = self.alternatives(depth + 1)?;
                self.expect(']')?;
                return Ok(Some(GrammarExpr::Repeat { expr: Box::new(inner), min: 0, max: Some(1) }));
            }
            _ => return Ok(None),
        };
        self.at += 1;
        match (&item, self.peek()) {
            (GrammarExpr::Text { text, .. }, Some(Lexeme::Dots)) => {
                self.at += 1;
                let last = match self.next() {
                    Some(Lexeme::Text { text, .. }) => only_char(&text),
                    _ => None,
                };
                let (Some(first), Some(last)) = (only_char(text), last) else {
                    return Err(self.wrong("a range has one character on each side"));
                };
                Ok(Some(GrammarExpr::Range(first, last)))
            }
            _ => Ok(Some(item)),
        }
    }

    /// Reads the repetition after an item.
    fn repeated(&mut self, item: GrammarExpr) -> Result<GrammarExpr, GrammarError> {
        let (min, max) = match self.peek() {
            Some(Lexeme::Sign('?')) => (0, Some(1)),
            Some(Lexeme::Sign('*')) => (0, None),
            Some(Lexeme::Sign('+')) => (1, None),
            Some(Lexeme::Sign('~')) => {
                self.at += 1;
                let min = self.number()?;
                let max = if self.take(&Lexeme::Dots) { self.number()? } else { min };
                return Ok(GrammarExpr::Repeat { expr: Box::new(item), min, max: Some(max) });
            }
            Some(Lexeme::Sign('{')) => {
                self.at += 1;
                let min = if self.peek() == Some(&Lexeme::Sign(',')) { 0 } else { self.number()? };
                let max = match (self.take(&Lexeme::Sign(',')), self.peek()) {
                    (false, _) => Some(min),
                    (true, Some(Lexeme::Number(_))) => Some(self.number()?),
                    (true, _) => None,
                };
                self.expect('}')?;
                return Ok(GrammarExpr::Repeat { expr: Box::new(item), min, max });
            }
            _ => return Ok(item),
        };
        self.at += 1;
        Ok(GrammarExpr::Repeat { expr: Box::new(item), min, max })
    }

    fn number(&mut self) -> Result<u32, GrammarError> {
        match self.next() {
            Some(Lexeme::Number(number)) => Ok(number),
            _ => Err(self.wrong("a number is expected")),
        }
    }

    fn name(&mut self) -> Result<String, GrammarError> {
        match self.next() {
            Some(Lexeme::Name(name)) => Ok(name),
            _ => Err(self.wrong("a name is expected")),
        }
    }

    fn expect(&mut self, sign: char) -> Result<(), GrammarError> {
        if self.take(&Lexeme::Sign(sign)) { Ok(()) } else { Err(self.wrong(format_args!("'{sign}' is expected"))) }
    }

    fn take(&mut self, word: &Lexeme) -> bool {
        let is_next = self.peek() == Some(word);
        self.at += usize::from(is_next);
        is_next
    }

    fn peek(&self) -> Option<&Lexeme> {
        self.words.get(self.at).map(|(word, _)| word)
    }

    fn next(&mut self) -> Option<Lexeme> {
        let word = self.peek().cloned();
        self.at += 1;
        word
    }

    fn wrong(&self, problem: impl std::fmt::Display) -> GrammarError {
        let at = self.at.min(self.words.len()).saturating_sub(1);
        let line = self.words.get(at).map_or(1, |(_, line)| *line);
        GrammarError::Syntax { line, problem: problem.to_string() }
    }
}

fn only_char(text: &str) -> Option<char> {
    let mut chars = text.chars();
    chars.next().filter(|_| chars.next().is_none())
}

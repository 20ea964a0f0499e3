//! Shows Markdown with a terminal's styles while it arrives.
//!
//! A parser of whole documents would have to paint over what is already on the screen. This one goes through the text once
//! and holds back only what it cannot place yet. That is the first characters of a line, and a run of `*`, `_` or backticks
//! until the character after it. It knows what models write: headings, lists, quotes, rules, code blocks, emphasis, and code in a
//! line. Everything else stays as it is. Emphasis ends with its line, so a mistake never spreads.
//!
//! No crate does this (November 2026). termimad and pulldown-cmark parse whole texts: an open `**` is two asterisks to them
//! until its end arrives. mdstream commits whole blocks, and its last block changes until then. streamdown-parser takes
//! whole lines, and a model's paragraph is one line. Each would hold a paragraph back or paint it again.

use super::style::{Style, Styled};

/// The longest beginning of a line that is held back.
const MAX_HELD: usize = 64;

/// Renders one reply.
#[derive(Debug, Default)]
pub(super) struct Markdown {
    block: MarkdownBlock,
    /// The beginning of a line, until it is clear what the line is.
    line_start: Option<String>,
    /// A run of one delimiter, until the next character.
    run: Option<MarkRun>,
    /// A backslash, until the next character.
    is_escaped: bool,
    bold: bool,
    italic: bool,
    /// Backticks that end the code in the line; 0 outside code.
    code: usize,
    last: Option<char>,
    out: Vec<Styled>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum MarkdownBlock {
    #[default]
    Paragraph,
    Heading,
    Quote,
    /// Code between fences of at least this many of this character.
    Code {
        mark: char,
        n: usize,
    },
    /// The rest of a line with a fence, which opens code with these values or ends it.
    Fence {
        opens: Option<(char, usize)>,
    },
}

#[derive(Debug, Clone, Copy)]
struct MarkRun {
    mark: char,
    n: usize,
    /// The character before it.
    before: Option<char>,
}

/// What the beginning of a line says.
enum LineStart {
    /// More must come.
    Open,
    Heading,
    Quote,
    /// An item of a list, with its indentation.
    Item {
        indent: usize,
    },
    Fence {
        mark: char,
        n: usize,
    },
    Rule,
    /// None of these.
    Text,
}

impl Markdown {
    /// Adds a piece of the text. Returns what can be shown.
    pub(super) fn push(&mut self, text: &str) -> Vec<Styled> {
        text.chars().for_each(|c| self.take(c));
        std::mem::take(&mut self.out)
    }

    /// Returns what was held back at the end of the text.
    pub(super) fn finish(&mut self) -> Vec<Styled> {
        if let Some(held) = self.line_start.take() {
            self.begin(&held, true);
        }
        self.close_run(None);
        if std::mem::take(&mut self.is_escaped) {
            self.show("\\");
        }
        std::mem::take(&mut self.out)
    }

    fn take(&mut self, c: char) {
        let at_start = self.last.is_none_or(|last| last == '\n') && self.run.is_none() && !self.is_escaped;
        if self.line_start.is_none() && at_start && !matches!(self.block, MarkdownBlock::Fence { .. }) {
            self.line_start = Some(String::new());
        }
        match self.line_start.take() {
            Some(mut held) => {
                if c == '\n' {
                    self.begin(&held, true);
                    self.inline(c);
                } else {
                    held.push(c);
                    self.begin(&held, false);
                }
            }
            None => self.inline(c),
        }
    }

    /// Shows the beginning of a line, or holds it back. `is_whole`: no more of the line comes.
    fn begin(&mut self, held: &str, is_whole: bool) {
        if let MarkdownBlock::Code { mark, n } = self.block {
            match (closes(held, mark, n), is_whole) {
                (Some(true), true) => {
                    self.block = MarkdownBlock::Fence { opens: None };
                    self.push_styled(Style::Dim, held);
                }
                (Some(_), false) => self.line_start = Some(held.to_owned()),
                (Some(false), true) | (None, _) => self.push_styled(Style::Code, held),
            }
            return self.has_begun();
        }
        match line_start(held, is_whole) {
            LineStart::Open => self.line_start = Some(held.to_owned()),
            LineStart::Heading => self.block = MarkdownBlock::Heading,
            LineStart::Quote => {
                self.block = MarkdownBlock::Quote;
                self.push_styled(Style::Dim, "│ ");
            }
            LineStart::Item { indent } => {
                let bullet = format!("{}• ", " ".repeat(indent));
                self.push_styled(Style::Plain, &bullet);
            }
            LineStart::Fence { mark, n } => {
                self.push_styled(Style::Dim, held);
                // The rest of this line names the language.
                self.block = MarkdownBlock::Fence { opens: Some((mark, n)) };
            }
            LineStart::Rule => self.push_styled(Style::Dim, &"─".repeat(24)),
            LineStart::Text => held.chars().for_each(|c| self.inline(c)),
        }
        self.has_begun();
    }

    /// What follows is within the line, also if nothing of it was shown.
    fn has_begun(&mut self) {
        if self.line_start.is_none() {
            self.last = Some(self.last.filter(|last| *last != '\n').unwrap_or(' '));
        }
    }

    /// Takes a character within a line.
    fn inline(&mut self, c: char) {
        if c == '\n' {
            return self.end_line();
        }
        match self.block {
            MarkdownBlock::Code { .. } => return self.push_styled(Style::Code, c.encode_utf8(&mut [0; 4])),
            MarkdownBlock::Fence { .. } => return self.push_styled(Style::Dim, c.encode_utf8(&mut [0; 4])),
            MarkdownBlock::Paragraph | MarkdownBlock::Heading | MarkdownBlock::Quote => {}
        }
        if std::mem::take(&mut self.is_escaped) {
            if !c.is_ascii_punctuation() {
                self.show("\\");
            }
            return self.show_char(c);
        }
        if let Some(run) = &mut self.run {
            if run.mark == c {
                run.n += 1;
                return;
            }
            self.close_run(Some(c));
        }
        match c {
            '*' | '_' if self.code == 0 => self.run = Some(MarkRun { mark: c, n: 1, before: self.last }),
            '`' => self.run = Some(MarkRun { mark: c, n: 1, before: self.last }),
            '\\' if self.code == 0 => self.is_escaped = true,
            c => self.show_char(c),
        }
    }

    fn end_line(&mut self) {
        self.close_run(None);
        if std::mem::take(&mut self.is_escaped) {
            self.show("\\");
        }
        (self.bold, self.italic, self.code) = (false, false, 0);
        self.block = match self.block {
            MarkdownBlock::Code { mark, n } | MarkdownBlock::Fence { opens: Some((mark, n)) } => {
                MarkdownBlock::Code { mark, n }
            }
            _ => MarkdownBlock::Paragraph,
        };
        self.push_styled(Style::Plain, "\n");
        self.last = Some('\n');
    }

    /// Decides what a run of delimiters means, before the character `next`.
    fn close_run(&mut self, next: Option<char>) {
        let Some(MarkRun { mark, n, before }) = self.run.take() else { return };
        let text = mark.to_string().repeat(n);
        self.last = Some(mark);
        if mark == '`' {
            match self.code {
                0 => self.code = n,
                open if open == n => self.code = 0,
                _ => self.show(&text),
            }
            return;
        }
        let is_space = |c: Option<char>| c.is_none_or(char::is_whitespace);
        let is_word = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
        // Single ones and underscores stand within words, as in 2*3 and snake_case.
        let opens = !is_space(next) && !((mark == '_' || n == 1) && is_word(before));
        let closes = !(is_space(before) || mark == '_' && is_word(next));
        let (bold, italic) = match n {
            1 => (false, true),
            2 => (true, false),
            3 => (true, true),
            _ => return self.show(&text),
        };
        let is_open = (bold && self.bold) || (italic && self.italic);
        match is_open {
            true if closes => {
                self.bold &= !bold;
                self.italic &= !italic;
            }
            false if opens => {
                self.bold |= bold;
                self.italic |= italic;
            }
            _ => self.show(&text),
        }
    }

    fn show_char(&mut self, c: char) {
        self.show(c.encode_utf8(&mut [0; 4]));
        self.last = Some(c);
    }

    fn show(&mut self, text: &str) {
        let style = match (self.block, self.code > 0) {
            (_, true) => Style::Code,
            (MarkdownBlock::Heading, _) => Style::Heading,
            _ if self.bold && self.italic => Style::BoldItalic,
            _ if self.bold => Style::Bold,
            _ if self.italic => Style::Italic,
            _ => Style::Plain,
        };
        self.push_styled(style, text);
    }

    fn push_styled(&mut self, style: Style, text: &str) {
        match self.out.last_mut() {
            _ if text.is_empty() => {}
            Some((last, shown)) if *last == style => shown.push_str(text),
            _ => self.out.push((style, text.to_owned())),
        }
    }
}

/// If the beginning of a line within code can still be its closing fence: true if it already is one.
fn closes(held: &str, mark: char, n: usize) -> Option<bool> {
    let trimmed = held.trim_start_matches(' ');
    let n_marks = trimmed.chars().take_while(|&c| c == mark).count();
    let rest = &trimmed[n_marks * mark.len_utf8()..];
    let may = held.len() - trimmed.len() <= 3 && held.len() <= MAX_HELD && rest.chars().all(|c| c == ' ');
    (may && (rest.is_empty() || n_marks >= n)).then_some(n_marks >= n)
}

fn line_start(held: &str, is_whole: bool) -> LineStart {
    let text = held.trim_start_matches([' ', '\t']);
    let indent = held.len() - text.len();
    let open = if is_whole || held.len() > MAX_HELD { LineStart::Text } else { LineStart::Open };
    let Some(first) = text.chars().next() else { return open };
    let n = text.chars().take_while(|&c| c == first).count();
    let rest = &text[n * first.len_utf8()..];
    match first {
        '#' if indent <= 3 && n <= 6 => match rest.chars().next() {
            None => open,
            Some(' ') => LineStart::Heading,
            Some(_) => LineStart::Text,
        },
        '`' | '~' if indent <= 3 && n >= 3 && (is_whole || !rest.is_empty()) => LineStart::Fence { mark: first, n },
        '`' | '~' if indent <= 3 && rest.is_empty() => open,
        '>' if indent <= 3 && n == 1 => match rest.chars().next() {
            None if is_whole => LineStart::Quote,
            None => open,
            Some(' ') => LineStart::Quote,
            Some(_) => LineStart::Text,
        },
        '-' | '*' | '_' if rest.is_empty() => match n {
            3.. if is_whole && indent <= 3 => LineStart::Rule,
            _ => open,
        },
        '-' | '*' | '+' if n == 1 && rest.starts_with(' ') => LineStart::Item { indent },
        '+' if n == 1 && rest.is_empty() => open,
        _ => LineStart::Text,
    }
}

#[cfg(test)]
#[path = "markdown_tests.rs"]
mod tests;

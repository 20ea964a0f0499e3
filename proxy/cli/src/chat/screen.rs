//! What the person sees: styled text on a terminal, plain text where styles are not wanted.

use std::io::{self, Write};

use super::markdown::Markdown;
use super::style::{Style, Styled};

const RESET: &str = "\x1b[0m";

/// Writes a chat to standard output. Each write ends with the plain style, so that nothing else is ever styled.
pub(super) struct Screen {
    has_styles: bool,
    part: ScreenPart,
    markdown: Markdown,
    /// True if the last character was no line break.
    in_line: bool,
}

/// The part of a reply that is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ScreenPart {
    None,
    Reasoning,
    Text,
}

impl Screen {
    /// A screen with styles, unless `NO_COLOR` is set (<https://no-color.org>) or the terminal has none.
    pub(super) fn new() -> Screen {
        let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        Screen {
            has_styles: !is_set("NO_COLOR") && !is_dumb,
            part: ScreenPart::None,
            markdown: Markdown::default(),
            in_line: false,
        }
    }

    /// More of the reply's text, clean.
    pub(super) fn text(&mut self, text: &str) -> io::Result<()> {
        if self.part == ScreenPart::Reasoning {
            // An empty line between the reasoning and the answer.
            self.end_line()?;
            self.write(&[(Style::Plain, "\n".into())])?;
        }
        self.part = ScreenPart::Text;
        let shown = match self.has_styles {
            true => self.markdown.push(text),
            false => vec![(Style::Plain, text.to_owned())],
        };
        self.write(&shown)
    }

    /// More of the model's reasoning, clean.
    pub(super) fn reasoning(&mut self, text: &str) -> io::Result<()> {
        self.part = ScreenPart::Reasoning;
        self.write(&[(Style::Dim, text.to_owned())])
    }

    /// The reply has ended: shows what was held back.
    pub(super) fn end_reply(&mut self) -> io::Result<()> {
        let held = self.markdown.finish();
        self.markdown = Markdown::default();
        self.part = ScreenPart::None;
        self.write(&held)?;
        self.end_line()
    }

    /// A dim line that is not the model's.
    pub(super) fn remark(&mut self, text: &str) -> io::Result<()> {
        self.end_line()?;
        self.write(&[(Style::Dim, text.to_owned()), (Style::Plain, "\n".into())])
    }

    /// A bold line that says what went wrong.
    pub(super) fn problem(&mut self, text: &str) -> io::Result<()> {
        self.end_line()?;
        self.write(&[(Style::Bold, text.to_owned()), (Style::Plain, "\n".into())])
    }

    fn end_line(&mut self) -> io::Result<()> {
        match self.in_line {
            true => self.write(&[(Style::Plain, "\n".into())]),
            false => Ok(()),
        }
    }

    fn write(&mut self, pieces: &[Styled]) -> io::Result<()> {
        let mut bytes = String::new();
        for (style, text) in pieces {
            if self.has_styles && *style != Style::Plain {
                // A style that crosses a line break would fill the line's rest on some terminals.
                let lines = text.replace('\n', &format!("{RESET}\n{}", style.sequence()));
                bytes += &format!("{}{lines}{RESET}", style.sequence());
            } else {
                bytes += text;
            }
        }
        if let Some((_, last)) = pieces.iter().rfind(|(_, text)| !text.is_empty()) {
            self.in_line = !last.ends_with('\n');
        }
        let mut out = io::stdout().lock();
        out.write_all(bytes.as_bytes())?;
        out.flush()
    }
}

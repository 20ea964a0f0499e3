//! Styled text.

/// A piece of text and how it looks.
pub(super) type Styled = (Style, String);

/// How a piece of text looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    Plain,
    Bold,
    Italic,
    BoldItalic,
    Code,
    Heading,
    /// Reasoning, routes, and marks of Markdown.
    Dim,
}

impl Style {
    /// What a terminal understands; empty for plain text.
    pub(super) fn sequence(self) -> &'static str {
        match self {
            Style::Plain => "",
            Style::Bold => "\x1b[1m",
            Style::Italic => "\x1b[3m",
            Style::BoldItalic => "\x1b[1;3m",
            Style::Code => "\x1b[36m",
            Style::Heading => "\x1b[1;4m",
            Style::Dim => "\x1b[2m",
        }
    }
}

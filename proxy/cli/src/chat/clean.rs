//! Removes from a model's text what would control a terminal: escape sequences as a whole, and other control characters.

/// The longest sequence that is removed as one. A longer one is text from there on: it may not swallow a reply.
const MAX_SEQUENCE: usize = 256;

/// Cleans a text that comes in pieces: a sequence may be cut anywhere.
#[derive(Debug, Default)]
pub(super) struct Cleaner {
    state: EscapeState,
    /// Characters of the sequence so far.
    n: usize,
}

/// Where in an escape sequence the text is.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum EscapeState {
    #[default]
    Text,
    /// After ESC.
    Escape,
    /// After ESC and an intermediate character: one more ends it.
    Intermediate,
    /// A control sequence, up to its final character.
    Control,
    /// A string, as of a title or a link, up to BEL or ST.
    String,
    /// After ESC within a string.
    StringEscape,
}

impl Cleaner {
    /// Returns the text without control characters, except line breaks and tabs.
    pub(super) fn clean(&mut self, piece: &str) -> String {
        piece.chars().filter(|&c| self.keeps(c)).collect()
    }

    fn keeps(&mut self, c: char) -> bool {
        self.n += 1;
        // A line break ends every sequence, so that a broken one costs a line at most.
        if c == '\n' || self.n > MAX_SEQUENCE {
            self.state = EscapeState::Text;
        }
        let (next, keeps) = match (self.state, c) {
            (EscapeState::String, '\x1b') => (EscapeState::StringEscape, false),
            (_, '\x1b') => (EscapeState::Escape, false),
            (EscapeState::Text, '\u{9b}') => (EscapeState::Control, false),
            (EscapeState::Text, '\u{90}' | '\u{98}' | '\u{9d}'..='\u{9f}') => (EscapeState::String, false),
            (EscapeState::Text, c) => (EscapeState::Text, is_harmless(c)),
            (EscapeState::Escape, '[') => (EscapeState::Control, false),
            (EscapeState::Escape, ']' | 'P' | 'X' | '^' | '_') => (EscapeState::String, false),
            (EscapeState::Escape, ' '..='/') => (EscapeState::Intermediate, false),
            (EscapeState::Control, '\x20'..='\x3f') => (EscapeState::Control, false),
            (EscapeState::String, c) if c != '\x07' && c != '\u{9c}' => (EscapeState::String, false),
            (EscapeState::StringEscape, c) if c != '\\' => (EscapeState::String, false),
            // The last character of a sequence.
            (_, _) => (EscapeState::Text, false),
        };
        if next == EscapeState::Text {
            self.n = 0;
        }
        self.state = next;
        keeps
    }
}

/// Returns false for control characters, and for those that reorder the text around them.
fn is_harmless(c: char) -> bool {
    let reorders = matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    matches!(c, '\n' | '\t') || !(c.is_control() || reorders)
}

/// Cleans a whole text.
pub(super) fn clean(text: &str) -> String {
    Cleaner::default().clean(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_go_as_a_whole_and_text_stays() {
        let check = |text: &str, expected: &str| assert_eq!(clean(text), expected, "{text:?}");
        check("plain\ttext\nä 漢 🙂", "plain\ttext\nä 漢 🙂");
        check("a\x1b[31mred\x1b[0m b", "ared b");
        check("\x1b]0;title\x07x\x1b]8;;http://e\x1b\\link\x1b]8;;\x1b\\", "xlink");
        check("\x1bPq#0\x1b\\x\x1b(By\x1bcz", "xyz");
        check("a\u{9b}31mb\u{9d}0;t\u{9c}c", "abc");
        check("bell\x07 back\x08 return\r del\x7f nul\0", "bell back return del nul");
        check("\u{202e}abc\u{2066}", "abc");
        check("\x1b[2J\x1b[1;1Hgone", "gone");
    }

    #[test]
    fn a_sequence_may_be_cut_anywhere() {
        let text = "a\x1b[38;5;196mb\x1b]52;c;aGk=\x07c\x1b]2;t\x1b\\d";
        for cut in (0..text.len()).filter(|&cut| text.is_char_boundary(cut)) {
            let mut cleaner = Cleaner::default();
            assert_eq!(cleaner.clean(&text[..cut]) + &cleaner.clean(&text[cut..]), "abcd", "{cut}");
        }
    }

    #[test]
    fn a_sequence_without_an_end_costs_no_more_than_its_line() {
        assert_eq!(clean("\x1b]0;title\nnext"), "\nnext");
        let long = format!("\x1b]{}", "x".repeat(10_000));
        assert!(clean(&long).len() > 9_000);
    }
}

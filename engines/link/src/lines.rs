//! Splits bytes that arrive in pieces into lines of bounded length.

use baton_schemas::EngineError;
use bytes::Bytes;
use memchr::{memchr, memchr2};

/// The longest line. A token with 20 alternatives takes some kilobytes.
const MAX_LINE_BYTES: usize = 1 << 20;

/// Splits pieces of bytes into lines. A line within one piece is not copied.
#[derive(Default)]
pub struct LineBuffer {
    piece: Bytes,
    /// The bytes of the piece that were read.
    n_read: usize,
    /// A line's beginning, from earlier pieces.
    begun: Vec<u8>,
    /// `begun` is a whole line, which was read.
    is_whole: bool,
    ends: LineEnds,
    /// The last line ended with a carriage return, of which a newline that follows is a part.
    may_skip_newline: bool,
}

/// What ends a line.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum LineEnds {
    #[default]
    Newline,
    /// A newline, a carriage return, or both, as in server-sent events.
    Any,
}

impl LineBuffer {
    /// Lines of server-sent events, which also end with a carriage return.
    pub fn of_events() -> LineBuffer {
        LineBuffer { ends: LineEnds::Any, ..LineBuffer::default() }
    }

    /// Adds a piece. All lines of the piece before must have been read.
    pub fn push(&mut self, piece: Bytes) {
        self.piece = piece;
        self.n_read = 0;
    }

    /// The next line without its end; `None` before the next piece. Errors: the line is too long.
    pub fn next_line(&mut self) -> Result<Option<&[u8]>, EngineError> {
        if std::mem::take(&mut self.is_whole) {
            self.begun.clear();
        }
        if self.may_skip_newline && self.n_read < self.piece.len() {
            self.may_skip_newline = false;
            self.n_read += usize::from(self.piece[self.n_read] == b'\n');
        }
        let unread = &self.piece[self.n_read..];
        let found = match self.ends {
            LineEnds::Newline => memchr(b'\n', unread),
            LineEnds::Any => memchr2(b'\n', b'\r', unread),
        };
        self.may_skip_newline |= found.is_some_and(|n| unread[n] == b'\r');
        let line = &unread[..found.unwrap_or(unread.len())];
        if self.begun.len() + line.len() > MAX_LINE_BYTES {
            return Err(EngineError::lost("a line of the stream is too long"));
        }
        match found {
            Some(n) if self.begun.is_empty() => {
                let from = self.n_read;
                self.n_read += n + 1;
                Ok(Some(&self.piece[from..from + n]))
            }
            Some(n) => {
                self.begun.extend_from_slice(line);
                self.n_read += n + 1;
                self.is_whole = true;
                Ok(Some(&self.begun))
            }
            None => {
                self.begun.extend_from_slice(line);
                self.push(Bytes::new());
                Ok(None)
            }
        }
    }

    /// The beginning of a line whose end has not come. All whole lines must have been read.
    pub fn rest(&self) -> &[u8] {
        &self.begun
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The whole lines of these pieces, and what is left of the last one.
    fn split(pieces: &[&'static str]) -> (Vec<String>, Vec<u8>) {
        let mut lines = LineBuffer::default();
        let mut seen = Vec::new();
        for piece in pieces {
            lines.push(Bytes::from_static(piece.as_bytes()));
            while let Some(line) = lines.next_line().unwrap() {
                seen.push(String::from_utf8(line.to_vec()).unwrap());
            }
        }
        (seen, lines.rest().to_vec())
    }

    #[test]
    fn lines_are_found_wherever_the_pieces_break() {
        let lines = |lines: &[&str]| lines.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(split(&["a\nbc\n"]), (lines(&["a", "bc"]), vec![]));
        assert_eq!(split(&["a", "b", "\n", "\nc\n"]), (lines(&["ab", "", "c"]), vec![]));
        assert_eq!(split(&["a\nb"]), (lines(&["a"]), b"b".to_vec()));
    }

    #[test]
    fn lines_of_events_end_with_either_character_or_both() {
        let text = b"a\rb\n\rc\r\n\r\nd\r\r\n";
        for cut in 0..=text.len() {
            let mut lines = LineBuffer::of_events();
            let mut seen = Vec::new();
            for piece in [&text[..cut], &text[cut..]] {
                lines.push(Bytes::from_static(piece));
                while let Some(line) = lines.next_line().unwrap() {
                    seen.push(String::from_utf8(line.to_vec()).unwrap());
                }
            }
            assert_eq!(
                (seen, lines.rest()),
                (["a", "b", "", "c", "", "d", ""].map(String::from).into(), &b""[..]),
                "{cut}"
            );
        }
    }

    #[test]
    fn a_line_that_does_not_end_is_bounded() {
        let mut lines = LineBuffer::default();
        lines.push(Bytes::from(vec![b'x'; MAX_LINE_BYTES]));
        assert_eq!(lines.next_line(), Ok(None));
        lines.push(Bytes::from_static(b"x\n"));
        assert!(matches!(lines.next_line(), Err(EngineError::Lost { .. })));
    }
}

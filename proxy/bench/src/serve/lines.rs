//! Splits a body into lines, without copying those that arrive whole.

/// The longest line that is read.
const MAX_LINE_BYTES: usize = 4 << 20;

/// A line is longer than [`MAX_LINE_BYTES`].
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LineTooLong;

/// The start of a line whose end has not arrived.
#[derive(Debug, Default)]
pub(super) struct LineSplitter {
    pending: Vec<u8>,
}

impl LineSplitter {
    /// Calls `take` with each line that `bytes` completes, without its newline.
    pub(super) fn feed(&mut self, mut bytes: &[u8], mut take: impl FnMut(&[u8])) -> Result<(), LineTooLong> {
        while let Some(end) = memchr::memchr(b'\n', bytes) {
            if self.pending.is_empty() {
                take(&bytes[..end]);
            } else {
                self.pending.extend_from_slice(&bytes[..end]);
                take(&self.pending);
                self.pending.clear();
            }
            bytes = &bytes[end + 1..];
        }
        if self.pending.len() + bytes.len() > MAX_LINE_BYTES {
            return Err(LineTooLong);
        }
        self.pending.extend_from_slice(bytes);
        Ok(())
    }

    /// What follows the last newline.
    pub(super) fn rest(&self) -> &[u8] {
        &self.pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_wherever_the_pieces_break() {
        let mut splitter = LineSplitter::default();
        let mut seen = Vec::new();
        for piece in ["a\nbc", "d", "\n\n", "e\nrest"] {
            splitter.feed(piece.as_bytes(), |line| seen.push(String::from_utf8_lossy(line).into_owned())).unwrap();
        }
        assert_eq!(seen, ["a", "bcd", "", "e"]);
        assert_eq!(splitter.rest(), b"rest");
        assert_eq!(splitter.feed(&vec![b'x'; MAX_LINE_BYTES], |_| ()), Err(LineTooLong));
    }
}

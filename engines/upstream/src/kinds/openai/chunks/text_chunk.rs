//! Chunks of which only the text changes. Servers write most of a reply in such chunks, and the bytes around the text are
//! the same in all of them.

/// The bytes around the text of a chunk that was parsed and brought nothing else.
///
/// A chunk with the same bytes around another text is the same JSON with another text at the same place, so it need not be
/// parsed.
#[derive(Debug, Default)]
pub(super) struct TextChunk {
    /// Ends with the quote that opens the text. Empty if no such chunk was parsed.
    before: Vec<u8>,
    after: Vec<u8>,
}

impl TextChunk {
    /// Keeps the bytes of `event` around `text`, which a parser returned as a part of `event`. Does nothing if it is none:
    /// a text with escapes is a copy.
    pub(super) fn learn(&mut self, event: &[u8], text: &str) {
        let Some(from) = text.as_ptr().addr().checked_sub(event.as_ptr().addr()) else { return };
        let to = from.saturating_add(text.len());
        if event.get(from..to) == Some(text.as_bytes()) && event[..from].ends_with(b"\"") {
            self.before.clear();
            self.before.extend_from_slice(&event[..from]);
            self.after.clear();
            self.after.extend_from_slice(&event[to..]);
        }
    }

    /// The text of a chunk with the known bytes around it. `None`: the chunk has to be parsed.
    pub(super) fn text<'e>(&self, event: &'e [u8]) -> Option<&'e str> {
        if self.before.is_empty() {
            return None;
        }
        let text = event.strip_prefix(&self.before[..])?.strip_suffix(&self.after[..])?;
        // Such bytes are escaped in JSON, or begin an escape.
        let is_verbatim = text.iter().all(|byte| !matches!(byte, b'"' | b'\\' | ..0x20));
        if is_verbatim { std::str::from_utf8(text).ok() } else { None }
    }
}

//! Splits a stream of byte chunks into lines of bounded length. Used for upstreams.

use baton_schemas::EngineError;
use bytes::{Buf, Bytes, BytesMut};
use futures::{Stream, StreamExt};

/// The longest line. A token with 20 alternatives takes some kilobytes.
const MAX_LINE_BYTES: usize = 1 << 20;

/// The lines of a byte stream.
pub(crate) struct ByteLines<S> {
    chunks: std::pin::Pin<Box<S>>,
    pending: BytesMut,
}

impl<S: Stream<Item = reqwest::Result<Bytes>>> ByteLines<S> {
    pub(crate) fn new(chunks: S) -> Self {
        ByteLines { chunks: Box::pin(chunks), pending: BytesMut::new() }
    }

    /// The next line without its newline; `None` at the end of the stream. Errors: the line is too long, or the stream
    /// ends inside a line.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, EngineError> {
        let mut searched = 0;
        loop {
            if let Some(at) = self.pending[searched..].iter().position(|&b| b == b'\n') {
                let line = self.pending.split_to(searched + at).freeze();
                self.pending.advance(1);
                return Ok(Some(line));
            }
            searched = self.pending.len();
            if searched > MAX_LINE_BYTES {
                return Err(EngineError::lost("a line of the stream is too long"));
            }
            match self.chunks.next().await {
                Some(Ok(chunk)) => self.pending.extend_from_slice(&chunk),
                Some(Err(error)) => return Err(EngineError::lost(error)),
                None if self.pending.is_empty() => return Ok(None),
                None => return Err(EngineError::lost("the stream was cut inside a line")),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn split(chunks: &[&'static str]) -> (Vec<String>, Option<EngineError>) {
        let chunks: Vec<_> = chunks.iter().map(|c| Ok(Bytes::from_static(c.as_bytes()))).collect();
        let mut lines = ByteLines::new(futures::stream::iter(chunks));
        let mut seen = Vec::new();
        loop {
            match lines.next().await {
                Ok(Some(line)) => seen.push(String::from_utf8(line.to_vec()).unwrap()),
                Ok(None) => return (seen, None),
                Err(error) => return (seen, Some(error)),
            }
        }
    }

    #[tokio::test]
    async fn lines_are_found_wherever_the_chunks_break() {
        assert_eq!(split(&["a\nbc\n"]).await, (vec!["a".into(), "bc".into()], None));
        assert_eq!(split(&["a", "b", "\n", "\nc\n"]).await, (vec!["ab".into(), "".into(), "c".into()], None));
    }

    #[tokio::test]
    async fn a_stream_that_ends_inside_a_line_is_an_error() {
        let (seen, error) = split(&["a\nb"]).await;
        assert_eq!(seen, ["a"]);
        assert!(matches!(error, Some(EngineError::Lost { .. })));
    }
}

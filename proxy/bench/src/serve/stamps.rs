//! The text of `baton-bench mock`: each token is `INDEX:NANOSECONDS `, the time at which the mock wrote it.

use std::time::{SystemTime, UNIX_EPOCH};

/// The time of this machine's clock, nanoseconds since 1970. Client and mock run on the same machine.
pub(crate) fn clock_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// Reads tokens of the mock's text wherever the chunks break.
#[derive(Debug, Default)]
pub(super) struct StampReader {
    /// The start of a token whose end has not arrived.
    pending: String,
    pub(super) n_tokens: u64,
    pub(super) is_in_order: bool,
}

impl StampReader {
    pub(super) fn new() -> StampReader {
        StampReader { is_in_order: true, ..StampReader::default() }
    }

    /// Reads the next piece of text. `take` gets the time stamp of each complete token, unless it is 0.
    pub(super) fn read(&mut self, text: &str, mut take: impl FnMut(u64)) {
        for piece in text.split_inclusive(' ') {
            let whole = match piece.strip_suffix(' ') {
                // Longer than a token of the mock: it is other text.
                None if self.pending.len() + piece.len() > 64 => {
                    self.is_in_order = false;
                    continue;
                }
                None => {
                    self.pending.push_str(piece);
                    continue;
                }
                Some(end) if self.pending.is_empty() => parse(end),
                Some(end) => {
                    self.pending.push_str(end);
                    let whole = parse(&self.pending);
                    self.pending.clear();
                    whole
                }
            };
            match whole {
                Some(Stamp { index, ns }) if index == self.n_tokens => {
                    if ns > 0 {
                        take(ns);
                    }
                }
                _ => self.is_in_order = false,
            }
            self.n_tokens += 1;
        }
    }

    /// Returns true if all tokens arrived in order and the last one is whole.
    pub(super) fn is_whole(&self) -> bool {
        self.is_in_order && self.pending.is_empty()
    }
}

struct Stamp {
    index: u64,
    ns: u64,
}

fn parse(token: &str) -> Option<Stamp> {
    let (index, ns) = token.split_once(':')?;
    Some(Stamp { index: index.parse().ok()?, ns: ns.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pieces: &[&str]) -> (Vec<u64>, bool) {
        let mut reader = StampReader::new();
        let mut stamps = Vec::new();
        pieces.iter().for_each(|piece| reader.read(piece, |ns| stamps.push(ns)));
        (stamps, reader.is_whole())
    }

    #[test]
    fn a_missing_doubled_or_cut_token_is_noticed() {
        assert_eq!(read(&["0:17 ", "1:18 2:19 "]), (vec![17, 18, 19], true));
        assert_eq!(read(&["0:1", "7 1", ":", "18 "]), (vec![17, 18], true));
        assert_eq!(read(&["0:0 1:0 "]), (vec![], true), "0 is no time");
        assert!(!read(&["0:17 ", "2:18 "]).1);
        assert!(!read(&["0:17 ", "0:17 "]).1);
        assert!(!read(&["0:17 ", "1:18"]).1);
        assert!(!read(&["hello "]).1);
    }
}

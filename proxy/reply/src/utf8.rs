//! Decodes whole characters from byte pieces that may end inside a character.

/// Decodes a byte string that arrives in pieces.
///
/// However the bytes are cut, the concatenated output equals [`String::from_utf8_lossy`] of the uncut bytes.
#[derive(Debug, Clone, Default)]
pub struct Utf8Pieces {
    /// The beginning of one character, at most three bytes.
    ///
    /// It is held back because a client that shows it as U+FFFD sends U+FFFD back next turn, and the prefix cache
    /// misses.
    pending: Vec<u8>,
}

impl Utf8Pieces {
    /// Takes the next bytes and returns the text that is now final. Invalid bytes become U+FFFD.
    pub fn feed(&mut self, bytes: Vec<u8>) -> String {
        if self.pending.is_empty() {
            // Most pieces end at the end of a character, and their bytes become the text without a copy.
            match String::from_utf8(bytes) {
                Ok(text) => return text,
                Err(error) => self.pending = error.into_bytes(),
            }
        } else {
            self.pending.extend_from_slice(&bytes);
        }
        let n_certain = n_certain(&self.pending);
        let text = String::from_utf8_lossy(&self.pending[..n_certain]).into_owned();
        self.pending.drain(..n_certain);
        text
    }

    /// Ends the text: an unfinished character becomes U+FFFD. Afterwards a new text can begin.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending.clear();
        text
    }

    /// Returns true if `byte` continues the held back character.
    pub fn is_continued_by(&self, byte: u8) -> bool {
        let joined = [self.pending.as_slice(), &[byte]].concat();
        // Only an invalid byte cuts a held character short.
        let broken = std::str::from_utf8(&joined).is_err_and(|error| error.error_len().is_some());
        !self.pending.is_empty() && !broken
    }

    /// Returns true if the bytes so far end inside a character.
    pub fn is_mid_character(&self) -> bool {
        !self.pending.is_empty()
    }
}

/// The number of leading bytes that decode to the same text whatever follows.
fn n_certain(bytes: &[u8]) -> usize {
    let mut checked = 0;
    while let Err(error) = std::str::from_utf8(&bytes[checked..]) {
        match error.error_len() {
            Some(n_invalid) => checked += error.valid_up_to() + n_invalid,
            // The input ended inside a character that is valid so far.
            None => return checked + error.valid_up_to(),
        }
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode(pieces: &[&[u8]]) -> (Vec<String>, String) {
        let mut utf8 = Utf8Pieces::default();
        let texts = pieces.iter().map(|piece| utf8.feed(piece.to_vec())).collect();
        let tail = utf8.finish();
        (texts, tail)
    }

    fn check(pieces: &[&[u8]], texts: &[&str], tail: &str) {
        assert_eq!(decode(pieces), (texts.iter().map(ToString::to_string).collect(), tail.to_string()));
    }

    #[test]
    fn a_character_cut_in_pieces_comes_out_whole() {
        check(&[b"a\xF0\x9F", b"\x98", b"\x80b"], &["a", "", "😀b"], "");
        check(&["é".as_bytes(), "漢字".as_bytes()], &["é", "漢字"], "");
    }

    #[test]
    fn a_byte_that_cannot_be_part_of_a_character_is_replaced_at_once() {
        check(&[b"a\xFF", b"b"], &["a\u{FFFD}", "b"], "");
        // A started character that is not continued, and a lone continuation byte.
        check(&[b"\xF0\x9F", b"a"], &["", "\u{FFFD}a"], "");
        check(&[b"\xE0", b"\x80"], &["", "\u{FFFD}\u{FFFD}"], "");
    }

    #[test]
    fn an_unfinished_character_is_replaced_at_the_end() {
        check(&[b"a\xF0\x9F\x98"], &["a"], "\u{FFFD}");
        check(&[], &[], "");
    }

    /// Bytes that are often, but not always, UTF-8.
    fn nearly_utf8() -> impl Strategy<Value = Vec<u8>> {
        let chunk = prop_oneof![
            ".{0,4}".prop_map(String::into_bytes),
            prop::collection::vec(any::<u8>(), 0..4),
            Just(vec![0xF0, 0x9F]),
            Just(vec![0xED, 0xA0, 0x80]),
        ];
        prop::collection::vec(chunk, 0..8).prop_map(|chunks| chunks.concat())
    }

    proptest! {
        #[test]
        fn however_the_bytes_are_cut_the_text_is_the_same(
            bytes in nearly_utf8(),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        ) {
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
            cuts.extend([0, bytes.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &bytes[pair[0]..pair[1]]).collect();
            let (texts, tail) = decode(&pieces);
            prop_assert_eq!(texts.concat() + &tail, String::from_utf8_lossy(&bytes));
        }
    }
}

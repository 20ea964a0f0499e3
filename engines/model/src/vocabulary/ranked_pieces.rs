//! Byte pairs of characters, as Gemma 4 has them: a space is a character of its own, and only what has no token becomes bytes.
//!
//! The rules are those of `LLAMA_VOCAB_PRE_TYPE_GEMMA4` in llama.cpp's `llama-vocab.cpp`, of the version that Cargo.toml pins.

use std::collections::HashMap;

use baton_schemas::{EngineError, Token};
use tokio_util::sync::CancellationToken;

use super::byte_pairs::{Merges, NONE};

/// The character that stands for a space.
const SPACE: &str = "\u{2581}";

/// A vocabulary whose merges have ranks.
pub(super) struct RankedPieces {
    characters: HashMap<char, Token>,
    /// The token of each byte, of which characters without a token consist. A byte without one, [`NONE`], gives nothing.
    bytes: Box<[Token; 256]>,
    /// The tokens that consist of line breaks. A run of line breaks that is one is not merged.
    lines: HashMap<Box<str>, Token>,
    merges: Merges,
}

impl RankedPieces {
    /// `spellings` are those of all tokens, and `merges` the file's, in the order of their ranks. Errors: the merge that makes no
    /// token.
    pub(super) fn new(spellings: &[String], merges: &[String]) -> Result<Self, String> {
        let tokens: HashMap<&str, Token> = spellings.iter().map(String::as_str).zip(0..).collect();
        let byte = |byte: usize| tokens.get(format!("<0x{byte:02X}>").as_str()).copied().unwrap_or(NONE);
        let character = |(text, token): (&&str, &Token)| {
            let mut characters = text.chars();
            characters.next().filter(|_| characters.next().is_none()).map(|character| (character, *token))
        };
        let is_lines = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte == b'\n');
        let lines = tokens.iter().filter(|(text, _)| is_lines(text)).map(|(text, token)| (Box::from(*text), *token));
        Ok(RankedPieces {
            characters: tokens.iter().filter_map(character).collect(),
            bytes: Box::new(std::array::from_fn(byte)),
            lines: lines.collect(),
            merges: Merges::new(&tokens, merges)?,
        })
    }

    /// Adds the tokens of a text without special tokens. Errors: the caller has gone.
    pub(super) fn tokenize(
        &self,
        text: &str,
        tokens: &mut Vec<Token>,
        is_abandoned: &CancellationToken,
    ) -> Result<(), EngineError> {
        let text = text.replace(' ', SPACE);
        let mut rest = &text[..];
        // Words are runs of line breaks, and what is between them.
        while !rest.is_empty() {
            let is_lines = rest.starts_with('\n');
            let end = rest.find(|character| (character == '\n') != is_lines).unwrap_or(rest.len());
            let (word, after) = rest.split_at(end);
            match self.lines.get(word) {
                Some(&token) => tokens.push(token),
                None => self.merges.merge(self.first(word).into_iter(), word.len(), tokens, is_abandoned)?,
            }
            rest = after;
        }
        Ok(())
    }

    /// The tokens of a word's characters, or of their bytes.
    fn first(&self, word: &str) -> Vec<Token> {
        let mut first = Vec::with_capacity(word.len());
        for character in word.chars() {
            match self.characters.get(&character) {
                Some(&token) => first.push(token),
                None => {
                    let mut bytes = [0; 4];
                    let bytes = character.encode_utf8(&mut bytes).bytes();
                    first.extend(bytes.map(|byte| self.bytes[usize::from(byte)]));
                }
            }
        }
        first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_characters_are_merged_by_rank_and_line_breaks_at_once() {
        let spellings = ["<0xC3>", "<0xA9>", "\u{2581}", "a", "b", "ab", "\u{2581}a", "\n", "\n\n", "\n\n\n", "aa"];
        let merges = ["a b", "\u{2581} a", "\n \n"];
        let pieces = RankedPieces::new(&spellings.map(str::to_owned), &merges.map(str::to_owned)).unwrap();
        let tokens = |text: &str| {
            let mut tokens = Vec::new();
            pieces.tokenize(text, &mut tokens, &CancellationToken::new()).unwrap();
            tokens
        };
        assert_eq!(tokens(" ab"), [2, 5], "a and b have the lower rank");
        assert_eq!(tokens(" a"), [6]);
        assert_eq!(tokens("aa"), [3, 3], "a token that no merge makes");
        assert_eq!(tokens("\u{e9}a"), [0, 1, 3], "a character without a token");
        assert_eq!(tokens("a\n\n\nb"), [3, 9, 4], "a run of line breaks that is a token");
        assert_eq!(tokens("\n\n\n\n"), [8, 8], "one that is none");
        assert_eq!(tokens("z"), Vec::<Token>::new(), "a byte without a token");
        assert!(RankedPieces::new(&["a".to_owned()], &["a a".to_owned()]).is_err());
    }
}

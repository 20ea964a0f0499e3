//! SentencePiece's unigrams as llama.cpp merges them: the pair of neighbours whose token has the best score first.
//!
//! The rules are those of `llm_tokenizer_spm_session` in llama.cpp's `llama-vocab.cpp`, of the version that Cargo.toml
//! pins. Time is n log n in the text's length.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

use baton_schemas::{EngineError, Token};
use tokio_util::sync::CancellationToken;

use super::caller_has_gone;

/// The character that stands for a space.
const SPACE: &str = "\u{2581}";

/// A vocabulary whose tokens have scores.
pub(super) struct SentencePieces {
    tokens: HashMap<Box<str>, Token>,
    scores: Vec<f32>,
    /// The token of each byte that no other token has.
    bytes: Box<[Token; 256]>,
    /// A text begins with a space.
    add_space_prefix: bool,
}

impl SentencePieces {
    /// `spellings` and `scores` are those of all tokens. A byte without a token becomes `unknown`.
    pub(super) fn new<'v>(
        spellings: impl IntoIterator<Item = &'v str>,
        scores: Vec<f32>,
        unknown: Token,
        add_space_prefix: bool,
    ) -> Self {
        let tokens: HashMap<Box<str>, Token> = spellings.into_iter().map(Box::from).zip(0..).collect();
        let token = |byte: usize| {
            let byte = byte as u8;
            let spelled = tokens.get(format!("<0x{byte:02X}>").as_str());
            let itself = || byte.is_ascii().then(|| tokens.get((byte as char).to_string().as_str())).flatten();
            spelled.or_else(itself).copied().unwrap_or(unknown)
        };
        let bytes = Box::new(std::array::from_fn(token));
        SentencePieces { tokens, scores, bytes, add_space_prefix }
    }

    /// Adds the tokens of a text without special tokens. Errors: the caller has gone.
    pub(super) fn tokenize(
        &self,
        text: &str,
        tokens: &mut Vec<Token>,
        is_abandoned: &CancellationToken,
    ) -> Result<(), EngineError> {
        let prefix = if self.add_space_prefix { SPACE } else { "" };
        let text = prefix.to_owned() + &text.replace(' ', SPACE);
        let mut pieces = LinkedPieces::new(&text);
        let mut pairs: BinaryHeap<Pair> = (0..pieces.all.len()).filter_map(|left| self.pair(&pieces, left)).collect();
        let mut n_seen = 0u32;
        while let Some(pair) = pairs.pop() {
            n_seen = n_seen.wrapping_add(1);
            if n_seen.is_multiple_of(1 << 16) && is_abandoned.is_cancelled() {
                return Err(caller_has_gone());
            }
            if pieces.len_with_next(pair.left) != Some(pair.n_bytes) {
                // One of its pieces was merged with another one.
                continue;
            }
            let before = pieces.merge(pair.left);
            pairs.extend([before, Some(pair.left)].into_iter().flatten().filter_map(|left| self.pair(&pieces, left)));
        }
        for piece in pieces.texts() {
            match self.tokens.get(piece) {
                Some(&token) => tokens.push(token),
                None => tokens.extend(piece.bytes().map(|byte| self.bytes[usize::from(byte)])),
            }
        }
        Ok(())
    }

    /// The pair of a piece and the one after it, if they make a token.
    fn pair(&self, pieces: &LinkedPieces<'_>, left: usize) -> Option<Pair> {
        let n_bytes = pieces.len_with_next(left)?;
        let start = pieces.all[left].start;
        let token = *self.tokens.get(&pieces.text[start..start + n_bytes])?;
        Some(Pair { score: self.scores.get(token as usize).copied().unwrap_or(0.0), left, n_bytes })
    }
}

/// Two neighbours that make a token. The best score is the greatest, and of equal ones the leftmost.
struct Pair {
    score: f32,
    left: usize,
    /// The length of both, which tells whether they are still there.
    n_bytes: usize,
}

impl Ord for Pair {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Pair {}

/// The pieces of a text, as a linked list; at first its characters.
struct LinkedPieces<'t> {
    text: &'t str,
    all: Vec<LinkedPiece>,
}

struct LinkedPiece {
    start: usize,
    /// 0 if it has been merged into the piece before it.
    n_bytes: usize,
    previous: Option<u32>,
    next: Option<u32>,
}

impl<'t> LinkedPieces<'t> {
    fn new(text: &'t str) -> Self {
        let piece = |(at, (start, c)): (u32, (usize, char))| LinkedPiece {
            start,
            n_bytes: c.len_utf8(),
            previous: at.checked_sub(1),
            next: Some(at + 1),
        };
        let mut all: Vec<LinkedPiece> = (0..).zip(text.char_indices()).map(piece).collect();
        if let Some(last) = all.last_mut() {
            last.next = None;
        }
        LinkedPieces { text, all }
    }

    /// The length of a piece and the one after it. `None`: it has been merged, or is the last one.
    fn len_with_next(&self, left: usize) -> Option<usize> {
        let piece = &self.all[left];
        let next = &self.all[piece.next? as usize];
        (piece.n_bytes > 0).then(|| piece.n_bytes + next.n_bytes)
    }

    /// Merges a piece with the one after it. Returns the piece before it.
    fn merge(&mut self, left: usize) -> Option<usize> {
        let next = self.all[left].next? as usize;
        let after = self.all[next].next;
        self.all[left].n_bytes += std::mem::take(&mut self.all[next].n_bytes);
        self.all[left].next = after;
        if let Some(after) = after {
            self.all[after as usize].previous = u32::try_from(left).ok();
        }
        self.all[left].previous.map(|previous| previous as usize)
    }

    fn texts(&self) -> impl Iterator<Item = &'t str> {
        let LinkedPieces { text, all } = self;
        all.iter().filter(|piece| piece.n_bytes > 0).map(|piece| &text[piece.start..piece.start + piece.n_bytes])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_score_is_merged_first_and_bytes_stand_for_what_has_no_token() {
        let spellings = ["<unk>", "\u{2581}", "a", "b", "ab", "\u{2581}a", "<0xC3>", "<0xA9>", "aab"];
        let scores = vec![0.0, -1.0, -2.0, -3.0, -5.0, -4.0, 0.0, 0.0, -6.0];
        let tokens = |text: &str, prefix: bool| {
            let pieces = SentencePieces::new(spellings, scores.clone(), 0, prefix);
            let mut tokens = Vec::new();
            pieces.tokenize(text, &mut tokens, &CancellationToken::new()).unwrap();
            tokens
        };
        assert_eq!(tokens("ab", false), [4]);
        assert_eq!(tokens("ab", true), [5, 3], "the space and a have the better score");
        assert_eq!(tokens("aab", false), [8], "a and ab merge after a and b");
        assert_eq!(tokens("é a", false), [6, 7, 5]);
        assert_eq!(tokens("z", false), [0], "a byte without a token");
        assert_eq!(tokens("", false), Vec::<Token>::new());
    }
}

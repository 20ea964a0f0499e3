//! Byte-pair encoding: merges a word's bytes into tokens, the pair with the lowest rank first.
//!
//! Time is n log n in the word's length, and memory about 30 bytes for each of its bytes.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::{Mutex, PoisonError};

use baton_schemas::{EngineError, Token};
use tokio_util::sync::CancellationToken;

use super::caller_has_gone;
use super::pre::Stages;
use crate::gguf::byte_level::spelled;

/// Longer words are merged one at a time, bytes: they take much memory.
const HUGE_WORD: usize = 1 << 20;

/// A byte-pair vocabulary.
pub struct BytePairs {
    stages: Stages,
    /// The token of each byte. A byte without one, [`NONE`], gives nothing, as in llama.cpp.
    bytes: Box<[Token; 256]>,
    merges: Merges,
    /// All tokens by their spelling. Empty unless a word that is a token is not merged from its bytes.
    words: HashMap<Box<str>, Token>,
}

/// The pairs of tokens that are merged, by rank.
pub(super) struct Merges {
    of_pair: HashMap<(Token, Token), Merge>,
    huge_word: Mutex<()>,
}

#[derive(Clone, Copy)]
struct Merge {
    rank: u32,
    merged: Token,
}

impl BytePairs {
    /// `spellings` are those of all tokens, and `merges` the file's, in the order of their ranks. Errors: the merge that
    /// makes no token.
    pub fn new(spellings: &[String], stages: Stages, merges: &[String]) -> Result<Self, String> {
        let tokens: HashMap<&str, Token> = spellings.iter().map(String::as_str).zip(0..).collect();
        let mut bytes = Box::new([0; 256]);
        for byte in 0..=u8::MAX {
            bytes[usize::from(byte)] = tokens.get(spelled(byte).to_string().as_str()).copied().unwrap_or(NONE);
        }
        let merges = Merges::new(&tokens, merges)?;
        let words = match stages.ignore_merges {
            true => tokens.into_iter().map(|(text, t)| (text.into(), t)).collect(),
            false => HashMap::new(),
        };
        Ok(BytePairs { stages, bytes, merges, words })
    }

    /// Tokenizes a text without special tokens. Errors: the caller has gone.
    pub fn tokenize(&self, text: &str, is_abandoned: &CancellationToken) -> Result<Vec<Token>, EngineError> {
        self.merge_all(self.stages.cut(text).words, is_abandoned)
    }

    /// The same, if one of the text's words is longer than `longest` bytes. `None`: all are shorter.
    pub fn tokenize_long_words(
        &self,
        text: &str,
        longest: usize,
        is_abandoned: &CancellationToken,
    ) -> Result<Option<Vec<Token>>, EngineError> {
        let cut = self.stages.cut(text);
        (cut.longest > longest).then(|| self.merge_all(cut.words, is_abandoned)).transpose()
    }

    fn merge_all(&self, words: Vec<&str>, is_abandoned: &CancellationToken) -> Result<Vec<Token>, EngineError> {
        let mut tokens = Vec::new();
        words.into_iter().try_for_each(|word| self.merge(word, &mut tokens, is_abandoned))?;
        Ok(tokens)
    }

    /// Adds a word's tokens.
    fn merge(&self, word: &str, tokens: &mut Vec<Token>, is_abandoned: &CancellationToken) -> Result<(), EngineError> {
        if let Some(&t) = (!self.words.is_empty())
            .then(|| self.words.get(word.bytes().map(spelled).collect::<String>().as_str()))
            .flatten()
        {
            tokens.push(t);
            return Ok(());
        }
        let first = word.bytes().map(|byte| self.bytes[usize::from(byte)]);
        self.merges.merge(first, word.len(), tokens, is_abandoned)
    }
}

impl Merges {
    /// `merges` are the file's, in the order of their ranks. Errors: the merge that makes no token.
    pub(super) fn new(tokens: &HashMap<&str, Token>, merges: &[String]) -> Result<Self, String> {
        let mut of_pair = HashMap::with_capacity(merges.len());
        for (rank, merge) in (0..).zip(merges) {
            // The first character may be a space.
            let first = merge.chars().next().map_or(0, char::len_utf8);
            let space = merge[first..].find(' ').map(|at| at + first);
            let parts = space.map(|at| (&merge[..at], &merge[at + 1..]));
            let merged = parts.and_then(|(left, right)| {
                let merged = *tokens.get([left, right].concat().as_str())?;
                Some(((*tokens.get(left)?, *tokens.get(right)?), Merge { rank, merged }))
            });
            let (pair, merged) = merged.ok_or_else(|| format!("the merge {merge:?} makes no token"))?;
            of_pair.entry(pair).or_insert(merged);
        }
        Ok(Merges { of_pair, huge_word: Mutex::default() })
    }

    /// Adds the tokens of a word of `n_bytes`, merged from its `first` ones. Of these, [`NONE`] gives nothing.
    pub(super) fn merge(
        &self,
        first: impl Iterator<Item = Token>,
        n_bytes: usize,
        tokens: &mut Vec<Token>,
        is_abandoned: &CancellationToken,
    ) -> Result<(), EngineError> {
        let _turn = (n_bytes > HUGE_WORD).then(|| self.huge_word.lock().unwrap_or_else(PoisonError::into_inner));
        let mut parts = Parts::new(first);
        let n_parts = parts.parts.len() as u32;
        let candidates = (0..n_parts).filter_map(|left| self.candidate(&parts, left)).map(Reverse);
        let mut candidates: BinaryHeap<_> = candidates.collect::<Vec<_>>().into();
        let mut n_merged = 0u32;
        while let Some(Reverse(MergeCandidate { rank, left })) = candidates.pop() {
            n_merged = n_merged.wrapping_add(1);
            if n_merged.is_multiple_of(1 << 16) && is_abandoned.is_cancelled() {
                return Err(caller_has_gone());
            }
            // A rank belongs to one pair, so an equal rank means that the pair is unchanged.
            let Some(merge) = self.pair(&parts, left).filter(|merge| merge.rank == rank) else { continue };
            let previous = parts.merge(left, merge.merged);
            candidates.extend([previous, left].into_iter().filter_map(|at| self.candidate(&parts, at)).map(Reverse));
        }
        tokens.extend(parts.tokens());
        Ok(())
    }

    fn candidate(&self, parts: &Parts, left: u32) -> Option<MergeCandidate> {
        Some(MergeCandidate { rank: self.pair(parts, left)?.rank, left })
    }

    /// How a part merges with the one after it.
    fn pair(&self, parts: &Parts, left: u32) -> Option<Merge> {
        let part = parts.parts.get(left as usize)?;
        let next = parts.parts.get(part.next as usize)?;
        self.of_pair.get(&(part.token, next.token)).copied()
    }
}

/// Two neighbours that may be merged. The lowest rank comes first, and of equal ranks the leftmost.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct MergeCandidate {
    rank: u32,
    left: u32,
}

/// The parts of a word, as a linked list.
struct Parts {
    parts: Vec<WordPart>,
}

struct WordPart {
    /// [`NONE`] if it has been merged into the part before it, or has no token.
    token: Token,
    previous: u32,
    next: u32,
}

/// No part, or no token.
pub(super) const NONE: u32 = u32::MAX;

impl Parts {
    fn new(tokens: impl Iterator<Item = Token>) -> Parts {
        let part = |(at, token): (u32, Token)| WordPart { token, previous: at.wrapping_sub(1), next: at + 1 };
        let mut parts: Vec<WordPart> = (0..).zip(tokens).map(part).collect();
        if let Some(last) = parts.last_mut() {
            last.next = NONE;
        }
        Parts { parts }
    }

    /// Merges a part with the one after it. Returns the part before it.
    fn merge(&mut self, left: u32, merged: Token) -> u32 {
        let right = self.parts[left as usize].next;
        let after = self.parts[right as usize].next;
        self.parts[right as usize].token = NONE;
        let part = &mut self.parts[left as usize];
        part.token = merged;
        part.next = after;
        let previous = part.previous;
        if let Some(after) = self.parts.get_mut(after as usize) {
            after.previous = left;
        }
        previous
    }

    fn tokens(&self) -> impl Iterator<Item = Token> {
        self.parts.iter().map(|part| part.token).filter(|&token| token != NONE)
    }
}

//! Finds the tokens that are cut out of a text before it is cut into words, such as control tokens.
//!
//! llama.cpp searches the text for each of them in turn. With the 6,000 of Gemma 3, a text that has many beginnings of
//! their spellings takes a minute for each megabyte.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use aho_corasick::{AhoCorasick, BuildError};
use baton_schemas::Token;
use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::token_type::LlamaTokenAttr;

use super::super::vocabulary::token;

/// All special tokens of a vocabulary.
pub(super) struct SpecialTokens {
    tokens: Vec<SpecialToken>,
    spellings: AhoCorasick,
}

struct SpecialToken {
    token: Token,
    n_bytes: usize,
    /// Found only if the caller asks for spellings of control tokens.
    is_control: bool,
    /// Takes the spaces before it.
    strips_left: bool,
    /// Takes the spaces after it.
    strips_right: bool,
}

/// A part of a text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Fragment<'t> {
    Text(&'t str),
    Special(Token),
}

impl SpecialTokens {
    /// `spellings` are those of all tokens.
    pub(super) fn of(model: &LlamaModel, spellings: &[String]) -> Result<Self, BuildError> {
        let vocab = model.vocab();
        let mut tokens = Vec::new();
        let mut found = Vec::new();
        for (id, spelling) in (0..).zip(spellings) {
            let attr = vocab.attr(token(id));
            let is_control = attr.intersects(LlamaTokenAttr::Control | LlamaTokenAttr::Unknown);
            if spelling.is_empty() || !(is_control || attr.contains(LlamaTokenAttr::UserDefined)) {
                continue;
            }
            tokens.push(SpecialToken {
                token: id,
                n_bytes: spelling.len(),
                is_control,
                strips_left: attr.contains(LlamaTokenAttr::LStrip),
                strips_right: attr.contains(LlamaTokenAttr::RStrip),
            });
            found.push(spelling);
        }
        Ok(SpecialTokens { tokens, spellings: AhoCorasick::new(found)? })
    }

    /// Cuts a text. Where spellings overlap, the longest wins, and of equally long ones the first.
    pub(super) fn cut<'t>(&self, text: &'t str, parse_special: bool) -> Vec<Fragment<'t>> {
        let found = self.spellings.find_overlapping_iter(text);
        let found = found.map(|found| (found.start(), &self.tokens[found.pattern().as_usize()]));
        let mut found: Vec<_> = found.filter(|(_, special)| parse_special || !special.is_control).collect();
        found.sort_by_key(|(start, special)| (Reverse(special.n_bytes), special.token, *start));
        // By their starts: the end, and the token. With the spaces that they take, they do not overlap.
        let mut taken: BTreeMap<usize, (usize, Token)> = BTreeMap::new();
        for (start, special) in found {
            let mut end = start + special.n_bytes;
            let before = taken.range(..end).next_back().map_or(0, |(_, (end, _))| *end);
            if before > start {
                continue;
            }
            let after = taken.range(end..).next().map_or(text.len(), |(start, _)| *start);
            let is_space = |c: char| matches!(c, '\t'..='\r' | ' ');
            let mut start = start;
            if special.strips_left {
                start = before + text[before..start].trim_end_matches(is_space).len();
            }
            if special.strips_right {
                end = after - text[end..after].trim_start_matches(is_space).len();
            }
            taken.insert(start, (end, special.token));
        }
        let mut fragments = Vec::new();
        let mut reached = 0;
        for (start, (end, special)) in taken {
            if reached < start {
                fragments.push(Fragment::Text(&text[reached..start]));
            }
            fragments.push(Fragment::Special(special));
            reached = end;
        }
        if reached < text.len() {
            fragments.push(Fragment::Text(&text[reached..]));
        }
        fragments
    }
}

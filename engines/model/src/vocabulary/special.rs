//! Finds the tokens that are cut out of a text before it is cut into words, such as control tokens.
//!
//! llama.cpp searches the text for each of them in turn, longer spellings first. With the 6,000 of Gemma 3, a text that
//! has many beginnings of their spellings takes a minute for each megabyte. So here equally long spellings are searched
//! for together. llama.cpp leaves the order of equally long ones to `std::sort`; here the leftmost wins.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use aho_corasick::{AhoCorasick, BuildError, MatchKind};
use baton_schemas::{EngineError, Token};
use tokio_util::sync::CancellationToken;

use super::caller_has_gone;

/// The spellings of a vocabulary's special tokens, the longest first.
pub struct SpecialSpellings {
    passes: Vec<Pass>,
}

/// A token that is cut out of texts by its spelling.
pub struct SpecialSpelling<'v> {
    pub token: Token,
    pub spelling: &'v str,
    /// Cut out only if the caller asks for spellings of control tokens.
    pub is_control: bool,
    /// Takes the spaces before it.
    pub strips_left: bool,
    /// Takes the spaces after it.
    pub strips_right: bool,
}

/// One search through a text.
struct Pass {
    /// The length of each spelling.
    n_bytes: usize,
    /// Made only if the caller asks for spellings of control tokens.
    is_control: bool,
    tokens: Vec<SpecialToken>,
    spellings: AhoCorasick,
}

#[derive(Clone, Copy)]
struct SpecialToken {
    token: Token,
    /// Takes the spaces before it.
    strips_left: bool,
    /// Takes the spaces after it.
    strips_right: bool,
}

/// A part of a text.
#[derive(Debug, PartialEq, Eq)]
pub enum Fragment<'t> {
    Text(&'t str),
    Special(Token),
}

impl SpecialSpellings {
    /// Prepares the searches. An empty spelling is never found.
    pub fn new<'v>(all: impl IntoIterator<Item = SpecialSpelling<'v>>) -> Result<Self, BuildError> {
        let mut passes: BTreeMap<_, Vec<(SpecialToken, &str)>> = BTreeMap::new();
        for SpecialSpelling { token, spelling, is_control, strips_left, strips_right } in all {
            if !spelling.is_empty() {
                let special = SpecialToken { token, strips_left, strips_right };
                passes.entry((Reverse(spelling.len()), is_control)).or_default().push((special, spelling));
            }
        }
        let passes = passes.into_iter().map(|((Reverse(n_bytes), is_control), found)| {
            let (tokens, spellings): (Vec<_>, Vec<_>) = found.into_iter().unzip();
            let spellings = AhoCorasick::builder().match_kind(MatchKind::LeftmostFirst).build(spellings)?;
            Ok(Pass { n_bytes, is_control, tokens, spellings })
        });
        Ok(SpecialSpellings { passes: passes.collect::<Result<_, _>>()? })
    }

    /// Cuts a text. Where spellings overlap, the longest wins. Errors: the caller has gone.
    pub fn cut<'t>(
        &self,
        text: &'t str,
        parse_special: bool,
        is_abandoned: &CancellationToken,
    ) -> Result<Vec<Fragment<'t>>, EngineError> {
        let mut fragments = vec![Fragment::Text(text)];
        for pass in self.passes.iter().filter(|pass| parse_special || !pass.is_control) {
            if is_abandoned.is_cancelled() {
                return Err(caller_has_gone());
            }
            for fragment in std::mem::take(&mut fragments) {
                match fragment {
                    Fragment::Text(text) if text.len() >= pass.n_bytes => pass.cut(text, &mut fragments),
                    shorter_or_special => fragments.push(shorter_or_special),
                }
            }
        }
        Ok(fragments)
    }
}

impl Pass {
    /// Adds the parts of a text.
    fn cut<'t>(&self, text: &'t str, fragments: &mut Vec<Fragment<'t>>) {
        let is_space = |c: char| matches!(c, '\t'..='\r' | ' ');
        let mut rest = text;
        while let Some(found) = self.spellings.find(rest) {
            let special = self.tokens[found.pattern().as_usize()];
            let (mut before, mut after) = (&rest[..found.start()], &rest[found.end()..]);
            if special.strips_left {
                before = before.trim_end_matches(is_space);
            }
            if special.strips_right {
                after = after.trim_start_matches(is_space);
            }
            fragments.extend((!before.is_empty()).then_some(Fragment::Text(before)));
            fragments.push(Fragment::Special(special.token));
            rest = after;
        }
        fragments.extend((!rest.is_empty()).then_some(Fragment::Text(rest)));
    }
}

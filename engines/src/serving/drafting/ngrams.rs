//! Finds where a text has been before: the places of a corpus whose last tokens are those of the text.

use std::collections::HashMap;

use baton_schemas::Token;

/// Tokens that are looked up; longer matches are found among the places of these.
const GRAM: usize = 2;

/// The tokens of a match that are compared at most. More say no more.
const LONGEST: usize = 16;

/// The places that are compared at most, the latest first.
const MAX_PLACES: usize = 32;

/// Tokens that one call indexes at most. A prompt of 100,000 tokens is indexed in the steps that compute it, so that no step
/// waits for it.
const PER_CALL: usize = 4_096;

/// The places of all pairs of tokens in a corpus, which the caller keeps and extends.
#[derive(Debug, Default)]
pub(super) struct GramIndex {
    /// The latest end of each gram.
    latest: HashMap<[Token; GRAM], u32>,
    /// For each number of tokens, the end before it of the gram that ends there; 0 if there is none.
    earlier: Vec<u32>,
}

/// A place in a corpus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TextMatch {
    /// The index of the token that follows.
    pub(super) next: usize,
    /// The tokens before it that are the text's.
    pub(super) n_equal: usize,
}

impl GramIndex {
    /// Indexes what the corpus has more than before.
    pub(super) fn extend(&mut self, corpus: &[Token]) {
        let indexed = self.earlier.len();
        for end in indexed..=corpus.len().min(indexed + PER_CALL) {
            let gram = end.checked_sub(GRAM).and_then(|from| corpus[from..end].first_chunk::<GRAM>());
            let before = gram.and_then(|gram| self.latest.insert(*gram, end as u32));
            self.earlier.push(before.unwrap_or(0));
        }
    }

    /// Returns true if the whole corpus is indexed.
    pub(super) fn covers(&self, corpus: &[Token]) -> bool {
        self.earlier.len() > corpus.len()
    }

    /// The places before `limit` where the corpus has the last tokens of `text`, the latest first.
    pub(super) fn places<'a>(
        &'a self,
        corpus: &'a [Token],
        text: &'a [Token],
        limit: usize,
    ) -> impl Iterator<Item = TextMatch> + 'a {
        let latest = text.last_chunk::<GRAM>().and_then(|gram| self.latest.get(gram)).copied();
        let earlier = |end: &u32| self.earlier.get(*end as usize).copied().filter(|end| *end > 0);
        let ends = std::iter::successors(latest, earlier).map(|end| end as usize).filter(move |end| *end < limit);
        ends.take(MAX_PLACES).map(|next| TextMatch { next, n_equal: n_equal(&corpus[..next], text) })
    }
}

/// The tokens at the ends of both that are equal, as far as they are compared.
fn n_equal(corpus: &[Token], text: &[Token]) -> usize {
    corpus.iter().rev().zip(text.iter().rev()).take(LONGEST).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_the_last_tokens_are_found_the_latest_first() {
        let corpus = [1, 2, 3, 9, 2, 3, 7, 1, 2, 3];
        let mut index = GramIndex::default();
        index.extend(&corpus[..5]);
        assert!(!index.covers(&corpus));
        index.extend(&corpus);
        assert!(index.covers(&corpus));
        let places: Vec<TextMatch> = index.places(&corpus, &corpus, corpus.len()).collect();
        assert_eq!(places, [TextMatch { next: 6, n_equal: 2 }, TextMatch { next: 3, n_equal: 3 }]);
        assert_eq!(index.places(&corpus, &[3], corpus.len()).count(), 0);
        assert_eq!(index.places(&corpus, &[8, 8], corpus.len()).count(), 0);
    }

    #[test]
    fn a_long_prompt_is_indexed_in_several_calls() {
        let corpus: Vec<Token> = (0..10_000).collect();
        let mut index = GramIndex::default();
        let n_calls = (0..10).take_while(|_| {
            let before = index.covers(&corpus);
            index.extend(&corpus);
            !before
        });
        assert_eq!(n_calls.count(), 3);
    }
}

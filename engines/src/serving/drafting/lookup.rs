//! Guesses that a text goes on as it did before: prompt lookup.
//!
//! Where a reply repeats its prompt or itself (edited code, a summary's names, the keys of JSON), the tokens after the last
//! place with the same words come again. It costs some table look-ups, and no model.

use std::cmp::Reverse;

use baton_schemas::Token;
use baton_schemas::draft::DrafterKind;

use super::drafter::{Confidence, Drafter};
use super::ngrams::{GramIndex, TextMatch};

/// Drafts what followed the longest match in the prompt and the reply.
#[derive(Default)]
pub(crate) struct PromptLookup {
    index: GramIndex,
}

impl Drafter for PromptLookup {
    fn kind(&self) -> DrafterKind {
        DrafterKind::PromptLookup
    }

    fn follow(&mut self, tokens: &[Token]) {
        self.index.extend(tokens);
    }

    fn draft(&mut self, tokens: &[Token], n_max: usize, draft: &mut Vec<Token>) -> Confidence {
        if !self.index.covers(tokens) {
            return Confidence::Low;
        }
        let places = self.index.places(tokens, tokens, tokens.len());
        let longest = places.enumerate().max_by_key(|(at, place)| (place.n_equal, Reverse(*at)));
        let Some((_, TextMatch { next, n_equal })) = longest else { return Confidence::Low };
        for idx in next..next + n_max {
            // A text that repeats itself goes on within the draft.
            let token = tokens.get(idx).copied().unwrap_or_else(|| draft[idx - tokens.len()]);
            draft.push(token);
        }
        Confidence::of_match(n_equal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(tokens: &[Token], expected: &[Token], confidence: Confidence) {
        let mut lookup = PromptLookup::default();
        lookup.follow(tokens);
        let mut draft = Vec::new();
        assert_eq!(lookup.draft(tokens, 4, &mut draft), confidence);
        assert_eq!(draft, expected);
    }

    #[test]
    fn what_followed_the_longest_match_is_drafted_and_of_equal_ones_the_latest() {
        check(&[1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 8, 1, 2, 3], &[4, 5, 9, 2], Confidence::Medium);
        check(&[2, 3, 4, 5, 6, 7, 2, 3, 8, 9, 5, 5, 1, 2, 3], &[8, 9, 5, 5], Confidence::Low);
        check(&[1, 2, 3], &[], Confidence::Low);
        check(&[], &[], Confidence::Low);
    }

    #[test]
    fn a_period_goes_on_beyond_the_text() {
        check(&[5, 6, 5, 6, 5], &[6, 5, 6, 5], Confidence::Medium);
        check(&[7, 7, 7], &[7, 7, 7, 7], Confidence::Low);
    }
}

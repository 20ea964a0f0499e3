//! Guesses that a reply is the one that the client predicts: OpenAI's `prediction`.

use std::cmp::Reverse;

use baton_schemas::Token;
use baton_schemas::draft::DrafterKind;

use super::drafter::{Confidence, Drafter};
use super::ngrams::GramIndex;

/// Drafts the prediction: from its beginning, and after a difference from where the reply has come back to it.
pub(crate) struct PredictedReply {
    predicted: Vec<Token>,
    index: GramIndex,
    /// The number of tokens that the sequence had when it was last followed.
    n_followed: usize,
    /// The index of the prediction's token that comes next, if the reply keeps to it.
    next: usize,
    /// The reply's last token is not that of the prediction.
    is_off: bool,
}

impl PredictedReply {
    /// `n_prompt`: the reply begins after so many tokens.
    pub(crate) fn new(predicted: Vec<Token>, n_prompt: usize) -> Self {
        PredictedReply { predicted, index: GramIndex::default(), n_followed: n_prompt, next: 0, is_off: false }
    }

    /// Where the reply has come back to the prediction: with the most equal tokens, and of such places the next one.
    fn come_back(&self, tokens: &[Token]) -> Option<(usize, Confidence)> {
        let places = self.index.places(&self.predicted, tokens, self.predicted.len());
        let best = places.max_by_key(|place| (place.n_equal, place.next > self.next, Reverse(place.next)))?;
        Some((best.next, Confidence::of_match(best.n_equal)))
    }
}

impl Drafter for PredictedReply {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Prediction
    }

    fn follow(&mut self, tokens: &[Token]) {
        self.index.extend(&self.predicted);
        for token in tokens.iter().skip(self.n_followed) {
            self.is_off |= self.predicted.get(self.next) != Some(token);
            if !self.is_off {
                self.next += 1;
            }
        }
        self.n_followed = self.n_followed.max(tokens.len());
    }

    fn draft(&mut self, tokens: &[Token], n_max: usize, draft: &mut Vec<Token>) -> Confidence {
        let mut confidence = Confidence::Highest;
        if self.is_off {
            let Some((next, of_match)) = self.come_back(tokens) else { return Confidence::Low };
            (self.next, self.is_off, confidence) = (next, false, of_match);
        }
        draft.extend(self.predicted.iter().skip(self.next).take(n_max));
        confidence
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prediction_is_drafted_from_its_beginning_and_again_after_a_difference() {
        let prompt = [50, 51];
        let mut drafter = PredictedReply::new((1..=9).collect(), prompt.len());
        let mut after = |reply: &[Token]| {
            let tokens = [&prompt[..], reply].concat();
            drafter.follow(&tokens);
            let mut draft = Vec::new();
            let confidence = drafter.draft(&tokens, 3, &mut draft);
            (draft, confidence)
        };
        assert_eq!(after(&[]), (vec![1, 2, 3], Confidence::Highest));
        assert_eq!(after(&[1, 2]), (vec![3, 4, 5], Confidence::Highest));
        assert_eq!(after(&[1, 2, 30]), (vec![], Confidence::Low), "the reply differs");
        assert_eq!(after(&[1, 2, 30, 4]), (vec![], Confidence::Low), "one token may be chance");
        assert_eq!(after(&[1, 2, 30, 4, 5]), (vec![6, 7, 8], Confidence::Low));
        assert_eq!(after(&[1, 2, 30, 4, 5, 6, 7, 8, 9]), (vec![], Confidence::Highest), "its end");
    }
}

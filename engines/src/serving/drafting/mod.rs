//! Guesses the next tokens of a sequence, so that one step can verify several.
//!
//! A [`Drafter`] proposes tokens; the scheduler computes some of them behind the sequence's last one, and keeps those that it
//! would have drawn itself, so a reply is the same with and without. How many are computed follows from what drafts have been
//! worth ([`chances`]) and from what rows cost ([`costs`]).

pub(crate) mod batch_drafter;
mod catching_up;
mod chances;
pub(crate) mod costs;
pub(crate) mod draft_model;
mod drafter;
mod lookup;
mod ngrams;
mod predicted;
pub(crate) mod prediction_head;
#[cfg(any(test, feature = "measure"))]
pub mod simulated;

use std::ops::Range;

use baton_schemas::sequence::{DraftCounts, DraftTotals};
use baton_schemas::{SequenceRequest, Token};

use self::chances::{Chances, DraftPlace};
use self::costs::DraftOffer;
use self::draft_model::GuessedTokens;
use self::drafter::{Confidence, Drafter, DrafterKind};
use self::lookup::PromptLookup;
use self::predicted::PredictedReply;

/// The most tokens of a draft that one step verifies.
pub(crate) const MAX_DRAFT: usize = 32;

/// The tokens that a drafter is asked for: a draft goes on over several steps while it is right.
const ASKED: usize = 2 * MAX_DRAFT;

/// The drafters of a sequence, and its draft.
pub(crate) struct Drafting {
    /// In the order in which they are asked.
    drafters: Vec<Box<dyn Drafter>>,
    chances: [Chances; DrafterKind::N],
    counts: [DraftCounts; DrafterKind::N],
    /// The batch drafter, if it guesses for this sequence.
    guesser: Option<DrafterKind>,
    draft: Option<OpenDraft>,
    /// The tokens that the sequence had when it was last followed.
    n_followed: usize,
}

/// What all sequences of an engine have shown about their drafts.
#[derive(Default)]
pub(crate) struct SharedChances([Chances; DrafterKind::N]);

/// A draft for the tokens after a sequence's last one.
struct OpenDraft {
    of: DrafterKind,
    confidence: Confidence,
    tokens: Vec<Token>,
    /// Its tokens that the sequence has by now.
    n_right: usize,
}

impl OpenDraft {
    /// What is known of its next token.
    fn place(&self) -> DraftPlace {
        if self.n_right == 0 { DraftPlace::First(self.confidence) } else { DraftPlace::Later }
    }
}

impl Drafting {
    /// The drafters for a request. `guesser`: what guesses for it together with others. What that was asked for comes before what
    /// there is anyway.
    pub(crate) fn new(request: &SequenceRequest, guesser: Option<DrafterKind>) -> Self {
        let guessed = guesser.map(|kind| -> Box<dyn Drafter> { Box::new(GuessedTokens::of(kind)) });
        let predicted = (!request.predicted.is_empty()).then(|| -> Box<dyn Drafter> {
            Box::new(PredictedReply::new(request.predicted.clone(), request.prompt.len()))
        });
        let drafters = guessed.into_iter().chain(predicted).chain([Box::<PromptLookup>::default() as _]);
        Drafting { guesser, ..Drafting::of(drafters.collect()) }
    }

    fn of(drafters: Vec<Box<dyn Drafter>>) -> Self {
        let (chances, counts) = Default::default();
        Drafting { drafters, chances, counts, guesser: None, draft: None, n_followed: 0 }
    }

    /// The sequence has these tokens now. Those that are new are compared with the draft, whether a step verified them or not.
    pub(crate) fn follow(&mut self, tokens: &[Token], of_all: &mut SharedChances) {
        self.compare(&tokens[self.n_followed.min(tokens.len())..], of_all);
        self.n_followed = tokens.len();
        self.drafters.iter_mut().for_each(|drafter| drafter.follow(tokens));
    }

    /// The draft for the tokens after these. Tokens that are not `allowed` end it. While a draft is right, it stays.
    pub(crate) fn offer(
        &mut self,
        tokens: &[Token],
        of_all: &SharedChances,
        allowed: impl Fn(Token) -> bool,
    ) -> DraftOffer {
        if self.draft.is_none() {
            self.draft = self.drafters.iter_mut().find_map(|drafter| {
                let mut draft = Vec::with_capacity(ASKED);
                let confidence = drafter.draft(tokens, ASKED, &mut draft);
                let n = draft.iter().take(ASKED).take_while(|token| allowed(**token)).count();
                draft.truncate(n);
                (n > 0).then(|| OpenDraft { of: drafter.kind(), confidence, tokens: draft, n_right: 0 })
            });
        }
        let Some(draft) = &self.draft else { return DraftOffer::NONE };
        let kind = draft.of as usize;
        let chance = |place| self.chances[kind].of(&of_all.0[kind], place);
        let n = (draft.tokens.len() - draft.n_right).min(MAX_DRAFT);
        DraftOffer { n, first: chance(draft.place()), later: chance(DraftPlace::Later), takes_passes: false }
    }

    /// What a draft of the guesser would be worth, if that guesses for the sequence.
    pub(crate) fn wish(&self, of_all: &SharedChances) -> DraftOffer {
        let Some(kind) = self.guesser else { return DraftOffer::NONE };
        let chance = |place| self.chances[kind as usize].of(&of_all.0[kind as usize], place);
        let first = chance(DraftPlace::First(Confidence::OF_MODEL));
        DraftOffer { n: MAX_DRAFT, first, later: chance(DraftPlace::Later), takes_passes: true }
    }

    /// Takes a draft of the guesser, in the place of the one that there is.
    pub(crate) fn give(&mut self, tokens: &[Token]) {
        self.draft = None;
        self.drafters.iter_mut().for_each(|drafter| drafter.give(tokens));
    }

    /// The tokens of the draft that can be verified now.
    pub(crate) fn n_ready(&self) -> usize {
        self.draft.as_ref().map_or(0, |draft| draft.tokens.len() - draft.n_right)
    }

    /// The first `n` tokens of what was offered, to be verified.
    pub(crate) fn take(&mut self, n: usize) -> Vec<Token> {
        let Some(draft) = &self.draft else { return Vec::new() };
        let range: Range<usize> = draft.n_right..draft.tokens.len().min(draft.n_right + n);
        self.counts[draft.of as usize].n += range.len() as u32;
        draft.tokens[range].to_vec()
    }

    /// A verified token was right.
    pub(crate) fn count_right(&mut self) {
        if let Some(draft) = &self.draft {
            self.counts[draft.of as usize].n_accepted += 1;
        }
    }

    /// Guesses nothing from now on.
    pub(crate) fn stop(&mut self) {
        self.drafters.clear();
        (self.guesser, self.draft) = (None, None);
    }

    fn compare(&mut self, drawn: &[Token], of_all: &mut SharedChances) {
        for token in drawn {
            let Some(draft) = &mut self.draft else { return };
            let is_right = draft.tokens.get(draft.n_right) == Some(token);
            let kind = draft.of as usize;
            self.chances[kind].note(&mut of_all.0[kind], draft.place(), is_right);
            draft.n_right += usize::from(is_right);
            if !is_right || draft.n_right == draft.tokens.len() {
                self.draft = None;
            }
        }
    }

    /// The tokens that were verified, by drafter.
    pub(crate) fn totals(&self) -> DraftTotals {
        let of = |kind: DrafterKind| self.counts[kind as usize];
        DraftTotals {
            lookup: of(DrafterKind::PromptLookup),
            prediction: of(DrafterKind::Prediction),
            model: of(DrafterKind::DraftModel),
            mtp: of(DrafterKind::Mtp),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Drafts what it is told.
    struct Told(Vec<Token>);

    impl Drafter for Told {
        fn kind(&self) -> DrafterKind {
            DrafterKind::PromptLookup
        }

        fn follow(&mut self, _: &[Token]) {}

        fn draft(&mut self, _: &[Token], _: usize, draft: &mut Vec<Token>) -> Confidence {
            draft.extend(&self.0);
            Confidence::Medium
        }
    }

    #[test]
    fn a_hostile_draft_is_cut_to_what_is_allowed_and_to_its_length() {
        let mut of_all = SharedChances::default();
        let mut offered = |tokens: Vec<Token>| {
            let mut drafting = Drafting::of(vec![Box::new(Told(tokens))]);
            drafting.follow(&[1], &mut of_all);
            let n = drafting.offer(&[1], &of_all, |token| token < 10).n;
            (n, drafting.take(MAX_DRAFT).len())
        };
        assert_eq!(offered(vec![3; 100_000]), (MAX_DRAFT, MAX_DRAFT));
        assert_eq!(offered(vec![3, 4, Token::MAX, 5]), (2, 2));
        assert_eq!(offered(vec![10]), (0, 0));
    }

    #[test]
    fn a_draft_goes_on_while_it_is_right_and_ends_with_its_first_wrong_token() {
        let mut of_all = SharedChances::default();
        let mut drafting = Drafting::of(vec![Box::new(Told(vec![1, 2, 3, 4, 5]))]);
        let mut n = |drafting: &mut Drafting, tokens: &[Token]| {
            drafting.follow(tokens, &mut of_all);
            drafting.offer(tokens, &of_all, |_| true).n
        };
        assert_eq!(n(&mut drafting, &[7]), 5);
        assert_eq!(drafting.take(2), [1, 2]);
        drafting.count_right();
        drafting.count_right();
        assert_eq!(n(&mut drafting, &[7, 1, 2, 3]), 2);
        assert_eq!(drafting.take(9), [4, 5]);
        assert_eq!(n(&mut drafting, &[7, 1, 2, 3, 9]), 5, "a new one");
        let lookup = DraftCounts { n: 4, n_accepted: 2 };
        assert_eq!(drafting.totals(), DraftTotals { lookup, ..DraftTotals::default() });
    }
}

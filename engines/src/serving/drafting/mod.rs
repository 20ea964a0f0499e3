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
pub(crate) mod remote;
mod rests;
mod rows;
#[cfg(any(test, feature = "measure"))]
pub mod simulated;
#[cfg(any(test, feature = "measure"))]
pub mod simulated_node;

use std::ops::Range;
use std::time::Instant;

use baton_link::drafts::DraftPace;
use baton_schemas::draft::{DraftReport, DraftTotals, DrafterKind, DrafterLoss};
use baton_schemas::{SequenceRequest, Token};

use self::chances::{Chances, DraftPlace};
use self::costs::DraftOffer;
use self::draft_model::GuessedTokens;
use self::drafter::{Confidence, Drafter};
use self::lookup::PromptLookup;
use self::predicted::PredictedReply;
use self::remote::RemoteDrafter;

/// The most tokens of a draft that one step verifies.
pub(crate) const MAX_DRAFT: usize = 32;

/// The tokens that a drafter is asked for: a draft goes on over several steps while it is right.
const ASKED: usize = 2 * MAX_DRAFT;

/// Refused batches after which nothing is guessed for a sequence any more: each of them is computed twice.
const MOST_REFUSED: u32 = 3;

/// The drafters of a sequence, and its draft.
pub(crate) struct Drafting {
    /// In the order in which they are asked.
    drafters: Vec<Box<dyn Drafter>>,
    chances: [Chances; DrafterKind::ALL.len()],
    counts: DraftTotals,
    /// The ones among these that its reader was not told.
    unreported: DraftTotals,
    /// Its reader knows why the draft node was given up.
    has_reported_loss: bool,
    /// The batch drafter, if it guesses for this sequence.
    guesser: Option<DrafterKind>,
    /// The sequence's draft node.
    remote: Option<RemoteDrafter>,
    draft: Option<OpenDraft>,
    /// The tokens that the sequence had when it was last followed.
    n_followed: usize,
    /// Batches that were refused with its drafts.
    n_refused: u32,
    /// The steps without drafts that its drafts and those of others have saved it.
    pub(crate) saved: f64,
}

/// What all sequences of an engine have shown about their drafts.
#[derive(Default)]
pub(crate) struct SharedChances([Chances; DrafterKind::ALL.len()]);

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

    /// The same with a draft node.
    pub(crate) fn with_remote(self, remote: Option<RemoteDrafter>) -> Self {
        Drafting { remote, ..self }
    }

    fn of(drafters: Vec<Box<dyn Drafter>>) -> Self {
        Drafting {
            drafters,
            chances: Default::default(),
            counts: DraftTotals::default(),
            unreported: DraftTotals::default(),
            has_reported_loss: false,
            guesser: None,
            remote: None,
            draft: None,
            n_followed: 0,
            n_refused: 0,
            saved: 0.0,
        }
    }

    /// The sequence has these tokens now. Those that are new are compared with the draft, whether a step verified them or not.
    pub(crate) fn follow(&mut self, tokens: &[Token], of_all: &mut SharedChances) {
        self.compare(&tokens[self.n_followed.min(tokens.len())..], of_all);
        self.n_followed = tokens.len();
        self.drafters.iter_mut().for_each(|drafter| drafter.follow(tokens));
        self.remote.iter_mut().for_each(|remote| remote.follow(tokens));
    }

    /// The draft for the tokens after these. Tokens that are not `allowed` end it. While a draft is right, it stays; that of a
    /// draft node is what has come of it by now.
    pub(crate) fn offer(
        &mut self,
        tokens: &[Token],
        of_all: &SharedChances,
        allowed: impl Fn(Token) -> bool,
    ) -> DraftOffer {
        self.draft.take_if(|draft| draft.of == DrafterKind::Remote);
        let remote = self.remote.as_mut().and_then(|remote| drafted_by(remote, tokens, &allowed));
        if self.draft.is_none() {
            self.draft = self.drafters.iter_mut().find_map(|drafter| drafted_by(&mut **drafter, tokens, &allowed));
        }
        if let Some(remote) = remote {
            let other = self.draft.as_ref().map_or(0.0, |draft| self.chance(draft.of, draft.place(), of_all));
            if self.chance(remote.of, remote.place(), of_all) >= other {
                self.draft = Some(remote);
            }
        }
        let Some(draft) = &self.draft else { return DraftOffer::NONE };
        let n = (draft.tokens.len() - draft.n_right).min(MAX_DRAFT);
        let later = self.chance(draft.of, DraftPlace::Later, of_all);
        DraftOffer { n, first: self.chance(draft.of, draft.place(), of_all), later, ..DraftOffer::NONE }
    }

    fn chance(&self, of: DrafterKind, place: DraftPlace, of_all: &SharedChances) -> f64 {
        self.chances[of.index()].of(&of_all.0[of.index()], place)
    }

    /// What a draft of the guesser would be worth, if that guesses for the sequence.
    pub(crate) fn wish(&self, of_all: &SharedChances) -> DraftOffer {
        let Some(kind) = self.guesser else { return DraftOffer::NONE };
        self.offer_of(kind, Confidence::OF_MODEL, of_all)
    }

    /// What a draft of the draft node would be worth, if the step waited for it, and when it is to be expected.
    pub(crate) fn wish_of_remote(&self, of_all: &SharedChances) -> Option<(DraftOffer, DraftPace)> {
        let (pace, confidence) = self.remote.as_ref()?.pace()?;
        Some((self.offer_of(DrafterKind::Remote, confidence, of_all), pace))
    }

    /// A draft that is still to be made.
    fn offer_of(&self, kind: DrafterKind, confidence: Confidence, of_all: &SharedChances) -> DraftOffer {
        let first = self.chance(kind, DraftPlace::First(confidence), of_all);
        let later = self.chance(kind, DraftPlace::Later, of_all);
        DraftOffer { n: MAX_DRAFT, first, later, takes_passes: true, ..DraftOffer::NONE }
    }

    /// Waits until `n` candidates of the draft node are there, but not beyond `until`.
    pub(crate) fn wait_for_remote(&self, n: usize, until: Instant) {
        self.remote.iter().for_each(|remote| remote.wait(n, until));
    }

    /// A step is about to verify the first `n` tokens of what was offered, none if `n` is 0.
    pub(crate) fn decided(&mut self, n: usize) {
        let is_remote = self.draft.as_ref().is_some_and(|draft| draft.of == DrafterKind::Remote);
        self.remote.iter_mut().for_each(|remote| remote.decided(n > 0 && is_remote));
    }

    /// Why the sequence has no draft node any more, if it had one.
    pub(crate) fn loss(&self) -> Option<DrafterLoss> {
        self.remote.as_ref().and_then(RemoteDrafter::loss)
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
        for counts in [&mut self.counts, &mut self.unreported] {
            counts.of_mut(draft.of).n += range.len() as u32;
        }
        draft.tokens[range].to_vec()
    }

    /// A verified token was right.
    pub(crate) fn count_right(&mut self) {
        if let Some(draft) = &self.draft {
            for counts in [&mut self.counts, &mut self.unreported] {
                counts.of_mut(draft.of).n_accepted += 1;
            }
        }
    }

    /// A batch with `n` tokens of the draft was refused, so they were not verified.
    pub(crate) fn refused(&mut self, n: usize) {
        if let Some(draft) = &self.draft {
            for counts in [&mut self.counts, &mut self.unreported] {
                let of_drafter = counts.of_mut(draft.of);
                of_drafter.n = of_drafter.n.saturating_sub(n as u32);
            }
        }
        self.n_refused += 1;
        if self.n_refused >= MOST_REFUSED {
            tracing::info!("batches with guesses were refused; nothing is guessed for the sequence any more");
            self.stop();
        }
    }

    /// Guesses nothing from now on.
    pub(crate) fn stop(&mut self) {
        self.drafters.clear();
        (self.guesser, self.remote, self.draft) = (None, None, None);
    }

    fn compare(&mut self, drawn: &[Token], of_all: &mut SharedChances) {
        for token in drawn {
            let Some(draft) = &mut self.draft else { return };
            let is_right = draft.tokens.get(draft.n_right) == Some(token);
            let kind = draft.of.index();
            self.chances[kind].note(&mut of_all.0[kind], draft.place(), is_right);
            draft.n_right += usize::from(is_right);
            if !is_right || draft.n_right == draft.tokens.len() {
                self.draft = None;
            }
        }
    }

    /// The tokens that were verified, by drafter.
    pub(crate) fn totals(&self) -> DraftTotals {
        self.counts
    }

    /// The guesses of one drafter that were verified since the last report, and whether its draft node was given up.
    pub(crate) fn report(&mut self) -> Option<DraftReport> {
        let drafter = DrafterKind::ALL.into_iter().find(|kind| !self.unreported.of(*kind).is_empty());
        let verified = drafter.map(|kind| (kind, self.unreported.of_mut(kind).split(DraftReport::MAX_TOKENS)));
        let loss = self.loss().filter(|_| !self.has_reported_loss);
        self.has_reported_loss |= loss.is_some();
        (verified.is_some() || loss.is_some()).then_some(DraftReport { verified, loss })
    }
}

/// A draft for the tokens after these, if there is one.
fn drafted_by<D: Drafter + ?Sized>(
    drafter: &mut D,
    tokens: &[Token],
    allowed: impl Fn(Token) -> bool,
) -> Option<OpenDraft> {
    let mut draft = Vec::with_capacity(ASKED);
    let confidence = drafter.draft(tokens, ASKED, &mut draft);
    let n = draft.iter().take(ASKED).take_while(|token| allowed(**token)).count();
    draft.truncate(n);
    (n > 0).then(|| OpenDraft { of: drafter.kind(), confidence, tokens: draft, n_right: 0 })
}

#[cfg(test)]
mod tests {
    use baton_schemas::draft::DraftCounts;

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
        let verified = Some((DrafterKind::PromptLookup, lookup));
        assert_eq!(drafting.report(), Some(DraftReport { verified, loss: None }));
        assert_eq!(drafting.report(), None, "each once");
        assert_eq!(drafting.totals(), DraftTotals { lookup, ..DraftTotals::default() });
    }
}

//! What proposes tokens, and how sure it is of them.

use baton_schemas::Token;
use baton_schemas::draft::DrafterKind;

/// How likely a drafter takes its draft to be right. What each is worth is counted apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Confidence {
    Low,
    Medium,
    High,
    Highest,
}

impl Confidence {
    pub(super) const N: usize = 4;

    /// A draft model and a head say nothing about their drafts.
    pub(super) const OF_MODEL: Confidence = Confidence::Medium;

    /// The confidence in a draft that follows `n_equal` equal tokens.
    pub(super) fn of_match(n_equal: usize) -> Confidence {
        match n_equal {
            0..=2 => Confidence::Low,
            3..=4 => Confidence::Medium,
            5..=8 => Confidence::High,
            _ => Confidence::Highest,
        }
    }

    /// The confidence in the next candidates of a draft node, of which `n_right` were right in a row.
    pub(super) fn of_chain(n_right: usize) -> Confidence {
        match n_right {
            0 => Confidence::Medium,
            1..=4 => Confidence::High,
            _ => Confidence::Highest,
        }
    }
}

/// Proposes the tokens that a sequence may go on with. Each sequence has drafters of its own.
///
/// Before each step all are told the sequence's tokens first, and asked for drafts afterwards, so that what drafts for several
/// sequences (a head of the model, a smaller model, another machine) can compute them together in between. Neither call waits:
/// what is not ready yet is no draft.
pub(crate) trait Drafter: Send {
    fn kind(&self) -> DrafterKind;

    /// The sequence has these tokens now, prompt and reply. Those of the last call are their beginning.
    fn follow(&mut self, tokens: &[Token]);

    /// Takes what was guessed for this sequence together with others: tokens that may come after those it followed.
    fn give(&mut self, _tokens: &[Token]) {}

    /// Adds up to `n_max` tokens that may come after `tokens`, which were followed, to `draft`. It may be wrong in every way:
    /// the caller checks tokens, and counts what drafts are worth.
    fn draft(&mut self, tokens: &[Token], n_max: usize, draft: &mut Vec<Token>) -> Confidence;
}

//! How often drafts were right: of a sequence, and of all sequences of a drafter, which a new sequence begins with.
//!
//! Every draft is compared with what is drawn, also the part of it that no step verified. So it is known what longer drafts
//! would have brought, and where none are verified nothing is lost by it.

use super::drafter::Confidence;

/// The drafts that a sequence's count remembers. Text changes: code that is copied, then something new.
const OF_SEQUENCE: f64 = 64.0;

/// The same of all sequences.
const OF_ALL: f64 = 512.0;

/// The weight of what all sequences have shown, in drafts of a new sequence.
const PRIOR_WEIGHT: f64 = 4.0;

/// The share of drafts that are taken to be right before any was compared, by their confidence.
const UNKNOWN: [f64; Confidence::N] = [0.2, 0.4, 0.6, 0.8];

/// The same for the tokens after a right one.
const UNKNOWN_LATER: f64 = 0.7;

/// The numbers of compared and of right tokens. Older ones fade.
#[derive(Debug, Clone, Copy, Default)]
struct RightShare {
    n: f64,
    n_right: f64,
}

impl RightShare {
    fn note(&mut self, is_right: bool, window: f64) {
        let kept = if self.n >= window { 1.0 - 1.0 / window } else { 1.0 };
        self.n = self.n * kept + 1.0;
        self.n_right = self.n_right * kept + f64::from(u8::from(is_right));
    }

    fn share(self, prior: f64) -> f64 {
        (self.n_right + PRIOR_WEIGHT * prior) / (self.n + PRIOR_WEIGHT)
    }
}

/// How often drafts were right. See the module.
#[derive(Debug, Clone, Default)]
pub(crate) struct Chances {
    first: [RightShare; Confidence::N],
    later: RightShare,
}

/// A token of a draft, by what is known before it is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DraftPlace {
    /// The first one of a draft of this confidence.
    First(Confidence),
    /// The one before it was right.
    Later,
}

impl Chances {
    /// Counts a token that was compared, in a sequence and in all of them.
    pub(crate) fn note(&mut self, of_all: &mut Chances, place: DraftPlace, is_right: bool) {
        self.share_at(place).note(is_right, OF_SEQUENCE);
        of_all.share_at(place).note(is_right, OF_ALL);
    }

    fn share_at(&mut self, place: DraftPlace) -> &mut RightShare {
        match place {
            DraftPlace::First(confidence) => &mut self.first[confidence as usize],
            DraftPlace::Later => &mut self.later,
        }
    }

    /// The probability that the token at `place` of a sequence's draft is right.
    pub(crate) fn of(&self, of_all: &Chances, place: DraftPlace) -> f64 {
        match place {
            DraftPlace::First(confidence) => {
                let idx = confidence as usize;
                self.first[idx].share(of_all.first[idx].share(UNKNOWN[idx]))
            }
            DraftPlace::Later => self.later.share(of_all.later.share(UNKNOWN_LATER)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sequence_begins_with_what_others_have_shown_and_soon_follows_its_own_text() {
        let mut all = Chances::default();
        let place = DraftPlace::First(Confidence::Medium);
        let mut copying = Chances::default();
        for _ in 0..100 {
            copying.note(&mut all, place, true);
        }
        assert!(copying.of(&all, place) > 0.95);
        let mut other = Chances::default();
        assert!(other.of(&all, place) > 0.9, "others copy");
        for _ in 0..12 {
            other.note(&mut all, place, false);
        }
        assert!(other.of(&all, place) < 0.3, "it does not");
        for _ in 0..80 {
            copying.note(&mut all, place, false);
        }
        assert!(copying.of(&all, place) < 0.4, "its text has changed");
        assert!((other.of(&all, DraftPlace::Later) - UNKNOWN_LATER).abs() < 1e-9, "of which nothing is known");
    }
}

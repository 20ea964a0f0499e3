//! Counts what became of guesses, as the tokens of a reply tell it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use baton_schemas::draft::{DraftReport, DraftTotals, DrafterKind, DrafterLoss};

/// The guesses for the tokens that have come.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ArrivedDrafts {
    counts: DraftTotals,
    lost: Option<DrafterLoss>,
    /// The drafter of the last report, and its right tokens that have not come yet.
    to_come: Option<(DrafterKind, u32)>,
}

impl ArrivedDrafts {
    /// A token has come, perhaps with a report.
    pub(crate) fn token(&mut self, report: Option<DraftReport>) {
        if let Some(DraftReport { verified, loss }) = report {
            self.lost = loss.or(self.lost);
            if let Some((drafter, counts)) = verified {
                self.settle();
                let of_all = self.counts.of_mut(drafter);
                *of_all = of_all.plus(counts);
                self.to_come = Some((drafter, counts.n_accepted));
            }
        }
        if let Some((_, n)) = &mut self.to_come {
            *n = n.saturating_sub(1);
        }
    }

    /// Right tokens that have not come never will: the step after them has, or their engine is lost. Returns their drafter, if there
    /// are any.
    pub(crate) fn settle(&mut self) -> Option<DrafterKind> {
        let to_come = self.to_come.filter(|(_, n)| *n > 0);
        (self.counts, self.to_come) = (self.totals(), None);
        to_come.map(|(drafter, _)| drafter)
    }

    /// The reported guesses, without right ones that have not come.
    pub(crate) fn totals(&self) -> DraftTotals {
        let mut totals = self.counts;
        if let Some((drafter, n)) = self.to_come {
            let of_all = totals.of_mut(drafter);
            of_all.n_accepted = of_all.n_accepted.saturating_sub(n);
        }
        totals
    }

    /// Why the draft node was given up, if it was.
    pub(crate) fn lost(&self) -> Option<DrafterLoss> {
        self.lost
    }
}

/// The guesses of a choice: its clock notes them, and the request's watch reads them if the choice is not told its end.
#[derive(Debug, Clone, Default)]
pub(crate) struct ChoiceDrafts(Arc<Mutex<ArrivedDrafts>>);

impl ChoiceDrafts {
    pub(crate) fn lock(&self) -> MutexGuard<'_, ArrivedDrafts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use baton_schemas::draft::DraftCounts;

    use super::*;

    #[test]
    fn right_guesses_after_the_last_token_of_a_reply_are_not_counted_as_accepted() {
        let report = |n, n_accepted| {
            let verified = Some((DrafterKind::Prediction, DraftCounts { n, n_accepted }));
            Some(DraftReport { verified, loss: None })
        };
        let counted = |tokens: &[Option<DraftReport>]| {
            let mut drafts = ArrivedDrafts::default();
            tokens.iter().for_each(|report| drafts.token(*report));
            let DraftCounts { n, n_accepted } = drafts.totals().prediction;
            (n, n_accepted)
        };
        assert_eq!(counted(&[None, None]), (0, 0));
        assert_eq!(counted(&[report(4, 2), None, None]), (4, 2), "two right ones, and the one after them");
        assert_eq!(
            counted(&[report(4, 2), None, None, report(8, 5), None]),
            (12, 4),
            "a stop string in the second draft"
        );
        assert_eq!(counted(&[report(4, 0), report(3, 3)]), (7, 1));
    }

    #[test]
    fn the_loss_of_a_draft_node_stays_known() {
        let mut drafts = ArrivedDrafts::default();
        drafts.token(Some(DraftReport { verified: None, loss: Some(DrafterLoss::Late) }));
        drafts.token(None);
        assert_eq!(drafts.lost(), Some(DrafterLoss::Late));
    }
}

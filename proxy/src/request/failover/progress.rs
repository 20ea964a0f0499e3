//! What the reader of a sequence has received so far, from all its engines.

use baton_schemas::SequenceRequest;
use baton_schemas::draft::{DraftCounts, DraftReport, DrafterKind};
use baton_schemas::handoff::HandoffReport;
use baton_schemas::sequence::Timings;
use tokio::time::Instant;

use crate::arrived_drafts::ArrivedDrafts;

#[derive(Default)]
pub(super) struct StreamProgress {
    has_started: bool,
    is_handed_over: bool,
    /// Prompt tokens that the first decode node did not have to compute: cached or handed over.
    n_ready: u32,
    first_token: Option<Instant>,
    /// Tokens before the last loss of an engine.
    n_earlier: u32,
    /// The guesses of all engines, and those before the last loss.
    drafts: ArrivedDrafts,
    earlier_drafts: ArrivedDrafts,
    /// The drafter of right tokens that the lost engine did not send. Its reader does not know yet that they do not come.
    unsent: Option<DrafterKind>,
}

impl StreamProgress {
    /// An engine has a slot. Returns true the first time: the reader gets one start only.
    pub(super) fn start(&mut self, n_cached: u32) -> bool {
        if self.n_earlier == 0 {
            self.n_ready = n_cached;
        }
        !std::mem::replace(&mut self.has_started, true)
    }

    /// Another engine starts the sequence from its beginning: nothing that the first one did counts.
    pub(super) fn restart(&mut self) {
        *self = StreamProgress { has_started: self.has_started, ..StreamProgress::default() };
    }

    /// A handoff ended. Returns true the first time since the start: the reader gets one handoff for each start.
    pub(super) fn hand_over(&mut self, timings: &HandoffReport) -> bool {
        let is_first = !std::mem::replace(&mut self.is_handed_over, true);
        if is_first {
            self.n_ready += timings.n_tokens;
        }
        is_first
    }

    /// A token has come, perhaps with a report. Returns the report for the reader, which counts guesses itself where it ends the reply.
    pub(super) fn token(&mut self, drafts: Option<DraftReport>) -> Option<DraftReport> {
        self.drafts.token(drafts);
        self.first_token.get_or_insert_with(Instant::now);
        let Some(drafter) = self.unsent.take() else { return drafts };
        let (verified, loss) = drafts.map_or((None, None), |report| (report.verified, report.loss));
        // An empty one tells it that what the report before it announced is over.
        Some(DraftReport { verified: verified.or(Some((drafter, DraftCounts::default()))), loss })
    }

    /// The engine is lost after `n_generated` tokens.
    pub(super) fn lose(&mut self, n_generated: usize) {
        self.n_earlier = n_generated as u32;
        self.unsent = self.drafts.settle().or(self.unsent);
        self.earlier_drafts = self.drafts;
    }

    /// The timings of the whole sequence; `last` are those of the last engine.
    pub(super) fn timings(&self, last: Timings, request: &SequenceRequest) -> Timings {
        if self.n_earlier == 0 {
            return last;
        }
        Timings {
            prompt_n: (request.prompt.len() as u32).saturating_sub(self.n_ready),
            predicted_n: last.predicted_n + self.n_earlier,
            predicted_ms: self.first_token.map_or(0.0, |first| first.elapsed().as_secs_f64() * 1e3),
            drafts: last.drafts.plus(self.earlier_drafts.totals()),
            drafter_lost: last.drafter_lost.or(self.earlier_drafts.lost()),
            ..last
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_schemas::draft::{DraftTotals, DrafterLoss};

    use super::*;

    #[test]
    fn a_start_again_forgets_what_the_first_engine_did() {
        let report = HandoffReport { n_tokens: 100, ..HandoffReport::default() };
        let mut progress = StreamProgress::default();
        assert!(progress.start(7) && progress.hand_over(&report) && !progress.hand_over(&report));
        progress.lose(0);
        progress.restart();
        assert!(!progress.start(3), "the reader gets one start");
        assert!(progress.hand_over(&report), "the second engine's handoff is the one that counts");
        assert_eq!(progress.n_ready, 103);
        // After a token the first numbers stand.
        progress.token(None);
        progress.lose(1);
        assert!(!progress.start(50) && !progress.hand_over(&report));
        assert_eq!(progress.n_ready, 103);
    }

    #[test]
    fn a_reader_that_ends_the_reply_itself_counts_no_right_guess_that_a_lost_engine_did_not_send() {
        let verified = Some((DrafterKind::Remote, DraftCounts { n: 6, n_accepted: 4 }));
        let mut progress = StreamProgress::default();
        let mut reader = ArrivedDrafts::default();
        // One of four right tokens comes. The next engine guesses nothing.
        reader.token(progress.token(Some(DraftReport { verified, loss: None })));
        progress.lose(1);
        for _ in 0..5 {
            reader.token(progress.token(None));
        }
        assert_eq!(reader.totals().remote, DraftCounts { n: 6, n_accepted: 1 });
        // A report of the next engine says the same.
        let mut progress = StreamProgress::default();
        progress.token(Some(DraftReport { verified, loss: None }));
        progress.lose(1);
        assert_eq!(progress.token(Some(DraftReport { verified, loss: None })).unwrap().verified, verified);
        assert_eq!(progress.token(None), None);
    }

    #[test]
    fn guesses_that_a_lost_engine_has_reported_count_as_far_as_their_tokens_came() {
        let remote = |n, n_accepted| DraftTotals { remote: DraftCounts { n, n_accepted }, ..DraftTotals::default() };
        let report = |n, n_accepted, loss| {
            let verified = Some((DrafterKind::Remote, DraftCounts { n, n_accepted }));
            Some(DraftReport { verified, loss })
        };
        let mut progress = StreamProgress::default();
        progress.start(0);
        // Two of four right tokens come.
        progress.token(report(6, 4, Some(DrafterLoss::Late)));
        progress.token(None);
        progress.lose(2);
        progress.token(report(5, 3, None));
        let last = Timings { predicted_n: 9, drafts: remote(5, 3), ..Timings::default() };
        let timings = progress.timings(last, &SequenceRequest::default());
        assert_eq!((timings.predicted_n, timings.drafts), (11, remote(11, 5)));
        assert_eq!(timings.drafter_lost, Some(DrafterLoss::Late));
        // A second loss, after which nothing is left to generate.
        progress.lose(11);
        let timings = progress.timings(Timings::default(), &SequenceRequest::default());
        assert_eq!((timings.predicted_n, timings.drafts), (11, remote(11, 3)));
    }
}

//! The deadlines of one token: when it is late, and when its engine counts as stuck.

use std::time::Duration;

use tokio::time::Instant;

use crate::request::plan::Plan;
use crate::targets::nodes::FallbackReason;

/// The deadlines of the token that a sequence waits for. They run from the moment at which the client wants the token,
/// so a slow client makes no engine late.
pub(super) struct TokenDeadline {
    /// What a late token is counted as.
    pub(super) reason: FallbackReason,
    began: Option<Instant>,
    late_after: Duration,
    stuck_after: Duration,
    was_late: bool,
}

/// The next deadline of a wait.
#[derive(Debug, Clone, Copy)]
pub(super) struct NextDeadline {
    pub(super) at: Instant,
    pub(super) overdue: Overdue,
}

/// What passing a deadline means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Overdue {
    /// The token is later than predicted by more than the deadline allows.
    Late,
    /// The token does not come.
    Stuck,
}

impl TokenDeadline {
    /// The deadlines of a plan's first token.
    pub(super) fn first_token(plan: &Plan) -> TokenDeadline {
        let deadlines = &plan.model.deadlines;
        let prediction = plan.prediction.as_ref();
        TokenDeadline {
            reason: FallbackReason::FirstTokenLate,
            began: None,
            late_after: deadlines.first_token(prediction),
            stuck_after: deadlines.first_token_stuck(prediction),
            was_late: false,
        }
    }

    /// The deadlines from one token to the next.
    pub(super) fn next_token(plan: &Plan) -> TokenDeadline {
        let deadlines = &plan.model.deadlines;
        let prediction = plan.prediction.as_ref();
        TokenDeadline {
            reason: FallbackReason::NextTokenLate,
            began: None,
            late_after: deadlines.next_token(prediction),
            stuck_after: deadlines.next_token_stuck(prediction),
            was_late: false,
        }
    }

    /// The next deadline. The first call starts the clock.
    pub(super) fn due(&mut self) -> NextDeadline {
        let began = *self.began.get_or_insert_with(Instant::now);
        if self.was_late || self.late_after >= self.stuck_after {
            NextDeadline { at: began + self.stuck_after, overdue: Overdue::Stuck }
        } else {
            NextDeadline { at: began + self.late_after, overdue: Overdue::Late }
        }
    }

    /// The longest wait before the engine counts as stuck.
    pub(super) fn longest_wait(&self) -> Duration {
        self.stuck_after
    }

    /// Restarts the clock: the engine made progress other than a token, such as a slot or KV. A late token is not
    /// counted twice.
    pub(super) fn restart(&mut self) {
        self.began = None;
    }

    /// The token is late. From now on only the deadline of a stuck engine applies.
    pub(super) fn set_late(&mut self) {
        self.was_late = true;
    }
}

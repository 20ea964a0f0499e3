//! The deadlines of one token: when it is late, and when its engine counts as stuck.

use std::time::Duration;

use baton_engines::awake;
use tokio::time::Instant;

use crate::request::plan::Plan;
use crate::targets::nodes::FallbackReason;

/// The deadlines of the next token. They start when the client asks for the token, so a slow client makes no engine late.
pub(super) struct TokenDeadline {
    /// The reason under which a late token is counted.
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

/// The meaning of a passed deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Overdue {
    /// The token is later than predicted by more than the deadline allows.
    Late,
    /// The engine counts as stuck.
    Stuck,
}

impl TokenDeadline {
    /// The deadlines of a plan's first token.
    pub(super) fn first_token(plan: &Plan) -> TokenDeadline {
        let deadlines = &plan.model.deadlines;
        let prediction = plan.prediction.as_ref();
        let late_after = deadlines.first_token(prediction);
        TokenDeadline::new(FallbackReason::FirstTokenLate, late_after, deadlines.first_token_stuck(prediction))
    }

    /// The deadlines from one token to the next.
    pub(super) fn next_token(plan: &Plan) -> TokenDeadline {
        let deadlines = &plan.model.deadlines;
        let prediction = plan.prediction.as_ref();
        let late_after = deadlines.next_token(prediction);
        TokenDeadline::new(FallbackReason::NextTokenLate, late_after, deadlines.next_token_stuck(prediction))
    }

    fn new(reason: FallbackReason, late_after: Duration, stuck_after: Duration) -> TokenDeadline {
        TokenDeadline { reason, began: None, late_after, stuck_after, was_late: false }
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

    /// Waits for the next deadline. If this process was stopped meanwhile, the engine gets the time again.
    pub(super) async fn overdue(&mut self) -> Overdue {
        loop {
            let due = self.due();
            tokio::time::sleep_until(due.at).await;
            if !awake::has_overslept(due.at) {
                return due.overdue;
            }
            self.restart();
        }
    }

    /// The wait after which the engine counts as stuck.
    pub(super) fn longest_wait(&self) -> Duration {
        self.stuck_after
    }

    /// Restarts the clock after progress other than a token, such as a slot or KV. A late token is not counted twice.
    pub(super) fn restart(&mut self) {
        self.began = None;
    }

    /// The token is late. From now on only the deadline of a stuck engine applies.
    pub(super) fn set_late(&mut self) {
        self.was_late = true;
    }
}

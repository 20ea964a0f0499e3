//! One wait for a token: when it is late, and when its engine is stuck.

use tokio::time::Instant;

use crate::plan::Plan;

/// From when on a token is waited for. Time that a slow client takes before it wants the token is none of it.
pub(super) struct Patience {
    /// Why it is counted when it is late.
    pub(super) reason: &'static str,
    began: Option<Instant>,
    deadline: std::time::Duration,
    max: std::time::Duration,
    /// It has been found late.
    is_late: bool,
}

/// What there is to do at a moment that was waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Due {
    /// The token is later than predicted by more than the deadline allows.
    Late,
    /// It is not coming.
    Stuck,
}

impl Patience {
    /// For what a plan predicts until the first token.
    pub(super) fn for_first_token(plan: &Plan) -> Patience {
        let deadlines = &plan.model.deadlines;
        let deadline = deadlines.first_token(plan.prediction.as_ref());
        Patience { reason: "first_token_late", began: None, deadline, max: deadlines.max, is_late: false }
    }

    /// For what it predicts between two tokens.
    pub(super) fn for_next_token(plan: &Plan) -> Patience {
        let deadlines = &plan.model.deadlines;
        let deadline = deadlines.next_token(plan.prediction.as_ref());
        Patience { reason: "next_token_late", began: None, deadline, max: deadlines.max, is_late: false }
    }

    /// When there is something to do, and what. The wait begins with the first question.
    pub(super) fn due(&mut self) -> (Instant, Due) {
        let began = *self.began.get_or_insert_with(Instant::now);
        match self.is_late || self.deadline >= self.max {
            false => (began + self.deadline, Due::Late),
            true => (began + self.max, Due::Stuck),
        }
    }

    /// It is late now.
    pub(super) fn found_late(&mut self) {
        self.is_late = true;
    }
}

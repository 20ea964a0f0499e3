//! One wait for a token: when it is late, and when its engine is stuck.

use tokio::time::Instant;

use crate::request::plan::Plan;

/// From when on a token is waited for. Time that a slow client takes before it wants the token is none of it.
pub(super) struct Patience {
    /// Why it is counted when it is late.
    pub(super) reason: &'static str,
    began: Option<Instant>,
    deadline: std::time::Duration,
    /// From when on its engine counts as stuck.
    stuck: std::time::Duration,
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
        let (prediction, reason) = (plan.prediction.as_ref(), "first_token_late");
        let (deadline, stuck) = (deadlines.first_token(prediction), deadlines.first_token_stuck(prediction));
        Patience { reason, began: None, deadline, stuck, is_late: false }
    }

    /// For what it predicts between two tokens.
    pub(super) fn for_next_token(plan: &Plan) -> Patience {
        let deadlines = &plan.model.deadlines;
        let (prediction, reason) = (plan.prediction.as_ref(), "next_token_late");
        let (deadline, stuck) = (deadlines.next_token(prediction), deadlines.next_token_stuck(prediction));
        Patience { reason, began: None, deadline, stuck, is_late: false }
    }

    /// When there is something to do, and what. The wait begins with the first question.
    pub(super) fn due(&mut self) -> (Instant, Due) {
        let began = *self.began.get_or_insert_with(Instant::now);
        match self.is_late || self.deadline >= self.stuck {
            false => (began + self.deadline, Due::Late),
            true => (began + self.stuck, Due::Stuck),
        }
    }

    /// How long is waited at most.
    pub(super) fn at_most(&self) -> std::time::Duration {
        self.stuck
    }

    /// Something other than the token came: its sequence has its turn, or its KV. From now on the wait is a new one; what
    /// was late before is counted already.
    pub(super) fn begins_anew(&mut self) {
        self.began = None;
    }

    /// It is late now.
    pub(super) fn found_late(&mut self) {
        self.is_late = true;
    }
}

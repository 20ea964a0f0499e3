//! The deadlines of each token: when it is late, and when its engine counts as stuck.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use baton_link::awake;
use tokio::time::{Instant, Sleep, sleep_until};

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
    /// One timer for all tokens. It fires at the next deadline or earlier: a timer that is set again for each token costs
    /// more than the rest of the wait.
    timer: Option<Pin<Box<Sleep>>>,
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

    /// A token came: sets the deadlines of the next one.
    pub(super) fn expect_next_token(&mut self, plan: &Plan) {
        // They are the same for all tokens after the first.
        if self.reason != FallbackReason::NextTokenLate {
            let deadlines = &plan.model.deadlines;
            let prediction = plan.prediction.as_ref();
            self.reason = FallbackReason::NextTokenLate;
            self.late_after = deadlines.next_token(prediction);
            self.stuck_after = deadlines.next_token_stuck(prediction);
        }
        self.was_late = false;
        self.restart();
    }

    fn new(reason: FallbackReason, late_after: Duration, stuck_after: Duration) -> TokenDeadline {
        TokenDeadline { reason, began: None, late_after, stuck_after, was_late: false, timer: None }
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
        poll_fn(|context| self.poll_overdue(context)).await
    }

    fn poll_overdue(&mut self, context: &mut Context<'_>) -> Poll<Overdue> {
        loop {
            let due = self.due();
            let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(due.at)));
            if timer.deadline() > due.at {
                timer.as_mut().reset(due.at);
            }
            ready!(timer.as_mut().poll(context));
            if Instant::now() < due.at {
                timer.as_mut().reset(due.at);
            } else if awake::has_overslept(due.at) {
                self.restart();
            } else {
                return Poll::Ready(due.overdue);
            }
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

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_token_moves_the_deadline() {
        let seconds = Duration::from_secs;
        let mut deadline = TokenDeadline::new(FallbackReason::FirstTokenLate, seconds(60), seconds(90));
        assert!(timeout(seconds(50), deadline.overdue()).await.is_err());
        // The first token came. The deadline of the next one is earlier than that of the first.
        deadline.late_after = seconds(10);
        for _ in 0..5 {
            deadline.restart();
            assert!(timeout(seconds(9), deadline.overdue()).await.is_err());
        }
        deadline.restart();
        let began = Instant::now();
        assert_eq!(deadline.overdue().await, Overdue::Late);
        assert_eq!(began.elapsed().as_secs(), 10);
        deadline.set_late();
        assert_eq!(deadline.overdue().await, Overdue::Stuck);
        assert_eq!(began.elapsed().as_secs(), 90);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stop_of_the_process_gives_the_engine_its_time_again() {
        let mut deadline =
            TokenDeadline::new(FallbackReason::NextTokenLate, Duration::from_secs(10), Duration::from_secs(600));
        let stop = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            tokio::time::advance(Duration::from_secs(120)).await;
            Instant::now()
        };
        let (overdue, runs_again) = tokio::join!(deadline.overdue(), stop);
        assert_eq!((overdue, runs_again.elapsed().as_secs()), (Overdue::Late, 10));
    }
}

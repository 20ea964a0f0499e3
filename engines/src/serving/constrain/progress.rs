//! One sequence's progress through its constraint, and what its masks may cost.

use std::time::Duration;

use baton_schemas::constraint::Constraint;
use baton_schemas::{EngineError, Token};
use llguidance::Matcher;
use llguidance::api::StopReason;
use rustix::time::{ClockId, clock_gettime};
use tokio_util::sync::CancellationToken;
use toktrie::SimpleVob;

/// A sequence's place in its constraint.
pub(crate) struct Constrained {
    pub(super) matcher: Matcher,
    pub(super) budget: MaskBudget,
    /// The processor time of the last mask.
    cost: Duration,
    #[cfg(test)]
    pub(crate) gate: Option<std::sync::Arc<tokio::sync::Mutex<()>>>,
}

/// The processor time that a sequence's masks may take. In an ambiguous grammar, such as `s: s s | "a" | "b"`, a mask costs
/// more the longer the text is: 0.2 s on average over 277 tokens. Masks of objects with 480 optional properties take 0.2 to
/// 0.7 ms on average (llguidance 1.9.1 alone, 20,000 made-up tokens). It is the time of one thread alone, so that a busy
/// machine ends no sequence. Counts of the parser's items are no measure: an item of that grammar costs 50 times as much as
/// one of those objects.
pub(super) struct MaskBudget {
    pub(super) left: Duration,
}

impl Default for MaskBudget {
    fn default() -> Self {
        MaskBudget { left: Self::MOST }
    }
}

impl MaskBudget {
    /// The most that a sequence may save. A mask may overdraw it once, and llguidance ends a mask after 50,000 items.
    pub(super) const MOST: Duration = Duration::from_secs(1);

    /// The time that each token adds.
    pub(super) const PER_TOKEN: Duration = Duration::from_millis(10);

    /// Takes the time of a mask, and adds that of a token. Returns false if it took more than there was.
    fn charge(&mut self, cost: Duration) -> bool {
        let left = self.left.checked_sub(cost);
        self.left = (left.unwrap_or_default() + Self::PER_TOKEN).min(Self::MOST);
        left.is_some()
    }
}

/// The processor time that this thread has taken.
pub(super) fn thread_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).expect("a thread's time is never negative")
}

/// What may follow a text.
pub(super) enum Following {
    /// These tokens, at least one.
    Allowed(SimpleVob),
    /// Nothing: the text is complete.
    Complete,
    /// Nothing, although the text is not complete.
    Nothing(NoToken),
}

/// Why there is no next token. All tokens so far were allowed, so the fault is the constraint's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoToken {
    /// None can follow.
    DeadEnd,
    /// Taking the last token, or computing the next ones, exceeds llguidance's limits or the sequence's budget.
    TooComplex,
    /// The thread that computes the masks has failed, or could not start.
    NoThread,
}

impl Constrained {
    /// The state after `generated`, which was drawn under the same constraint, with a whole budget. Blocking: some
    /// microseconds for each token. Errors: a token does not satisfy the constraint, or the caller has gone.
    pub(super) fn after(
        matcher: Matcher,
        generated: &[Token],
        is_abandoned: &CancellationToken,
    ) -> Result<Self, EngineError> {
        let mut constrained = Constrained {
            matcher,
            budget: MaskBudget::default(),
            cost: Duration::ZERO,
            #[cfg(test)]
            gate: None,
        };
        for &t in generated {
            if !constrained.accept(t) || is_abandoned.is_cancelled() {
                return Err(EngineError::internal("a token of the reply so far does not keep the constraint"));
            }
        }
        Ok(constrained)
    }

    /// Takes the token that was drawn, if there is one, and computes what may follow. Blocking: up to a second.
    pub(super) fn next(&mut self, drawn: Option<Token>) -> Following {
        #[cfg(test)]
        self.gate.iter().for_each(|gate| drop(gate.blocking_lock()));
        let began = thread_time();
        drawn.map(|t| self.accept(t));
        if drawn.is_some() && self.is_complete() {
            return Following::Complete;
        }
        let mask = self.matcher.compute_mask_or_eos();
        self.cost = thread_time().saturating_sub(began);
        if !self.budget.charge(self.cost) {
            return Following::Nothing(NoToken::TooComplex);
        }
        match mask {
            Ok(mask) if !mask.is_zero() => Following::Allowed(mask),
            outcome => {
                tracing::debug!(error = ?outcome.err(), "no token satisfies the constraint");
                Following::Nothing(if is_dead_end(&self.matcher) { NoToken::DeadEnd } else { NoToken::TooComplex })
            }
        }
    }

    /// Advances by the token that was drawn. Returns false if the matcher cannot take it; the next mask then reports why.
    pub(super) fn accept(&mut self, t: Token) -> bool {
        let is_taken = self.matcher.is_stopped() || self.matcher.consume_token(t).is_ok();
        if !is_taken {
            tracing::debug!(token = t, error = ?self.matcher.get_error(), "a token cannot follow under its constraint");
        }
        is_taken
    }

    /// Returns true if the text is complete and no token can follow. A matcher that failed has stopped, too, but its text
    /// is not complete.
    pub(super) fn is_complete(&self) -> bool {
        self.matcher.is_stopped() && !self.matcher.is_error()
    }

    /// The processor time of the last mask. Taking a token costs less.
    pub(super) fn cost(&self) -> Duration {
        #[cfg(test)]
        if self.gate.is_some() {
            return Duration::MAX;
        }
        self.cost
    }
}

/// Returns true if no token could follow, false if llguidance could not compute which. After an error, its matcher
/// only has words. For a dead end they are the name of the reason.
pub(super) fn is_dead_end(matcher: &Matcher) -> bool {
    let Some(problem) = matcher.get_error() else { return true };
    let stop = serde_json::from_value(first_line(&problem).into());
    matches!(stop, Ok(StopReason::NoExtension | StopReason::NoExtensionBias))
}

pub(super) fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

impl NoToken {
    /// The error that ends a sequence with this constraint.
    pub(crate) fn error(self, constraint: Option<&Constraint>) -> EngineError {
        match (self, constraint) {
            (NoToken::DeadEnd, Some(constraint)) => {
                let problem = "the text has come to where nothing that it allows can follow";
                EngineError::invalid_field(constraint.field(), problem)
            }
            (NoToken::TooComplex, Some(constraint)) => {
                let problem = "is too complex for the text that it has come to: it needs fewer properties, alternatives or \
                               repetitions, or rules that read a text in one way only";
                EngineError::invalid_field(constraint.field(), problem)
            }
            (NoToken::NoThread, _) => EngineError::internal("the thread of a constraint has failed"),
            (_, None) => EngineError::internal("a token was refused without a constraint"),
        }
    }
}

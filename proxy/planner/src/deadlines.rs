//! How long is waited for what was predicted.
//!
//! A deadline is `factor` times the prediction, and never less than `floor`: a prediction of 50 ms that is wrong by 500 ms
//! is no reason for anything. What is late is counted, and hedged where that is wanted. It is not cut off: a node that
//! shows every second that it lives is waited for, up to `max`. Only a pull is given up at its deadline, because the
//! decode node can compute the prompt itself and loses nothing that came.

use std::time::Duration;

use super::cost::Prediction;

/// As configured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Deadlines {
    /// No deadline is shorter.
    pub floor: Duration,
    /// Deadline ÷ prediction.
    pub factor: f64,
    /// No deadline is longer. An engine that gives no token for so long, and for `factor` times what was predicted, is
    /// stuck, whatever signs of life its node shows.
    pub max: Duration,
    /// Start a second route when the first token is late, and take whichever delivers first.
    pub hedge: bool,
}

impl Default for Deadlines {
    fn default() -> Self {
        Deadlines {
            // Another program on the machine, a cold file cache, a burst of other requests: all of that passes in less.
            floor: Duration::from_secs(10),
            // Predictions are within 10 % after eight requests (docs/planning.md), and within 2.5 times before.
            factor: 4.0,
            // As long as clients wait by default: the OpenAI SDK ten minutes.
            max: Duration::from_secs(600),
            hedge: false,
        }
    }
}

/// Nothing is waited for any longer, whatever is predicted.
const LONGEST: Duration = Duration::from_secs(24 * 3_600);

impl Deadlines {
    /// For something that should take so long.
    pub fn of(&self, predicted_ms: f64) -> Duration {
        self.scaled(predicted_ms).max(self.floor).min(self.max)
    }

    /// From when on something that should take so long is not coming.
    fn stuck(&self, predicted_ms: f64) -> Duration {
        self.scaled(predicted_ms).max(self.max).min(LONGEST)
    }

    fn scaled(&self, predicted_ms: f64) -> Duration {
        // Too much for a duration, or no number.
        Duration::try_from_secs_f64(predicted_ms / 1e3 * self.factor).unwrap_or(self.max)
    }

    /// From when on the first token is not coming.
    pub fn first_token_stuck(&self, prediction: Option<&Prediction>) -> Duration {
        prediction.map_or(self.max, |prediction| self.stuck(prediction.ttft_ms))
    }

    /// From when on the next token is not coming.
    pub fn next_token_stuck(&self, prediction: Option<&Prediction>) -> Duration {
        prediction.map_or(self.max, |prediction| self.stuck(prediction.step_ms))
    }

    /// From the plan to the first token. Without a prediction nothing is late.
    pub fn first_token(&self, prediction: Option<&Prediction>) -> Duration {
        prediction.map_or(self.max, |prediction| self.of(prediction.ttft_ms))
    }

    /// From one token to the next.
    pub fn next_token(&self, prediction: Option<&Prediction>) -> Duration {
        prediction.map_or(self.max, |prediction| self.of(prediction.step_ms))
    }

    /// Of a pull, from one verified position to the next, in milliseconds.
    pub fn pull_ms(&self, prediction: Option<&Prediction>) -> Option<u32> {
        let deadline = self.of(prediction?.ttft_ms);
        Some(u32::try_from(deadline.as_millis()).unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_follows_the_prediction_between_its_bounds() {
        let deadlines = Deadlines::default();
        let check = |predicted_ms: f64, expected: u64| {
            assert_eq!(deadlines.of(predicted_ms), Duration::from_secs(expected), "{predicted_ms}");
        };
        check(0.0, 10);
        check(1_000.0, 10);
        check(5_000.0, 20);
        check(1e6, 600);
        check(f64::INFINITY, 600);
        check(f64::NAN, 600);
        check(-1.0, 600);
    }

    #[test]
    fn what_is_rightly_predicted_to_take_long_is_waited_for() {
        let deadlines = Deadlines::default();
        let after = |ttft_ms| {
            let prediction = Prediction { ttft_ms, ..Prediction::default() };
            deadlines.first_token_stuck(Some(&prediction)).as_secs()
        };
        assert_eq!(after(1_000.0), 600);
        assert_eq!(after(800_000.0), 3_200);
        assert_eq!(after(f64::INFINITY), 600);
        assert_eq!(after(1e12), LONGEST.as_secs());
        assert_eq!(deadlines.first_token_stuck(None), deadlines.max);
    }

    #[test]
    fn without_a_prediction_nothing_is_late() {
        let deadlines = Deadlines::default();
        assert_eq!((deadlines.first_token(None), deadlines.pull_ms(None)), (deadlines.max, None));
        let prediction = Prediction { ttft_ms: 5_000.0, step_ms: 3_000.0, ..Prediction::default() };
        assert_eq!(deadlines.pull_ms(Some(&prediction)), Some(20_000));
        assert_eq!(deadlines.next_token(Some(&prediction)), Duration::from_secs(12));
    }
}

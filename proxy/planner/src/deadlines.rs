//! Deadlines for predicted events.
//!
//! A deadline is `factor` times the prediction, and at least `floor`: an error of 500 ms in a prediction of 50 ms is no
//! reason to act. A late token is counted, and starts a second route if hedging is on. It is not given up: a request
//! waits up to `max` for a node that reports every second that it is alive. Only a pull ends at its deadline, because the
//! decode node keeps the KV that has arrived and computes the rest itself.

use std::time::Duration;

use super::cost::Prediction;

/// The configured limits of deadlines.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Deadlines {
    pub floor: Duration,
    /// Deadline ÷ prediction.
    pub factor: f64,
    /// The longest deadline. An engine counts as stuck after this time, and at least `factor` times the prediction,
    /// without a token, even if its node is alive.
    pub max: Duration,
    /// If true, a late first token starts a second route; the first token to arrive decides.
    pub hedge: bool,
}

impl Default for Deadlines {
    fn default() -> Self {
        Deadlines {
            // Longer than delays by another program on the machine, a cold file cache or a burst of requests.
            floor: Duration::from_secs(10),
            // Predictions are within 10 % after eight requests (docs/results/planning.md), and within a factor of 2.5 before.
            factor: 4.0,
            // The default timeout of the OpenAI SDK.
            max: Duration::from_secs(600),
            hedge: false,
        }
    }
}

/// The longest wait, even if more is predicted.
const LONGEST: Duration = Duration::from_secs(24 * 3_600);

impl Deadlines {
    /// The deadline of an event that should take `predicted_ms`.
    pub fn of(&self, predicted_ms: f64) -> Duration {
        self.scaled(predicted_ms).max(self.floor).min(self.max)
    }

    /// The time after which an event that should take `predicted_ms` counts as stuck.
    fn stuck(&self, predicted_ms: f64) -> Duration {
        self.scaled(predicted_ms).max(self.max).min(LONGEST)
    }

    fn scaled(&self, predicted_ms: f64) -> Duration {
        // The conversion fails for negative times, NaN, and times too long for a `Duration`.
        Duration::try_from_secs_f64(predicted_ms / 1e3 * self.factor).unwrap_or(self.max)
    }

    /// The time without a first token after which the engine counts as stuck.
    pub fn first_token_stuck(&self, prediction: Option<&Prediction>) -> Duration {
        prediction.map_or(self.max, |prediction| self.stuck(prediction.ttft_ms))
    }

    /// The time without a next token after which the engine counts as stuck.
    pub fn next_token_stuck(&self, prediction: Option<&Prediction>) -> Duration {
        prediction.map_or(self.max, |prediction| self.stuck(prediction.step_ms))
    }

    /// The deadline from the plan to the first token; `max` without a prediction.
    pub fn first_token(&self, prediction: Option<&Prediction>) -> Duration {
        prediction.map_or(self.max, |prediction| self.of(prediction.ttft_ms))
    }

    /// The deadline from one token to the next; `max` without a prediction.
    pub fn next_token(&self, prediction: Option<&Prediction>) -> Duration {
        prediction.map_or(self.max, |prediction| self.of(prediction.step_ms))
    }

    /// The deadline of a pull, from one verified position to the next, in milliseconds; `None` without a prediction.
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
    fn a_long_prediction_extends_the_time_until_an_engine_counts_as_stuck() {
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

//! The sampling fields that a client set, or an operator for a model.

use std::ops::RangeInclusive;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::sampling::Sampling;

/// The range of a repeat penalty. A smaller one makes logits too large to be distinguished in f32; at the upper end,
/// repeated tokens are already impossible.
pub(crate) const REPEAT_PENALTY: RangeInclusive<f64> = 0.1..=10.0;
/// OpenAI's range of the temperature.
pub(crate) const TEMPERATURE: RangeInclusive<f64> = 0.0..=2.0;
/// OpenAI's range of the frequency and presence penalties.
pub(crate) const OCCURRENCE_PENALTY: RangeInclusive<f64> = -2.0..=2.0;
/// The range of `top_p` and `min_p`.
pub(crate) const PROBABILITY: RangeInclusive<f64> = 0.0..=1.0;

/// The fields of [`Sampling`] that a client or an operator set. Their meanings are documented there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
#[allow(missing_docs, reason = "the fields of `Sampling`")]
pub struct SamplingFields {
    pub temperature: Option<f32>,
    pub top_k: Option<u32>,
    pub top_p: Option<f32>,
    pub min_p: Option<f32>,
    pub repeat_penalty: Option<f32>,
    pub repeat_last_n: Option<i32>,
    pub frequency_penalty: Option<f32>,
    pub presence_penalty: Option<f32>,
}

impl SamplingFields {
    /// Overwrites the fields of `sampling` that are set here.
    pub fn apply(&self, sampling: &mut Sampling) {
        set(&mut sampling.temperature, self.temperature);
        set(&mut sampling.top_k, self.top_k);
        set(&mut sampling.top_p, self.top_p);
        set(&mut sampling.min_p, self.min_p);
        set(&mut sampling.repeat_penalty, self.repeat_penalty);
        set(&mut sampling.repeat_last_n, self.repeat_last_n);
        set(&mut sampling.frequency_penalty, self.frequency_penalty);
        set(&mut sampling.presence_penalty, self.presence_penalty);
    }

    /// Returns the name of every field that is out of range, with the problem.
    pub fn problems(&self) -> Vec<(&'static str, String)> {
        let floats = [
            ("temperature", self.temperature, TEMPERATURE),
            ("top_p", self.top_p, PROBABILITY),
            ("min_p", self.min_p, PROBABILITY),
            ("repeat_penalty", self.repeat_penalty, REPEAT_PENALTY),
            ("frequency_penalty", self.frequency_penalty, OCCURRENCE_PENALTY),
            ("presence_penalty", self.presence_penalty, OCCURRENCE_PENALTY),
        ];
        let floats = floats.into_iter().filter_map(|(name, value, range)| {
            let wrong = value.filter(|value| !range.contains(&f64::from(*value)))?;
            Some((name, format!("must be between {} and {}, not {wrong}", range.start(), range.end())))
        });
        let last_n = self.repeat_last_n.filter(|n| *n < -1);
        let last_n = last_n.map(|wrong| ("repeat_last_n", format!("must be at least -1, not {wrong}")));
        floats.chain(last_n).collect()
    }
}

fn set<T>(place: &mut T, value: Option<T>) {
    if let Some(value) = value {
        *place = value;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_chosen_is_written() {
        let chosen = SamplingFields { temperature: Some(0.0), repeat_last_n: Some(-1), ..SamplingFields::default() };
        let mut sampling = Sampling { seed: 7, top_k: 3, ..Sampling::default() };
        chosen.apply(&mut sampling);
        let expected = Sampling { temperature: 0.0, repeat_last_n: -1, seed: 7, top_k: 3, ..Sampling::default() };
        assert_eq!(sampling, expected);
    }

    #[test]
    fn what_is_out_of_range_is_named() {
        assert!(SamplingFields::default().problems().is_empty());
        let wrong = SamplingFields {
            temperature: Some(2.5),
            top_k: Some(0),
            top_p: Some(1.0),
            min_p: Some(f32::NAN),
            repeat_penalty: Some(0.0),
            repeat_last_n: Some(-2),
            frequency_penalty: Some(-2.0),
            presence_penalty: Some(3.0),
        };
        let named: Vec<&str> = wrong.problems().into_iter().map(|(name, _)| name).collect();
        assert_eq!(named, ["temperature", "min_p", "repeat_penalty", "presence_penalty", "repeat_last_n"]);
    }
}

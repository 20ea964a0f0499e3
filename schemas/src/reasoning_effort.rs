//! How hard a model is asked to think. Each dialect has a part of one scale.

use schemars::json_schema;

use crate::request::read::{Read, Reading, ValueProblem};
use crate::request::schema::described;

/// How hard a model is asked to think, for templates that have such a variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum ReasoningEffort {
    None,
    Minimal,
    Low,
    Medium,
    High,
    Xhigh,
    Max,
}

impl ReasoningEffort {
    const ALL: [ReasoningEffort; 7] = [
        ReasoningEffort::None,
        ReasoningEffort::Minimal,
        ReasoningEffort::Low,
        ReasoningEffort::Medium,
        ReasoningEffort::High,
        ReasoningEffort::Xhigh,
        ReasoningEffort::Max,
    ];

    pub(crate) fn as_str(self) -> &'static str {
        self.into()
    }

    /// Reads a word of a dialect that has only `efforts`.
    pub(crate) fn among(word: &str, efforts: &[ReasoningEffort]) -> Reading<ReasoningEffort> {
        let effort = efforts.iter().find(|effort| effort.as_str() == word);
        effort.copied().ok_or_else(|| {
            let words: Vec<&str> = efforts.iter().map(|effort| effort.as_str()).collect();
            let (last, others) = words.split_last().expect("every dialect has an effort");
            ValueProblem::Value(format!("must be {} or {last}", others.join(", ")))
        })
    }
}

/// OpenAI's dialect has the whole scale.
impl Read for ReasoningEffort {
    const EXPECTED: &'static str = String::EXPECTED;

    fn string(word: &str) -> Reading<Self> {
        Self::among(word, &Self::ALL)
    }
}

described!([] ReasoningEffort: |_generator| {
    json_schema!({ "type": "string", "enum": Self::ALL.map(Self::as_str) })
});

//! Why a model's KV is not handed over from node to node. Such a model is served all the same: its prompts are computed where
//! it generates.

use serde::{Deserialize, Serialize};

/// Why a model's KV is not handed over. An engine finds it when it loads the model.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, strum::IntoStaticStr,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum NoHandoffReason {
    /// The cache has a form that the engine does not know.
    UnknownCache,
    /// The cache has values of a type that cannot be handed over.
    KvValueType,
    /// The cache keeps the prompt's tokens beside rows.
    TokensInCache,
    /// The cache of a trial prompt could not be computed or copied.
    KvNotCopied,
    /// A node of another version does not say why, or says what is not known here.
    #[default]
    #[serde(other)]
    KvNotDivisible,
}

impl NoHandoffReason {
    /// Every reason.
    pub const ALL: [NoHandoffReason; 5] = [
        NoHandoffReason::UnknownCache,
        NoHandoffReason::KvValueType,
        NoHandoffReason::TokensInCache,
        NoHandoffReason::KvNotCopied,
        NoHandoffReason::KvNotDivisible,
    ];

    /// The word for metrics, logs and JSON.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// The same as the end of a sentence that begins with the model.
    pub fn words(self) -> &'static str {
        match self {
            NoHandoffReason::UnknownCache => "has a cache of a form that its engine does not hand over",
            NoHandoffReason::KvValueType => "has a cache with values of a type that cannot be handed over",
            NoHandoffReason::TokensInCache => "keeps the prompt's tokens in its cache",
            NoHandoffReason::KvNotCopied => "has a cache that could not be copied when the engine tried it",
            NoHandoffReason::KvNotDivisible => "has no KV cache that can be handed over",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_has_one_word_and_an_unknown_one_is_no_error() {
        for reason in NoHandoffReason::ALL {
            let json = serde_json::to_value(reason).unwrap();
            assert_eq!(json, reason.as_str());
            assert_eq!(serde_json::from_value::<NoHandoffReason>(json).unwrap(), reason);
        }
        let newer: NoHandoffReason = serde_json::from_str("\"of_next_year\"").unwrap();
        assert_eq!(newer, NoHandoffReason::KvNotDivisible);
    }
}

//! The capabilities of a model, in Ollama's words.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A capability of a model.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema, strum::IntoStaticStr,
)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum OllamaCapability {
    /// It generates text.
    Completion,
    /// It calls tools.
    Tools,
    /// It sees images.
    Vision,
    /// It thinks before it answers.
    Thinking,
    /// It fills gaps in a text.
    Insert,
    /// It computes vectors.
    Embedding,
}

impl OllamaCapability {
    /// The word in replies and tables.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// The capabilities in another server's list, each once and in one order. Words that are not known here are left out.
    pub fn listed<'w>(words: impl Iterator<Item = &'w serde_json::Value>) -> Vec<OllamaCapability> {
        let mut listed: Vec<_> = words.filter_map(|word| OllamaCapability::deserialize(word).ok()).collect();
        listed.sort();
        listed.dedup();
        listed
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn known_words_of_a_list_are_read_once() {
        let words = [json!("vision"), json!("a new word"), json!("completion"), json!("vision"), json!(7), json!(null)];
        assert_eq!(OllamaCapability::listed(words.iter()), [OllamaCapability::Completion, OllamaCapability::Vision]);
        assert_eq!(json!(OllamaCapability::Insert), OllamaCapability::Insert.as_str());
    }
}

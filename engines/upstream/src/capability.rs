//! The capabilities of an upstream's models, from its list or from the configuration.

use std::collections::BTreeSet;

use serde_json::Value;

/// Something that a request may need, besides [images](crate::UpstreamSettings::images).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum ModelCapability {
    /// Calls of tools.
    Tools,
    /// Reasoning that can be switched on.
    Thinking,
    /// Vectors of texts.
    Embeddings,
    /// Scores of documents.
    Rerank,
}

impl ModelCapability {
    pub const ALL: [ModelCapability; 4] =
        [ModelCapability::Tools, ModelCapability::Thinking, ModelCapability::Embeddings, ModelCapability::Rerank];

    /// The word in configurations.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// The capability with this word.
    pub fn parse(word: &str) -> Option<ModelCapability> {
        ModelCapability::ALL.into_iter().find(|capability| capability.as_str() == word)
    }

    /// The capability that a server's word means.
    fn listed(word: &str) -> Option<ModelCapability> {
        match word {
            "tools" | "tool_use" | "function_calling" | "tool_choice" => Some(ModelCapability::Tools),
            "thinking" | "reasoning" | "include_reasoning" => Some(ModelCapability::Thinking),
            "embedding" | "embeddings" => Some(ModelCapability::Embeddings),
            "rerank" | "reranking" => Some(ModelCapability::Rerank),
            _ => None,
        }
    }
}

/// The capabilities that an entry of a list of models denies.
///
/// An object of yes and no says what it names. A list of words says that there are no tools and no reasoning, if it knows one of all
/// these words: some servers list other things there.
pub(crate) fn lacking(entry: &Value) -> BTreeSet<ModelCapability> {
    if let Some(object) = entry.get("capabilities").and_then(Value::as_object) {
        let denied = object.iter().filter(|(_, value)| **value == Value::Bool(false));
        return denied.filter_map(|(word, _)| ModelCapability::listed(word)).collect();
    }
    let lists = ["capabilities", "supported_parameters", "features"].into_iter().filter_map(|field| entry.get(field));
    let words = lists.filter_map(Value::as_array).flatten().filter_map(Value::as_str);
    let listed: BTreeSet<ModelCapability> = words.filter_map(ModelCapability::listed).collect();
    let told = [ModelCapability::Tools, ModelCapability::Thinking].into_iter().filter(|_| !listed.is_empty());
    told.filter(|capability| !listed.contains(capability)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_list_says_what_a_model_cannot_do_in_the_words_of_several_servers() {
        use ModelCapability::{Thinking, Tools};
        let check = |entry: Value, expected: &[ModelCapability]| {
            assert_eq!(lacking(&entry), expected.iter().copied().collect(), "{entry}");
        };
        check(json!({ "capabilities": ["completion", "tools", "thinking"] }), &[]);
        check(json!({ "capabilities": ["tool_use"] }), &[Thinking]);
        check(json!({ "capabilities": { "completion_chat": true, "function_calling": false } }), &[Tools]);
        check(json!({ "capabilities": { "function_calling": true, "vision": false } }), &[]);
        check(json!({ "supported_parameters": ["temperature", "tools", "reasoning"] }), &[]);
        check(json!({ "capabilities": ["embedding"] }), &[Tools, Thinking]);
        for nothing in
            [json!({}), json!({ "capabilities": ["completion", "multimodal"] }), json!({ "capabilities": 7 })]
        {
            check(nothing, &[]);
        }
        check(json!({ "capabilities": { "completion_chat": true, "function_calling": "no" } }), &[]);
    }

    #[test]
    fn every_capability_is_found_by_its_word() {
        for capability in ModelCapability::ALL {
            assert_eq!(ModelCapability::parse(capability.as_str()), Some(capability));
        }
        assert_eq!(ModelCapability::parse("flying"), None);
    }
}

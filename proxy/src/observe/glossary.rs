//! The endpoint's words for people, from the file that the live page reads, too. docs/glossary.md explains them.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::Deserialize;

use crate::targets::nodes::NodeState;

/// By the words of JSON, metrics and headers: a short label and a clause.
#[derive(Debug, Default, Deserialize)]
struct Glossary {
    states: BTreeMap<String, String>,
    problems: BTreeMap<String, (String, String)>,
    reasons: BTreeMap<String, (String, String)>,
}

static GLOSSARY: LazyLock<Glossary> =
    LazyLock::new(|| serde_json::from_str(include_str!("../../page/src/glossary.json")).unwrap_or_default());

/// The state of a node, in lower case.
pub fn state_label(state: NodeState) -> String {
    GLOSSARY.states.get(state.as_str()).map_or(state.as_str(), String::as_str).to_lowercase()
}

/// Says in a clause why a node or a pair is not used, or how it failed. A word of another version is shown as it is.
pub fn problem(word: &str) -> &str {
    GLOSSARY.problems.get(word).map_or(word, |(_, clause)| clause)
}

/// A short label for a problem or for the reason of a route.
pub fn label(word: &str) -> &str {
    GLOSSARY.problems.get(word).or_else(|| GLOSSARY.reasons.get(word)).map_or(word, |(label, _)| label)
}

#[cfg(test)]
mod tests {
    use baton_schemas::no_handoff::NoHandoffReason;

    use super::*;

    #[test]
    fn every_word_has_a_row_in_the_glossary_page() {
        let page = include_str!("../../../docs/glossary.md");
        let all = GLOSSARY.problems.iter().chain(&GLOSSARY.reasons);
        assert!(all.clone().count() > 40);
        for (word, (label, clause)) in all {
            let row = format!("| `{word}` | {label} | {clause} |");
            assert!(page.contains(&row), "docs/glossary.md lacks {row}");
        }
        assert_eq!((problem("other_model"), label("faster")), ("it runs another model", "faster"));
        assert_eq!(problem("of_another_version"), "of_another_version");
        let states = NodeState::ALL.map(state_label);
        assert_eq!(states, ["not loaded", "starting", "ready", "stopping", "suspect", "lost", "asleep", "waking"]);
        for state in NodeState::ALL.into_iter().filter(|state| *state != NodeState::Ready) {
            assert_eq!(label(state.as_str()), state_label(state), "one word for one state");
        }
        for reason in NoHandoffReason::ALL {
            assert_eq!(label(reason.as_str()), "no handoffs", "{reason:?}");
        }
    }
}

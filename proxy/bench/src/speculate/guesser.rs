//! What guesses tokens for a server.

use serde::Serialize;

/// What guesses tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Guesser {
    Nothing,
    PromptLookup,
    /// The model's own head (MTP), beside prompt lookup.
    Head,
    DraftModel,
    /// The draft model in a process of its own.
    DraftNode,
    Prediction,
}

impl Guesser {
    /// In words, for reports.
    pub(super) fn words(self) -> &'static str {
        match self {
            Guesser::Nothing => "nothing",
            Guesser::PromptLookup => "prompt lookup",
            Guesser::Head => "the model's own head",
            Guesser::DraftModel => "draft model",
            Guesser::DraftNode => "draft node",
            Guesser::Prediction => "the client's prediction",
        }
    }
}

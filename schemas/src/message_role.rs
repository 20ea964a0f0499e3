//! The role of a message's author.

use serde::{Deserialize, Serialize};

/// The role of a message's author. Dialects refuse other roles, so chat templates see only these four words.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
#[serde(into = "&'static str", try_from = "String")]
pub enum MessageRole {
    /// The application: instructions for the whole conversation.
    System,
    /// The person or program that asks.
    #[default]
    User,
    /// The model.
    Assistant,
    /// A tool: the result of a call.
    Tool,
}

impl MessageRole {
    /// Every role.
    pub const ALL: [MessageRole; 4] =
        [MessageRole::System, MessageRole::User, MessageRole::Assistant, MessageRole::Tool];

    /// The word for the role in JSON and in chat templates.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Returns the role that a word names, if it names one.
    pub fn of(word: &str) -> Option<MessageRole> {
        MessageRole::ALL.into_iter().find(|role| role.as_str() == word)
    }
}

impl TryFrom<String> for MessageRole {
    type Error = String;

    fn try_from(word: String) -> Result<MessageRole, String> {
        MessageRole::of(&word).ok_or_else(|| format!("unknown role \"{}\"", word.escape_debug()))
    }
}

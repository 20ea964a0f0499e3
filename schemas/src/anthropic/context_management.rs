//! `context_management`: what is left out of a conversation before the model reads it.

use serde::de::MapAccess;
use serde_json::Value;

use crate::generate::Message;
use crate::request::InvalidRequest;
use crate::request::field::{Field, Items, Required, join, object};
use crate::request::invalid::quoted;
use crate::request::read::{Read, Reading, ValueProblem};
use crate::request::values::{Integer, MAX_U32};

object! {
    /// What is left out of the conversation. Only earlier thinking can be.
    pub(crate) struct ContextManagement {
        /// What to leave out.
        edits: Field<Items<ContextEdit>>,
    }
}

object! {
    /// Leaves something out of the conversation.
    pub(crate) struct ContextEdit {
        /// `clear_thinking_20251015` leaves earlier thinking out. Others are a 400: shorten the conversation at the client.
        #[schemars(extend("enum" = [CLEAR_THINKING]))]
        r#type: Required<String>,
        /// What stays: `all`, or `{"type": "thinking_turns", "value": 2}` for the thinking of the last two turns. By default
        /// that of the last one.
        #[schemars(with = "Value", extend("enum" = ["all", null]))]
        keep: Field<KeptThinking>,
    }
}

/// The turns whose thinking stays.
#[derive(Debug)]
pub(crate) enum KeptThinking {
    All,
    OfLast(usize),
}

object! {
    /// Names the turns whose thinking stays.
    pub(crate) struct KeptTurns {
        /// `all` or `thinking_turns`.
        r#type: Field<String>,
        /// The number of turns.
        value: Field<Integer<1, MAX_U32>>,
    }
}

impl Read for KeptThinking {
    const EXPECTED: &'static str = "all, or {\"type\": \"thinking_turns\", \"value\": N}";

    fn wrong(_: &'static str) -> ValueProblem {
        ValueProblem::value(format!("must be {}", Self::EXPECTED))
    }

    fn string(word: &str) -> Reading<Self> {
        if word == ALL { Ok(KeptThinking::All) } else { Err(Self::wrong("a string")) }
    }

    fn object<'de, A: MapAccess<'de>>(fields: A) -> Result<Reading<Self>, A::Error> {
        Ok(KeptTurns::object(fields)?.and_then(|turns| {
            let n_turns = turns.value.sound().and_then(Integer::count);
            match turns.r#type.sound().as_deref() {
                Some(ALL) => Ok(KeptThinking::All),
                Some("thinking_turns") => {
                    n_turns.map(|n| KeptThinking::OfLast(n as usize)).ok_or_else(|| Self::wrong("an object"))
                }
                Some(_) | None => Err(Self::wrong("an object")),
            }
        }))
    }
}

const ALL: &str = "all";

const CLEAR_THINKING: &str = "clear_thinking_20251015";

impl ContextManagement {
    pub(super) fn apply(self, messages: &mut [Message]) -> Result<(), InvalidRequest> {
        const AT: &str = "context_management";
        for edit in self.edits.get(AT)?.unwrap_or_default().each(&join(AT, "edits")) {
            let (at, edit) = edit?;
            let kind = edit.r#type.get(&at)?;
            if !kind.starts_with("clear_thinking") {
                let what = format!("A change of type {}", quoted(&kind));
                let instead = "shorten the conversation at the client";
                return Err(InvalidRequest::unsupported_but(join(&at, "type"), &what, instead));
            }
            let n_kept = match edit.keep.get(&at)? {
                Some(KeptThinking::All) => continue,
                Some(KeptThinking::OfLast(n_turns)) => n_turns,
                None => 1,
            };
            let thoughts = messages.iter_mut().rev().filter(|message| message.reasoning_content.is_some());
            thoughts.skip(n_kept).for_each(|message| message.reasoning_content = None);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::message_role::MessageRole;
    use crate::request::read::read;

    /// Returns the thoughts that stay of three.
    fn kept(keep: Value) -> Result<Vec<String>, String> {
        let thought = |n: u32| Message {
            reasoning_content: Some(n.to_string()),
            ..Message::new(MessageRole::Assistant, "x".to_owned())
        };
        let mut messages = [thought(1), thought(2), Message::new(MessageRole::User, "y".to_owned()), thought(3)];
        let body = json!({ "edits": [{ "type": CLEAR_THINKING, "keep": keep }] });
        let body = body.to_string().replace("2.5", "2.00000000000000000000000001");
        let body: ContextManagement = read(body.as_bytes()).unwrap();
        body.apply(&mut messages).map_err(|error| error.param.unwrap_or_default())?;
        Ok(messages.into_iter().filter_map(|message| message.reasoning_content).collect())
    }

    #[test]
    fn earlier_thinking_is_left_out_as_it_is_asked_for() {
        assert_eq!(kept(json!("all")).unwrap(), ["1", "2", "3"]);
        assert_eq!(kept(json!({ "type": "all" })).unwrap(), ["1", "2", "3"]);
        assert_eq!(kept(json!({ "type": "thinking_turns", "value": 2 })).unwrap(), ["2", "3"]);
        assert_eq!(kept(json!({ "type": "thinking_turns", "value": 2.0 })).unwrap(), ["2", "3"]);
        assert_eq!(kept(json!({ "type": "thinking_turns", "value": 2.5 })).unwrap(), ["2", "3"], "with more digits");
        assert_eq!(kept(json!(null)).unwrap(), ["3"]);
        for wrong in [json!(3), json!("some"), json!({ "type": "thinking_turns", "value": 0 })] {
            assert_eq!(kept(wrong), Err("context_management.edits[0].keep".to_owned()));
        }
    }
}

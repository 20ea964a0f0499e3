//! `context_management`: what is left out of a conversation before the model reads it.

use serde_json::Value;

use crate::generate::Message;
use crate::request::InvalidRequest;
use crate::request::field::{Field, Items, Required, join, object};
use crate::request::invalid::quoted;

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
        #[schemars(extend("enum" = ["all", null]))]
        keep: Field<Value>,
    }
}

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
            if let Some(n_kept) = kept_turns(edit.keep.get(&at)?, &join(&at, "keep"))? {
                let thoughts = messages.iter_mut().rev().filter(|message| message.reasoning_content.is_some());
                thoughts.skip(n_kept).for_each(|message| message.reasoning_content = None);
            }
        }
        Ok(())
    }
}

/// Returns the number of turns whose thinking stays; `None`: all.
fn kept_turns(keep: Option<Value>, at: &str) -> Result<Option<usize>, InvalidRequest> {
    let wrong = || InvalidRequest::at(at, "must be all, or {\"type\": \"thinking_turns\", \"value\": N}");
    let Some(keep) = keep else { return Ok(Some(1)) };
    let kind = keep.get("type").unwrap_or(&keep).as_str().ok_or_else(wrong)?;
    match kind {
        "all" => Ok(None),
        "thinking_turns" => {
            let n_turns = keep.get("value").and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
            n_turns.filter(|n| *n > 0).map(Some).ok_or_else(wrong)
        }
        _ => Err(wrong()),
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
        let body: ContextManagement = read(body.to_string().as_bytes()).unwrap();
        body.apply(&mut messages).map_err(|error| error.param.unwrap_or_default())?;
        Ok(messages.into_iter().filter_map(|message| message.reasoning_content).collect())
    }

    #[test]
    fn earlier_thinking_is_left_out_as_it_is_asked_for() {
        assert_eq!(kept(json!("all")).unwrap(), ["1", "2", "3"]);
        assert_eq!(kept(json!({ "type": "all" })).unwrap(), ["1", "2", "3"]);
        assert_eq!(kept(json!({ "type": "thinking_turns", "value": 2 })).unwrap(), ["2", "3"]);
        assert_eq!(kept(json!(null)).unwrap(), ["3"]);
        for wrong in [json!(3), json!("some"), json!({ "type": "thinking_turns", "value": 0 })] {
            assert_eq!(kept(wrong), Err("context_management.edits[0].keep".to_owned()));
        }
    }
}

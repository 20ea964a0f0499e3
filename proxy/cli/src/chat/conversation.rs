//! The messages so far, which every request repeats.

use serde_json::{Value, json};

/// A conversation. The endpoint refuses one that is longer than the model's context.
#[derive(Debug, Default)]
pub(super) struct ChatHistory {
    pub(super) system: Option<String>,
    /// A message of the person and a reply, in turn.
    turns: Vec<(String, String)>,
}

impl ChatHistory {
    pub(super) fn new(system: Option<String>) -> ChatHistory {
        ChatHistory { system, turns: Vec::new() }
    }

    /// The request for a reply to `message`.
    pub(super) fn request(&self, model: &str, message: &str) -> Value {
        let said = |role: &str, content: &str| json!({ "role": role, "content": content });
        let system = self.system.iter().map(|text| said("system", text));
        let turns = self.turns.iter().flat_map(|(asked, reply)| [said("user", asked), said("assistant", reply)]);
        let messages: Vec<Value> = system.chain(turns).chain([said("user", message)]).collect();
        json!({ "model": model, "messages": messages, "stream": true })
    }

    /// Keeps a message and what came of its reply. Without any text it is as if it had not been sent.
    pub(super) fn keep(&mut self, message: String, reply: String) {
        if !reply.is_empty() {
            self.turns.push((message, reply));
        }
    }

    pub(super) fn clear(&mut self) {
        self.turns.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_every_turn_and_none_that_failed() {
        let mut conversation = ChatHistory::new(Some("be brief".into()));
        conversation.keep("a".into(), "b".into());
        conversation.keep("failed".into(), String::new());
        let request = conversation.request("m", "c");
        let messages = request["messages"].as_array().unwrap();
        let contents: Vec<&str> = messages.iter().map(|message| message["content"].as_str().unwrap()).collect();
        assert_eq!(contents, ["be brief", "a", "b", "c"]);
        conversation.clear();
        assert_eq!(conversation.request("m", "d")["messages"].as_array().unwrap().len(), 2);
    }
}

//! Joins the messages of one turn, for templates that reject conversations whose roles do not alternate.
//!
//! Agents send several messages of the user in a row: their own context and the question, or text after the results of
//! tools. Most templates render each as it is, so a conversation is joined only after the template has rejected it.

use baton_schemas::MessageRole;
use baton_schemas::generate::{Conversation, Message};

/// The conversation with the messages of each turn joined. `None` if that changes nothing.
pub(super) fn joined(conversation: &Conversation) -> Option<Conversation> {
    let mut messages: Vec<Message> = Vec::with_capacity(conversation.messages.len());
    for message in &conversation.messages {
        match messages.last_mut() {
            Some(last) if is_same_turn(last, message) => join(last, message),
            _ => messages.push(message.clone()),
        }
    }
    (messages.len() < conversation.messages.len()).then(|| Conversation { messages, ..conversation.clone() })
}

fn is_same_turn(last: &Message, next: &Message) -> bool {
    match (last.role, next.role) {
        (MessageRole::User, MessageRole::User) => true,
        // These templates take an assistant's message after a result.
        (MessageRole::Tool, MessageRole::User) => true,
        (MessageRole::Assistant, MessageRole::Assistant) => last.tool_calls.is_empty(),
        _ => false,
    }
}

fn join(last: &mut Message, next: &Message) {
    last.append(&next.content);
    if let Some(reasoning) = &next.reasoning_content {
        let all = last.reasoning_content.get_or_insert_default();
        if !all.is_empty() {
            all.push_str("\n\n");
        }
        all.push_str(reasoning);
    }
    last.tool_calls.extend(next.tool_calls.iter().cloned());
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn messages_of_one_turn_become_one() {
        let conversation = |messages| serde_json::from_value::<Conversation>(json!({ "messages": messages })).unwrap();
        let several = conversation(json!([
            { "role": "user", "content": "context" },
            { "role": "user", "content": "question" },
            { "role": "assistant", "content": "I look." },
            { "role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [{ "id": "a" }] },
            { "role": "tool", "content": "4", "tool_call_id": "a" },
            { "role": "user", "content": "and now?" },
            { "role": "assistant", "content": "", "tool_calls": [{ "id": "b" }] },
            { "role": "assistant", "content": "Done." },
        ]));
        let one_each = conversation(json!([
            { "role": "user", "content": "context\n\nquestion" },
            { "role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [{ "id": "a" }] },
            { "role": "tool", "content": "4\n\nand now?", "tool_call_id": "a" },
            { "role": "assistant", "content": "", "tool_calls": [{ "id": "b" }] },
            { "role": "assistant", "content": "Done." },
        ]));
        assert_eq!(joined(&several), Some(one_each.clone()));
        assert_eq!(joined(&one_each), None);
    }
}

//! For templates that render one call in each message of the assistant: they refuse a message with several, or leave out
//! all but the first.

use baton_schemas::MessageRole;
use baton_schemas::generate::{Conversation, Message};
use serde_json::Value;

/// Makes a message with several calls several messages, each followed by its result. Results without an id, or with an
/// unknown one, answer the calls in order.
pub(super) fn split_calls(conversation: &mut Conversation) {
    let mut rest = std::mem::take(&mut conversation.messages).into_iter().peekable();
    while let Some(mut message) = rest.next() {
        if message.tool_calls.len() < 2 {
            conversation.messages.push(message);
            continue;
        }
        let calls = std::mem::take(&mut message.tool_calls);
        let mut results = Vec::new();
        while let Some(result) = rest.next_if(|next| next.role == MessageRole::Tool) {
            results.push(result);
        }
        let mut answers: Vec<Vec<Message>> = vec![Vec::new(); calls.len()];
        for result in results {
            let id = result.tool_call_id.as_deref();
            let named = id.and_then(|id| calls.iter().position(|call| id_of(call) == Some(id)));
            let unanswered = || answers.iter().position(Vec::is_empty);
            let at = named.or_else(unanswered).unwrap_or(calls.len() - 1);
            answers[at].push(result);
        }
        for (call, answers) in calls.into_iter().zip(answers) {
            // The text and the reasoning stand before the first call.
            let mut one = std::mem::take(&mut message);
            one.role = MessageRole::Assistant;
            one.tool_calls = vec![call];
            conversation.messages.push(one);
            conversation.messages.extend(answers);
        }
    }
}

fn id_of(call: &Value) -> Option<&str> {
    call.get("id").and_then(Value::as_str)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_call_is_followed_by_its_result() {
        let messages = json!([
            { "role": "user", "content": "go" },
            { "role": "assistant", "content": "I look.", "tool_calls": [{ "id": "a" }, { "id": "b" }, {}] },
            { "role": "tool", "content": "of b", "tool_call_id": "b" },
            { "role": "tool", "content": "of a", "tool_call_id": "a" },
            { "role": "tool", "content": "of the third" },
            { "role": "user", "content": "so?" },
        ]);
        let mut conversation = serde_json::from_value(json!({ "messages": messages })).unwrap();
        split_calls(&mut conversation);
        let shown: Vec<String> = conversation.messages.iter().map(show).collect();
        let expected = [
            "user:go",
            "assistant:I look.[a]",
            "tool:of a",
            "assistant:[b]",
            "tool:of b",
            "assistant:[]",
            "tool:of the third",
            "user:so?",
        ];
        assert_eq!(shown, expected);
    }

    fn show(message: &Message) -> String {
        let calls = message.tool_calls.iter().map(|call| format!("[{}]", id_of(call).unwrap_or_default()));
        format!("{}:{}{}", message.role.as_str(), message.content, calls.collect::<String>())
    }
}

//! The format for models whose template has no tools, or an unknown form of calls: the system message describes the tools,
//! and calls have Hermes's form, the most common one.

use std::sync::Arc;

use baton_schemas::MessageRole;
use baton_schemas::constraint::Rule;
use baton_schemas::generate::{Conversation, Message};
use baton_schemas::tools::{Tool, ToolUse};
use baton_schemas::written_number::{AsWritten, arguments_text};
use serde_json::Value;

use super::hermes::Hermes;
use super::{CallParser, Calls, ToolFormat};

#[derive(Debug)]
pub(super) struct Generic;

impl ToolFormat for Generic {
    fn name(&self) -> &'static str {
        "generic"
    }

    fn is_of(&self, _template: &str) -> bool {
        true
    }

    fn present(&self, conversation: &mut Conversation, tools: &ToolUse, template: &str) {
        // Without tools to describe, a template that has a form for earlier calls uses it.
        if tools.offered().is_empty() && template.contains("tool_calls") {
            return;
        }
        let messages = std::mem::take(&mut conversation.messages);
        conversation.messages = spelled_out(messages);
        if !tools.offered().is_empty() {
            instruct(&mut conversation.messages, &instructions(tools));
        }
    }

    fn calls(&self, calls: &Calls<'_>) -> Rule {
        Hermes.calls(calls)
    }

    fn text_or_calls(&self, calls: &Calls<'_>, text: Option<Rule>) -> Rule {
        Hermes.text_or_calls(calls, text)
    }

    fn markers(&self) -> &'static [&'static str] {
        Hermes.markers()
    }

    fn parser(&self, tools: &Arc<[Tool]>) -> Box<dyn CallParser> {
        Hermes.parser(tools)
    }
}

fn instructions(tools: &ToolUse) -> String {
    let functions = tools.listed().map(|tool| AsWritten(&tool.definition()["function"]).to_string());
    let functions: Vec<String> = functions.collect();
    format!(
        "You can call these functions:\n{}\n\nTo call one, write\n<tool_call>\n\
         {{\"name\": \"its name\", \"arguments\": {{\"argument\": \"value\"}}}}\n</tool_call>\n\
         and nothing after it. Where no function helps, answer in words.",
        functions.join("\n")
    )
}

/// Appends the instructions to the system message. Where a template refuses one, the engine finds another place for it.
pub(super) fn instruct(messages: &mut Vec<Message>, instructions: &str) {
    match messages.first_mut() {
        Some(first) if first.role == MessageRole::System => first.append(instructions),
        _ => messages.insert(0, Message::new(MessageRole::System, instructions.to_owned())),
    }
}

/// Writes calls and results as text. Results become a user message, because templates require that roles alternate.
fn spelled_out(messages: Vec<Message>) -> Vec<Message> {
    let mut spelled: Vec<Message> = Vec::with_capacity(messages.len());
    let mut after_result = false;
    for mut message in messages {
        let is_result = message.role == MessageRole::Tool;
        if is_result {
            let content = format!("<tool_response>\n{}\n</tool_response>", message.content);
            message = Message::new(MessageRole::User, content);
        }
        let calls = std::mem::take(&mut message.tool_calls);
        for call in &calls {
            message.content = joined_line(&message.content, &spelled_call(call));
        }
        match spelled.last_mut() {
            Some(last) if after_result && message.role == MessageRole::User => {
                last.content = joined_line(&last.content, &message.content);
            }
            _ => spelled.push(message),
        }
        after_result = is_result;
    }
    spelled
}

fn joined_line(first: &str, second: &str) -> String {
    if first.is_empty() { second.to_owned() } else { format!("{first}\n{second}") }
}

fn spelled_call(call: &Value) -> String {
    let function = &call["function"];
    format!("<tool_call>\n{{\"name\": {}, \"arguments\": {}}}\n</tool_call>", function["name"], arguments_text(call))
}

#[cfg(test)]
mod tests {
    use baton_schemas::tools::{Described, Strictness};
    use serde_json::json;

    use super::*;

    fn message(role: &str, content: &str) -> Message {
        Message::new(MessageRole::of(role).unwrap(), content.into())
    }

    fn presented(messages: Vec<Message>, tools: &ToolUse, template: &str) -> Vec<(&'static str, String)> {
        let mut conversation = Conversation { messages, ..Conversation::default() };
        Generic.present(&mut conversation, tools, template);
        assert!(conversation.tools.is_empty());
        conversation.messages.into_iter().map(|message| (message.role.as_str(), message.content)).collect()
    }

    fn one_tool() -> ToolUse {
        let parameters = Tool::no_parameters();
        let tool = Tool {
            name: "f".into(),
            description: None,
            parameters,
            strict: Strictness::Loose,
            held: None,
            unheld: Default::default(),
            described: Described::InList,
        };
        ToolUse { tools: [tool].into(), ..ToolUse::default() }
    }

    #[test]
    fn the_system_message_lists_the_tools() {
        let messages = presented(vec![message("system", "Be brief."), message("user", "hi")], &one_tool(), "");
        assert!(
            messages[0].1.starts_with("Be brief.\n\nYou can call these functions:\n{\"name\":\"f\""),
            "{}",
            messages[0].1
        );
        let messages = presented(vec![message("user", "hi")], &one_tool(), "");
        assert_eq!((messages[0].0, messages[1].1.as_str()), ("system", "hi"));
    }

    #[test]
    fn earlier_calls_and_results_are_spelled_out() {
        let call = json!({ "id": "c", "type": "function", "function": { "name": "f", "arguments": { "a": 1 } } });
        let calling = Message { tool_calls: vec![call], ..message("assistant", "") };
        let history = || {
            vec![
                message("user", "hi"),
                calling.clone(),
                message("tool", "4"),
                message("tool", "5"),
                message("user", "so?"),
            ]
        };
        let messages = presented(history(), &ToolUse::default(), "{{ messages }}");
        let expected = [
            ("user", "hi"),
            ("assistant", "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":1}}\n</tool_call>"),
            ("user", "<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response>\nso?"),
        ];
        assert_eq!(messages, expected.map(|(role, content)| (role, content.to_owned())));
        // A template that knows calls keeps them.
        assert_eq!(presented(history(), &ToolUse::default(), "message.tool_calls")[2].0, "tool");
    }
}

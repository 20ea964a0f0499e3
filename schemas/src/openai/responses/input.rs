//! `input` and `instructions` → a conversation's messages.

use serde_json::{Map, Value, json};

use crate::generate::Message;
use crate::openai::messages;
use crate::request::fields::{Fields, wrong_type};
use crate::request::images::Images;
use crate::request::{InvalidRequest, history};

/// Reads the history. `instructions` come before everything else, as the system's.
pub(super) fn parse(root: Fields<'_>, images: &mut Images) -> Result<Vec<Message>, InvalidRequest> {
    let mut history = History { messages: Vec::new(), reasoning: None, has_skipped: false, images };
    if let Some(instructions) = root.string("instructions")?.filter(|text| !text.is_empty()) {
        history.push("system", instructions.to_owned());
    }
    match root.get("input") {
        None => return Err(InvalidRequest::at("input", "is missing")),
        Some(Value::String(text)) => history.push("user", text.clone()),
        Some(Value::Array(items)) if items.is_empty() => {
            return Err(InvalidRequest::at("input", "must not be empty"));
        }
        Some(Value::Array(items)) => {
            for (idx, value) in items.iter().enumerate() {
                let path = format!("input[{idx}]");
                history.add(Fields::at(value, &path)?)?;
            }
        }
        Some(other) => return Err(wrong_type("input", "a string or an array of items", other)),
    }
    if history.messages.is_empty() && history.has_skipped {
        return Err(InvalidRequest::at("input", "holds nothing that a model could read"));
    }
    Ok(history::with_one_system_message(history.messages))
}

/// Messages so far. What an assistant says in one turn comes as several items and is one message here.
struct History<'i> {
    messages: Vec<Message>,
    /// Reasoning that belongs to the assistant's next item.
    reasoning: Option<String>,
    has_skipped: bool,
    /// The request's images.
    images: &'i mut Images,
}

impl History<'_> {
    fn push(&mut self, role: &str, content: String) {
        self.messages.push(Message { role: role.to_owned(), content, ..Message::default() });
    }

    fn add(&mut self, item: Fields<'_>) -> Result<(), InvalidRequest> {
        match item.string("type")? {
            None | Some("message") => self.message(item),
            Some("function_call") => self.function_call(item),
            Some("function_call_output") => self.function_call_output(item),
            Some("reasoning") => self.reason(item),
            Some(kind) if is_of_skipped_tool(kind) => {
                self.has_skipped = true;
                Ok(())
            }
            Some("item_reference") => {
                Err(InvalidRequest::at(item.name("type"), "nothing is stored here that an item could refer to"))
            }
            Some(other) => {
                let other: String = other.chars().take(40).collect();
                let what = format!("An item of type \"{}\"", other.escape_debug());
                Err(InvalidRequest::unsupported(item.name("type"), what))
            }
        }
    }

    fn message(&mut self, item: Fields<'_>) -> Result<(), InvalidRequest> {
        let role = match item.string("role")? {
            Some("system" | "developer") => "system",
            Some("user") => "user",
            Some("assistant") => "assistant",
            _ => return Err(InvalidRequest::at(item.name("role"), "must be system, developer, user or assistant")),
        };
        if item.get("content").is_none() {
            return Err(InvalidRequest::at(item.name("content"), "is missing"));
        }
        let content = messages::content(item, self.images)?;
        if role == "assistant" {
            let message = self.turn();
            // A turn has one text; a second one in a row is a turn of its own.
            if message.content.is_empty() && message.tool_calls.is_empty() {
                message.content = content;
                return Ok(());
            }
        }
        self.push(role, content);
        Ok(())
    }

    fn function_call(&mut self, item: Fields<'_>) -> Result<(), InvalidRequest> {
        let name = required(item, "name")?;
        let call_id = required(item, "call_id")?;
        let arguments = messages::arguments(item)?;
        let mut call = Map::new();
        call.insert("id".to_owned(), call_id.into());
        call.insert("type".to_owned(), "function".into());
        call.insert("function".to_owned(), json!({ "name": name, "arguments": arguments }));
        self.turn().tool_calls.push(Value::Object(call));
        Ok(())
    }

    fn function_call_output(&mut self, item: Fields<'_>) -> Result<(), InvalidRequest> {
        let call_id = required(item, "call_id")?;
        let output = messages::content_of(item, "output", self.images)?;
        let tool_call_id = Some(call_id.to_owned());
        self.messages.push(Message { role: "tool".into(), content: output, tool_call_id, ..Message::default() });
        Ok(())
    }

    /// The reasoning itself, if it is readable: summaries are for people, and an encrypted one was another server's.
    fn reason(&mut self, item: Fields<'_>) -> Result<(), InvalidRequest> {
        let parts = item.array("content")?.unwrap_or_default().iter();
        let texts: Vec<&str> = parts.filter_map(|part| part.get("text")?.as_str()).collect();
        if !texts.is_empty() {
            self.reasoning = Some(texts.join("\n"));
        }
        Ok(())
    }

    /// The assistant's current turn: the last message if it is the assistant's, else a new one.
    fn turn(&mut self) -> &mut Message {
        if self.reasoning.is_some() || self.messages.last().is_none_or(|last| last.role != "assistant") {
            self.push("assistant", String::new());
        }
        let at = self.messages.len() - 1;
        let message = &mut self.messages[at];
        if let Some(reasoning) = self.reasoning.take() {
            message.reasoning_content = Some(reasoning);
        }
        message
    }
}

/// Whether items of this type are calls of tools that are skipped here, and their results: of those that run on
/// OpenAI's servers, of a client's shell, and of tools without a schema.
fn is_of_skipped_tool(kind: &str) -> bool {
    kind.ends_with("_call") || kind.ends_with("_call_output") || kind.starts_with("mcp_")
}

fn required<'a>(item: Fields<'a>, field: &str) -> Result<&'a str, InvalidRequest> {
    let value = item.string(field)?.filter(|value| !value.is_empty());
    value.ok_or_else(|| InvalidRequest::at(item.name(field), "is missing"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(body: &Value) -> Result<Vec<Message>, InvalidRequest> {
        parse(Fields::root(body.as_object().unwrap()), &mut Images::default())
    }

    fn check(body: Value, expected: Value) {
        assert_eq!(serde_json::to_value(parsed(&body).unwrap()).unwrap(), expected, "{body}");
    }

    fn refused(input: Value, param: &str) {
        let body = json!({ "input": input });
        assert_eq!(parsed(&body).unwrap_err().param.as_deref(), Some(param), "{body}");
    }

    #[test]
    fn texts_and_messages_become_what_templates_read() {
        let hi = json!([{"role": "user", "content": "hi"}]);
        check(json!({"input": "hi"}), hi.clone());
        check(json!({"input": [{"role": "user", "content": "hi"}], "instructions": null}), hi.clone());
        check(
            json!({"instructions": "be brief", "input": [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "and kind"}]},
                {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
                {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
                    "content": [{"type": "output_text", "text": "c", "annotations": []}]},
                {"role": "user", "content": "d"}]}),
            json!([{"role": "system", "content": "be brief\n\nand kind"}, {"role": "user", "content": "a\nb"},
                {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]),
        );
    }

    #[test]
    fn the_items_of_a_turn_are_one_message() {
        let call = |id: &str| json!({"type": "function_call", "call_id": id, "name": "f", "arguments": "{\"a\":1}"});
        let becomes =
            |id: &str| json!({"id": id, "type": "function", "function": {"name": "f", "arguments": {"a": 1}}});
        check(
            json!({"input": [
                {"role": "user", "content": "hi"},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"role": "assistant", "content": "let me see"}, call("c1"), call("c2"),
                {"type": "function_call_output", "call_id": "c1", "output": "4"},
                {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "5"}]},
                {"type": "reasoning", "summary": [], "encrypted_content": "xxx"},
                {"role": "assistant", "content": "nine"}]}),
            json!([{"role": "user", "content": "hi"},
                {"role": "assistant", "content": "let me see", "reasoning_content": "hm",
                    "tool_calls": [becomes("c1"), becomes("c2")]},
                {"role": "tool", "content": "4", "tool_call_id": "c1"},
                {"role": "tool", "content": "5", "tool_call_id": "c2"},
                {"role": "assistant", "content": "nine"}]),
        );
    }

    #[test]
    fn items_of_skipped_tools_are_skipped() {
        check(
            json!({"input": [
                {"role": "user", "content": "hi"},
                {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
                {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x"},
                {"type": "custom_tool_call_output", "call_id": "c", "output": "y"},
                {"type": "local_shell_call", "call_id": "d", "action": {}},
                {"type": "local_shell_call_output", "call_id": "d", "output": "z"},
                {"type": "mcp_list_tools", "server_label": "s", "tools": []},
                {"role": "assistant", "content": "hello"}]}),
            json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]),
        );
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        refused(json!(null), "input");
        refused(json!(7), "input");
        refused(json!([]), "input");
        refused(json!(["hi"]), "input[0]");
        refused(json!([{"role": "robot", "content": "x"}]), "input[0].role");
        refused(json!([{"role": "user"}]), "input[0].content");
        refused(json!([{"role": "user", "content": [{"type": "input_image"}]}]), "input[0].content[0].image_url");
        refused(json!([{"type": "item_reference", "id": "msg_1"}]), "input[0].type");
        refused(json!([{"type": "robot_dance"}]), "input[0].type");
        refused(json!([{"type": "web_search_call"}]), "input");
        refused(json!([{"type": "function_call", "name": "f"}]), "input[0].call_id");
        refused(json!([{"type": "function_call_output", "output": "x"}]), "input[0].call_id");
    }
}

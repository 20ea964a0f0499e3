//! A client's `messages` → a [`Conversation`](crate::generate::Conversation)'s messages, in the one form that chat
//! templates read.

use serde_json::{Map, Value, json};

use crate::generate::Message;
use crate::request::fields::Fields;
use crate::request::images::Images;
use crate::request::{InvalidRequest, history};

/// Reads the history; it may be empty or missing.
pub(super) fn parse(root: Fields<'_>, images: &mut Images) -> Result<Vec<Message>, InvalidRequest> {
    let messages = root.array("messages")?.unwrap_or_default().iter().enumerate().map(|(idx, value)| {
        let path = format!("messages[{idx}]");
        message(Fields::at(value, &path)?, images)
    });
    Ok(history::with_one_system_message(messages.collect::<Result<_, _>>()?))
}

fn message(fields: Fields<'_>, images: &mut Images) -> Result<Message, InvalidRequest> {
    let role = match fields.string("role")? {
        Some(role @ ("system" | "user" | "assistant" | "tool")) => role,
        _ => return Err(InvalidRequest::at(fields.name("role"), "must be system, user, assistant or tool")),
    };
    // Before the text, as Ollama has them.
    let marks = images.add_list(fields, "images")?;
    let owned = |name: &str| Ok(fields.string(name)?.map(str::to_owned));
    Ok(Message {
        role: role.to_owned(),
        content: marks + fields.string("content")?.unwrap_or_default(),
        reasoning_content: owned("thinking")?.filter(|text| !text.is_empty()),
        tool_calls: tool_calls(fields)?,
        tool_call_id: owned("tool_call_id")?,
        name: owned("tool_name")?,
    })
}

/// The calls an assistant made earlier. Arguments are objects here; OpenAI's strings are not.
fn tool_calls(fields: Fields<'_>) -> Result<Vec<Value>, InvalidRequest> {
    let path = fields.name("tool_calls");
    let calls = fields.array("tool_calls")?.unwrap_or_default();
    calls.iter().enumerate().map(|(idx, value)| tool_call(value, &format!("{path}[{idx}]"))).collect()
}

fn tool_call(value: &Value, path: &str) -> Result<Value, InvalidRequest> {
    let call = Fields::at(value, path)?;
    let function_path = call.name("function");
    let function = call.get("function").ok_or_else(|| InvalidRequest::at(&*function_path, "is missing"))?;
    let function = Fields::at(function, &function_path)?;
    let name = function.string("name")?.filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| InvalidRequest::at(function.name("name"), "is missing"))?;
    let arguments = function.object("arguments")?.cloned().unwrap_or_default();
    let mut tool_call = Map::new();
    if let Some(id) = call.string("id")? {
        tool_call.insert("id".to_owned(), id.into());
    }
    tool_call.insert("type".to_owned(), "function".into());
    tool_call.insert("function".to_owned(), json!({ "name": name, "arguments": arguments }));
    Ok(Value::Object(tool_call))
}

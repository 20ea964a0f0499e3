//! A client's `messages` → a [`Conversation`](crate::generate::Conversation)'s messages, in the one form that chat
//! templates read.

use serde_json::{Map, Value, json};

use super::functions;
use crate::generate::Message;
use crate::request::fields::{Fields, wrong_type};
use crate::request::images::Images;
use crate::request::{InvalidRequest, history};

/// Reads the history.
pub(super) fn parse(root: Fields<'_>, images: &mut Images) -> Result<Vec<Message>, InvalidRequest> {
    let messages = root
        .array("messages")?
        .filter(|messages| !messages.is_empty())
        .ok_or_else(|| InvalidRequest::at("messages", "must be an array of at least one message"))?;

    let messages = messages.iter().enumerate().map(|(idx, value)| {
        let path = format!("messages[{idx}]");
        message(Fields::at(value, &path)?, images)
    });
    Ok(history::with_one_system_message(messages.collect::<Result<_, _>>()?))
}

fn message(fields: Fields<'_>, images: &mut Images) -> Result<Message, InvalidRequest> {
    let role = match fields.string("role")? {
        // OpenAI's newer name of the same thing; no template knows it.
        Some("system" | "developer") => "system",
        Some("user") => "user",
        Some("assistant") => "assistant",
        // What a tool was called before.
        Some("tool" | "function") => "tool",
        Some(other) => {
            let other = other.chars().take(40).collect::<String>();
            let problem =
                format!("must be system, developer, user, assistant or tool, but is \"{}\"", other.escape_debug());
            return Err(InvalidRequest::at(fields.name("role"), problem));
        }
        None => return Err(InvalidRequest::at(fields.name("role"), "is missing")),
    };
    let mut tool_calls = if role == "assistant" { tool_calls(fields)? } else { Vec::new() };
    if role == "assistant" {
        tool_calls.extend(functions::earlier_call(fields)?);
    }
    // Two names are in use: DeepSeek's, which llama-server and vLLM took, and OpenRouter's.
    let (reasoning, elsewhere) = (fields.string("reasoning_content")?, fields.string("reasoning")?);
    let reasoning = reasoning.or(elsewhere);
    let may_be_missing = role == "assistant" && (!tool_calls.is_empty() || reasoning.is_some());
    if !fields.has_key("content") && !may_be_missing {
        return Err(InvalidRequest::at(fields.name("content"), "is missing"));
    }
    Ok(Message {
        role: role.to_owned(),
        content: content(fields, images)?,
        reasoning_content: reasoning.map(str::to_owned),
        tool_calls,
        tool_call_id: fields.string("tool_call_id")?.map(str::to_owned),
        name: fields.string("name")?.map(str::to_owned),
    })
}

/// A message's `content`: a string, null, or parts. Text parts are joined by newlines, as llama-server does; images stand
/// between them as marks.
pub(super) fn content(fields: Fields<'_>, images: &mut Images) -> Result<String, InvalidRequest> {
    content_of(fields, "content", images)
}

/// The same under another name.
pub(super) fn content_of(fields: Fields<'_>, name: &str, images: &mut Images) -> Result<String, InvalidRequest> {
    match fields.get(name) {
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let path = fields.name(name);
            let (mut content, mut after_text) = (String::new(), false);
            for (idx, value) in parts.iter().enumerate() {
                let path = format!("{path}[{idx}]");
                let part = part(value, &path, images)?;
                let is_text = matches!(part, Part::Text(_));
                if is_text && std::mem::replace(&mut after_text, is_text) {
                    content.push('\n');
                }
                after_text = is_text;
                content.push_str(match &part {
                    Part::Text(text) => text,
                    Part::Image(mark) => mark,
                });
            }
            Ok(content)
        }
        Some(other) => Err(wrong_type(&fields.name(name), "a string, null or an array of parts", other)),
    }
}

/// What a part puts into the text.
enum Part<'a> {
    Text(&'a str),
    /// The mark of an image.
    Image(String),
}

fn part<'a>(value: &'a Value, path: &'a str, images: &mut Images) -> Result<Part<'a>, InvalidRequest> {
    let part = Fields::at(value, path)?;
    let text_field = match part.string("type")? {
        Some("text" | "input_text" | "output_text") => "text",
        Some("refusal") => "refusal",
        Some("image_url" | "input_image") => return Ok(Part::Image(image(part, images)?)),
        // Here audio and files enter, once an engine can take them.
        Some(other) => {
            let other: String = other.chars().take(40).collect();
            return Err(InvalidRequest::unsupported(
                path,
                format_args!("Content of type \"{}\"", other.escape_debug()),
            ));
        }
        None => return Err(InvalidRequest::at(part.name("type"), "is missing")),
    };
    let text = part.string(text_field)?;
    text.map(Part::Text).ok_or_else(|| InvalidRequest::at(part.name(text_field), "is missing"))
}

/// An image, of which chats have the URI in an object, and responses have it plain.
fn image(part: Fields<'_>, images: &mut Images) -> Result<String, InvalidRequest> {
    let path = part.name("image_url");
    match part.get("image_url") {
        Some(Value::String(uri)) => images.add_uri(uri, path),
        Some(value @ Value::Object(_)) => {
            let object = Fields::at(value, &path)?;
            let path = object.name("url");
            let uri = object.string("url")?.ok_or_else(|| InvalidRequest::at(&*path, "is missing"))?;
            images.add_uri(uri, path)
        }
        Some(other) => Err(wrong_type(&path, "an object with a URL, or a URL", other)),
        None if part.get("file_id").is_some() => {
            Err(InvalidRequest::at(part.name("file_id"), "nothing is stored here: send the image itself as a data URI"))
        }
        None => Err(InvalidRequest::at(path, "is missing")),
    }
}

/// The calls an assistant made earlier, with their arguments as objects.
fn tool_calls(fields: Fields<'_>) -> Result<Vec<Value>, InvalidRequest> {
    let path = fields.name("tool_calls");
    let calls = fields.array("tool_calls")?.unwrap_or_default();
    calls.iter().enumerate().map(|(idx, value)| tool_call(value, &format!("{path}[{idx}]"))).collect()
}

fn tool_call(value: &Value, path: &str) -> Result<Value, InvalidRequest> {
    let call = Fields::at(value, path)?;
    if !matches!(call.string("type")?, None | Some("function")) {
        return Err(InvalidRequest::unsupported(call.name("type"), "A tool call other than 'function'"));
    }
    let function_path = call.name("function");
    let function = call.get("function").ok_or_else(|| InvalidRequest::at(&*function_path, "is missing"))?;
    let function = Fields::at(function, &function_path)?;
    let name = function
        .string("name")?
        .filter(|name| !name.is_empty())
        .ok_or_else(|| InvalidRequest::at(function.name("name"), "is missing"))?;
    let mut tool_call = Map::new();
    if let Some(id) = call.string("id")? {
        tool_call.insert("id".to_owned(), id.into());
    }
    tool_call.insert("type".to_owned(), "function".into());
    tool_call.insert("function".to_owned(), json!({ "name": name, "arguments": arguments(function)? }));
    Ok(Value::Object(tool_call))
}

/// Arguments as an object. What a model once wrote and nobody can parse stays a string: refusing it would end the
/// conversation for good, since the client replays its history with every request.
pub(super) fn arguments(function: Fields<'_>) -> Result<Value, InvalidRequest> {
    match function.get("arguments") {
        None => Ok(Value::Object(Map::new())),
        Some(Value::Object(object)) => Ok(Value::Object(object.clone())),
        Some(Value::String(text)) if text.trim().is_empty() => Ok(Value::Object(Map::new())),
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(object @ Value::Object(_)) => Ok(object),
            _ => Ok(Value::String(text.clone())),
        },
        Some(other) => Err(wrong_type(&function.name("arguments"), "a string", other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(messages: &Value) -> Result<Vec<Message>, InvalidRequest> {
        parse(Fields::root(json!({ "messages": messages }).as_object().unwrap()), &mut Images::default())
    }

    /// `expected` is what the template sees.
    fn check(messages: Value, expected: Value) {
        assert_eq!(serde_json::to_value(parsed(&messages).unwrap()).unwrap(), expected, "{messages}");
    }

    fn refused(messages: Value, param: &str) {
        assert_eq!(parsed(&messages).unwrap_err().param.as_deref(), Some(param), "{messages}");
    }

    #[test]
    fn history_takes_the_form_templates_read() {
        check(json!([{"role": "user", "content": "hi"}]), json!([{"role": "user", "content": "hi"}]));
        check(
            json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
            json!([{"role": "user", "content": "a\nb"}]),
        );
        check(
            json!([
                {"role": "developer", "content": "one"},
                {"role": "user", "content": "hi", "name": "ann", "odd": 1},
                {"role": "system", "content": [{"type": "text", "text": "two"}]},
                {"role": "system", "content": ""},
            ]),
            json!([{"role": "system", "content": "one\n\ntwo"}, {"role": "user", "content": "hi", "name": "ann"}]),
        );
        check(json!([{"role": "assistant", "content": null}]), json!([{"role": "assistant", "content": ""}]));
        check(
            json!([{"role": "assistant", "reasoning": "hm"}, {"role": "assistant", "content": "x", "reasoning_content": "so"}]),
            json!([
                {"role": "assistant", "content": "", "reasoning_content": "hm"},
                {"role": "assistant", "content": "x", "reasoning_content": "so"},
            ]),
        );
    }

    #[test]
    fn tool_history_carries_arguments_as_objects() {
        let with = |arguments: Value| {
            json!([{"role": "assistant", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}, "index": 0}]}])
        };
        let becomes = |arguments: Value| {
            json!([{"role": "assistant", "content": "", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}]}])
        };
        check(with(json!("{\"a\":1}")), becomes(json!({"a": 1})));
        check(with(json!({"a": 1})), becomes(json!({"a": 1})));
        check(with(json!("")), becomes(json!({})));
        check(with(json!(null)), becomes(json!({})));
        check(with(json!("{\"a\":")), becomes(json!("{\"a\":")));
        check(with(json!("[1]")), becomes(json!("[1]")));
        refused(with(json!(7)), "messages[0].tool_calls[0].function.arguments");
        check(
            json!([{"role": "tool", "tool_call_id": "c1", "content": "4"}]),
            json!([{"role": "tool", "content": "4", "tool_call_id": "c1"}]),
        );
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        refused(json!(null), "messages");
        refused(json!([]), "messages");
        refused(json!("hi"), "messages");
        refused(json!(["hi"]), "messages[0]");
        refused(json!([{"content": "hi"}]), "messages[0].role");
        refused(json!([{"role": 1, "content": "hi"}]), "messages[0].role");
        refused(json!([{"role": "robot", "content": "hi"}]), "messages[0].role");
        refused(json!([{"role": "user"}]), "messages[0].content");
        let twice = json!([{"role": "user", "content": "", "reasoning_content": "", "reasoning": {}}]);
        refused(twice, "messages[0].reasoning");
        refused(json!([{"role": "assistant"}]), "messages[0].content");
        refused(json!([{"role": "user", "content": 7}]), "messages[0].content");
        refused(json!([{"role": "user", "content": ["a"]}]), "messages[0].content[0]");
        refused(json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text");
        refused(json!([{"role": "user", "content": [{"text": "a"}]}]), "messages[0].content[0].type");
        refused(json!([{"role": "assistant", "tool_calls": [{"id": "c"}]}]), "messages[0].tool_calls[0].function");
        refused(
            json!([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]),
            "messages[0].tool_calls[0].function.name",
        );
        let image = |part: Value, param: &str| {
            let text = json!({"type": "text", "text": "what is it?"});
            refused(json!([{"role": "user", "content": [text, part]}]), &format!("messages[0].content[1].{param}"));
        };
        image(json!({"type": "image_url", "image_url": {"url": "data:,"}}), "image_url.url");
        image(json!({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}), "image_url.url");
        image(json!({"type": "image_url", "image_url": {}}), "image_url.url");
        image(json!({"type": "image_url", "image_url": 7}), "image_url");
        image(json!({"type": "image_url"}), "image_url");
        image(json!({"type": "input_image", "file_id": "file-1"}), "file_id");
    }

    #[test]
    fn an_image_stands_in_the_text_as_its_mark() {
        let uri = "data:image/png;base64,iVBORw0KGgo=";
        let body = json!({"messages": [{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "text", "text": "b"},
            {"type": "image_url", "image_url": {"url": uri, "detail": "low"}}, {"type": "text", "text": "c"},
            {"type": "input_image", "image_url": uri}, {"type": "text", "text": "d"}, {"type": "text", "text": "e"}]}]});
        let mut images = Images::default();
        let messages = parse(Fields::root(body.as_object().unwrap()), &mut images).unwrap();
        let images = images.into_vec();
        let mark = images[0].mark();
        assert_eq!(messages[0].content, format!("a\nb{mark}c{mark}d\ne"));
        let fields: Vec<_> = images.iter().map(|image| image.field()).collect();
        assert_eq!(fields, ["messages[0].content[2].image_url.url", "messages[0].content[4].image_url"]);
    }
}

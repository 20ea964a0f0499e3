//! `system` and `messages` → a conversation's messages.

use serde_json::{Map, Value, json};

use crate::generate::Message;
use crate::image;
use crate::request::fields::{Fields, wrong_type};
use crate::request::images::{self, Images};
use crate::request::{InvalidRequest, history};

/// A system block that Claude Code writes for Anthropic's accounts. It differs from request to request, and with it at
/// the front of the prompt nothing would be cached.
const BILLING: &str = "x-anthropic-billing-header";

/// Reads the history.
pub(super) fn parse(root: Fields<'_>, images: &mut Images) -> Result<Vec<Message>, InvalidRequest> {
    let values = root.array("messages")?.filter(|messages| !messages.is_empty());
    let values = values.ok_or_else(|| InvalidRequest::at("messages", "must be an array of at least one message"))?;
    let mut history = History { messages: Vec::new(), images };
    history.push("system", system(root)?);
    for (idx, value) in values.iter().enumerate() {
        let path = format!("messages[{idx}]");
        history.add(Fields::at(value, &path)?)?;
    }
    if history.messages.last().is_some_and(|last| last.role == "assistant") {
        return Err(InvalidRequest::unsupported("messages", "Continuing the assistant's last message"));
    }
    Ok(history::with_one_system_message(history.messages))
}

fn system(root: Fields<'_>) -> Result<String, InvalidRequest> {
    match root.get("system") {
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(blocks)) => {
            let texts = blocks.iter().enumerate().map(|(idx, block)| {
                let path = format!("system[{idx}]");
                text(block, &path)
            });
            let mut texts: Vec<String> = texts.collect::<Result<_, _>>()?;
            texts.retain(|text| !text.starts_with(BILLING));
            Ok(texts.join("\n\n"))
        }
        Some(other) => Err(wrong_type("system", "a string or an array of text blocks", other)),
    }
}

/// Messages so far. Messages of one role in a row are one, as Anthropic has it: most templates insist on turns.
struct History<'i> {
    messages: Vec<Message>,
    images: &'i mut Images,
}

impl History<'_> {
    fn push(&mut self, role: &str, text: String) {
        if text.is_empty() {
            return;
        }
        let message = self.turn(role);
        if !message.content.is_empty() && !image::ends_with_mark(&message.content) {
            message.content.push('\n');
        }
        message.content += &text;
    }

    /// The last message if it is of this role, else a new one.
    fn turn(&mut self, role: &str) -> &mut Message {
        if self.messages.last().is_none_or(|last| last.role != role) {
            self.messages.push(Message { role: role.to_owned(), ..Message::default() });
        }
        let at = self.messages.len() - 1;
        &mut self.messages[at]
    }

    fn add(&mut self, message: Fields<'_>) -> Result<(), InvalidRequest> {
        let role = match message.string("role")? {
            Some(role @ ("user" | "assistant" | "system")) => role,
            _ => return Err(InvalidRequest::at(message.name("role"), "must be user or assistant")),
        };
        match message.get("content") {
            None => Err(InvalidRequest::at(message.name("content"), "is missing")),
            Some(Value::String(text)) => {
                // An empty text is a turn, too.
                self.turn(role);
                self.push(role, text.clone());
                Ok(())
            }
            Some(Value::Array(blocks)) => {
                let path = message.name("content");
                for (idx, block) in blocks.iter().enumerate() {
                    let path = format!("{path}[{idx}]");
                    self.block(role, Fields::at(block, &path)?)?;
                }
                Ok(())
            }
            Some(other) => Err(wrong_type(&message.name("content"), "a string or an array of blocks", other)),
        }
    }

    fn block(&mut self, role: &str, block: Fields<'_>) -> Result<(), InvalidRequest> {
        match (block.string("type")?, role) {
            (Some("text"), _) => self.push(role, required_text(block)?.to_owned()),
            (Some("document"), "user") => self.push(role, document(block)?),
            (Some("tool_use"), "assistant") => {
                let input = block.object("input")?.cloned().unwrap_or_default();
                let mut call = Map::new();
                call.insert("id".to_owned(), required(block, "id")?.into());
                call.insert("type".to_owned(), "function".into());
                call.insert("function".to_owned(), json!({ "name": required(block, "name")?, "arguments": input }));
                self.turn(role).tool_calls.push(Value::Object(call));
            }
            (Some("tool_result"), "user") => {
                let tool_call_id = Some(required(block, "tool_use_id")?.to_owned());
                let mut content = result(block, self.images)?;
                // No template knows of failed results but by their words.
                if block.boolean("is_error")?.unwrap_or(false) {
                    content.insert_str(0, "Error: ");
                }
                self.messages.push(Message { role: "tool".into(), content, tool_call_id, ..Message::default() });
            }
            (Some("thinking"), "assistant") => {
                let thinking = block.string("thinking")?.unwrap_or_default();
                self.turn(role).reasoning_content.get_or_insert_default().push_str(thinking);
            }
            // What another server encrypted, nobody here can read.
            (Some("redacted_thinking"), "assistant") => {}
            // Of tools that Anthropic defines, of which the model is not told either.
            (Some("server_tool_use" | "mcp_tool_use"), "assistant") => {}
            (Some(kind), "assistant") if kind.ends_with("_tool_result") => {}
            (Some("image"), "user") => {
                let mark = picture(block, self.images)?;
                self.turn(role).content += &mark;
            }
            (Some(other), _) => {
                let other: String = other.chars().take(40).collect();
                let what = format!("A block of type \"{}\" in a message of the {role}", other.escape_debug());
                return Err(InvalidRequest::unsupported(block.name("type"), what));
            }
            (None, _) => return Err(InvalidRequest::at(block.name("type"), "is missing")),
        }
        Ok(())
    }
}

/// An image, whose mark is returned.
fn picture(block: Fields<'_>, images: &mut Images) -> Result<String, InvalidRequest> {
    let path = block.name("source");
    let source = Fields::at(block.get("source").ok_or_else(|| InvalidRequest::at(&*path, "is missing"))?, &path)?;
    match source.string("type")? {
        Some("base64") => {
            let path = source.name("data");
            let data = source.string("data")?.ok_or_else(|| InvalidRequest::at(&*path, "is missing"))?;
            images.add_base64(data, path)
        }
        Some("url") => Err(images::not_fetched(source.name("url"))),
        _ => Err(InvalidRequest::at(
            source.name("type"),
            "must be base64: nothing is stored here, and no URL is fetched",
        )),
    }
}

/// A document that is text. Others would have to be read from their bytes.
fn document(block: Fields<'_>) -> Result<String, InvalidRequest> {
    let path = block.name("source");
    let source = Fields::at(block.get("source").ok_or_else(|| InvalidRequest::at(&*path, "is missing"))?, &path)?;
    if source.string("type")? != Some("text") {
        return Err(InvalidRequest::unsupported(path, "A document that is not plain text"));
    }
    let text = source.string("data")?.ok_or_else(|| InvalidRequest::at(source.name("data"), "is missing"))?;
    let title = block.string("title")?.map(|title| format!("{title}\n\n")).unwrap_or_default();
    Ok(title + text)
}

/// What a tool said: a string, or blocks of text and images.
fn result(block: Fields<'_>, images: &mut Images) -> Result<String, InvalidRequest> {
    match block.get("content") {
        None => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(blocks)) => {
            let path = block.name("content");
            let (mut content, mut after_text) = (String::new(), false);
            for (idx, block) in blocks.iter().enumerate() {
                let path = format!("{path}[{idx}]");
                let fields = Fields::at(block, &path)?;
                let is_image = fields.string("type")? == Some("image");
                let part = if is_image { picture(fields, images)? } else { text(block, &path)? };
                if after_text && !is_image {
                    content.push('\n');
                }
                content += &part;
                after_text = !is_image;
            }
            Ok(content)
        }
        Some(other) => Err(wrong_type(&block.name("content"), "a string or an array of blocks", other)),
    }
}

/// The text of a block that can only be text.
fn text(block: &Value, path: &str) -> Result<String, InvalidRequest> {
    let block = Fields::at(block, path)?;
    match block.string("type")? {
        Some("text") => {}
        Some(other) => {
            let other: String = other.chars().take(40).collect();
            let what = format!("A block of type \"{}\" here", other.escape_debug());
            return Err(InvalidRequest::unsupported(block.name("type"), what));
        }
        None => return Err(InvalidRequest::at(block.name("type"), "is missing")),
    }
    required_text(block).map(str::to_owned)
}

fn required_text<'a>(block: Fields<'a>) -> Result<&'a str, InvalidRequest> {
    block.string("text")?.ok_or_else(|| InvalidRequest::at(block.name("text"), "is missing"))
}

fn required<'a>(block: Fields<'a>, field: &str) -> Result<&'a str, InvalidRequest> {
    let value = block.string(field)?.filter(|value| !value.is_empty());
    value.ok_or_else(|| InvalidRequest::at(block.name(field), "is missing"))
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

    fn refused(messages: Value, param: &str) {
        let body = json!({ "messages": messages });
        assert_eq!(parsed(&body).unwrap_err().param.as_deref(), Some(param), "{body}");
    }

    #[test]
    fn blocks_become_what_templates_read() {
        let block = |text: &str| json!({"type": "text", "text": text, "cache_control": {"type": "ephemeral"}});
        check(json!({"messages": [{"role": "user", "content": "hi"}]}), json!([{"role": "user", "content": "hi"}]));
        check(
            json!({"system": [block("x-anthropic-billing-header: cc_version=1"), block("be"), block("brief")],
                "messages": [{"role": "user", "content": [block("a"), block("b")]}, {"role": "user", "content": "c"},
                    {"role": "assistant", "content": [block("d")]}, {"role": "user", "content": "e"}]}),
            json!([{"role": "system", "content": "be\n\nbrief"}, {"role": "user", "content": "a\nb\nc"},
                {"role": "assistant", "content": "d"}, {"role": "user", "content": "e"}]),
        );
    }

    #[test]
    fn calls_and_their_results_keep_their_order() {
        check(
            json!({"messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
                    {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                    {"type": "text", "text": "let me see"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "4"}]},
                    {"type": "text", "text": "and now?"}]}]}),
            json!([{"role": "user", "content": "hi"},
                {"role": "assistant", "content": "let me see", "reasoning_content": "hm", "tool_calls": [
                    {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]},
                {"role": "tool", "content": "4", "tool_call_id": "t1"}, {"role": "user", "content": "and now?"}]),
        );
    }

    #[test]
    fn failed_results_and_documents_are_told_in_words() {
        check(
            json!({"messages": [{"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "no such file", "is_error": true},
                {"type": "tool_result", "tool_use_id": "t2", "is_error": false},
                {"type": "document", "title": "A", "source": {"type": "text", "media_type": "text/plain", "data": "b"}}]}]}),
            json!([{"role": "tool", "content": "Error: no such file", "tool_call_id": "t1"},
                {"role": "tool", "content": "", "tool_call_id": "t2"}, {"role": "user", "content": "A\n\nb"}]),
        );
        let pdf =
            json!({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}});
        refused(json!([{"role": "user", "content": [pdf]}]), "messages[0].content[0].source");
    }

    #[test]
    fn images_stand_where_they_were_sent() {
        let picture = json!({"type": "image", "source":
            {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}});
        let text = |text: &str| json!({"type": "text", "text": text});
        let body = json!({"messages": [{"role": "user", "content": [text("a"), picture, text("b"), text("c")]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [picture, text("d")]}]}]});
        let mut images = Images::default();
        let messages = parse(Fields::root(body.as_object().unwrap()), &mut images).unwrap();
        let images = images.into_vec();
        let mark = images[0].mark();
        let contents: Vec<&str> = messages.iter().map(|message| message.content.as_str()).collect();
        assert_eq!(contents, [format!("a{mark}b\nc"), format!("{mark}d")]);
        assert_eq!(images[1].field(), "messages[1].content[0].content[0].source.data");
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        refused(json!([]), "messages");
        refused(json!([{"role": "robot", "content": "x"}]), "messages[0].role");
        refused(json!([{"role": "user"}]), "messages[0].content");
        refused(json!([{"role": "user", "content": [{"type": "image"}]}]), "messages[0].content[0].source");
        let picture = |source: Value| json!([{"role": "user", "content": [{"type": "image", "source": source}]}]);
        let at = "messages[0].content[0].source";
        refused(picture(json!({"type": "url", "url": "https://example.com/a.png"})), &format!("{at}.url"));
        refused(picture(json!({"type": "file", "file_id": "f"})), &format!("{at}.type"));
        refused(picture(json!({"type": "base64", "media_type": "image/png"})), &format!("{at}.data"));
        refused(picture(json!({"type": "base64", "data": "aGk="})), &format!("{at}.data"));
        refused(json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text");
        refused(json!([{"role": "user", "content": [{"type": "tool_use"}]}]), "messages[0].content[0].type");
        refused(json!([{"role": "user", "content": [{"type": "tool_result"}]}]), "messages[0].content[0].tool_use_id");
        refused(json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]), "messages");
    }
}

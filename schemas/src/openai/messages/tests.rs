use serde_json::{Value, json};

use super::ChatMessage;
use crate::generate::Message;
use crate::request::InvalidRequest;
use crate::request::field::{Required, object};
use crate::request::history::MessageList;
use crate::request::images::Images;
use crate::request::read::read;

object! {
    /// Has messages.
    struct WithMessages {
        messages: Required<MessageList<ChatMessage>>,
    }
}

fn parsed_with(messages: &Value, images: &mut Images) -> Result<Vec<Message>, InvalidRequest> {
    let body: WithMessages = read(json!({ "messages": messages }).to_string().as_bytes())?;
    body.messages.get("")?.check(images)
}

fn parsed(messages: &Value) -> Result<Vec<Message>, InvalidRequest> {
    parsed_with(messages, &mut Images::default())
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
        json!([
            {"role": "system", "content": "one"},
            {"role": "user", "content": "hi", "name": "ann"},
            {"role": "system", "content": "two"},
        ]),
    );
    check(
        json!([
            {"role": "system", "content": "one"},
            {"role": "developer", "content": "two"},
            {"role": "user", "content": "hi"},
        ]),
        json!([{"role": "system", "content": "one\n\ntwo"}, {"role": "user", "content": "hi"}]),
    );
    check(json!([{"role": "assistant", "content": null}]), json!([{"role": "assistant", "content": ""}]));
    check(
        json!([{"role": "assistant", "reasoning": "hm"}, {"role": "assistant", "content": "x", "reasoning_content": "so"}]),
        json!([
            {"role": "assistant", "content": "", "reasoning_content": "hm"},
            {"role": "assistant", "content": "x", "reasoning_content": "so"},
        ]),
    );
    let refused = |content: Value| json!([{"role": "assistant", "content": content, "refusal": "No."}]);
    check(refused(Value::Null), json!([{"role": "assistant", "content": "No."}]));
    check(refused(json!("Well.")), json!([{"role": "assistant", "content": "Well.\n\nNo."}]));
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
    image(json!({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}), "image_url.url");
    image(json!({"type": "image_url", "image_url": {}}), "image_url.url");
    image(json!({"type": "image_url", "image_url": 7}), "image_url");
    image(json!({"type": "image_url"}), "image_url");
    image(json!({"type": "input_image", "file_id": "file-1"}), "file_id");
}

#[test]
fn a_part_of_another_apis_type_is_refused_with_the_own_one() {
    let block = json!({"type": "image", "source": {"type": "base64", "data": "iVBORw0KGgo="}});
    let error = parsed(&json!([{"role": "user", "content": [block]}])).unwrap_err();
    assert_eq!(error.param.as_deref(), Some("messages[0].content[0]"));
    assert!(error.message.ends_with(": send them as parts of type 'image_url' in 'content'."), "{}", error.message);
}

#[test]
fn an_image_stands_in_the_text_as_its_mark() {
    let uri = "data:image/png;base64,iVBORw0KGgo=";
    let messages = json!([{"role": "user", "content": [
        {"type": "text", "text": "a"}, {"type": "text", "text": "b"},
        {"type": "image_url", "image_url": {"url": uri, "detail": "low"}}, {"type": "text", "text": "c"},
        {"type": "input_image", "image_url": uri}, {"type": "text", "text": "d"}, {"type": "text", "text": "e"}]}]);
    let mut images = Images::default();
    let messages = parsed_with(&messages, &mut images).unwrap();
    let images = images.into_lists().0;
    let mark = images[0].mark();
    assert_eq!(messages[0].content, format!("a\nb{mark}c{mark}d\ne"));
    let fields: Vec<_> = images.iter().map(|image| image.field()).collect();
    assert_eq!(fields, ["messages[0].content[2].image_url.url", "messages[0].content[4].image_url"]);
}

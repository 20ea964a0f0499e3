use serde_json::{Value, json};

use super::*;
use crate::generate::Message;
use crate::request::InvalidRequest;
use crate::request::field::{Field, Required, object};
use crate::request::history::MessageList;
use crate::request::images::Images;
use crate::request::read::read;
use crate::tools::ToolUse;

object! {
    /// Has a history.
    struct HistoryBody {
        messages: Required<MessageList<MessagesMessage>>,
        system: Field<SystemText>,
    }
}

fn parsed_with(body: &Value, images: &mut Images) -> Result<Vec<Message>, InvalidRequest> {
    let body: HistoryBody = read(body.to_string().as_bytes())?;
    let mut tools = ToolReferences::new(ToolUse::default());
    check_history(body.system.get("")?, body.messages.get("")?, images, &mut tools)
}

fn parsed(body: &Value) -> Result<Vec<Message>, InvalidRequest> {
    parsed_with(body, &mut Images::default())
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
    let pdf = json!({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}});
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
    let messages = parsed_with(&body, &mut images).unwrap();
    let images = images.into_lists().0;
    let mark = images[0].mark();
    let contents: Vec<&str> = messages.iter().map(|message| message.content.as_str()).collect();
    assert_eq!(contents, [format!("a{mark}b\nc"), format!("{mark}d")]);
    assert_eq!(images[1].field(), "messages[1].content[0].content[0].source.data");
    let linked = json!({"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}});
    let mut images = Images::default();
    let body = json!({"messages": [{"role": "user", "content": [linked, text("a")]}]});
    let messages = parsed_with(&body, &mut images).unwrap();
    let linked = images.into_lists().1;
    assert_eq!(messages[0].content, format!("{}a", linked[0].mark()));
    assert_eq!(
        (linked[0].url(), linked[0].field()),
        ("https://example.com/a.png", "messages[0].content[0].source.url")
    );
}

#[test]
fn a_part_of_another_apis_type_is_refused_with_the_own_one() {
    for part in ["image_url", "input_image"] {
        let part = json!({"type": part, "image_url": "data:image/png;base64,iVBORw0KGgo="});
        let error = parsed(&json!({"messages": [{"role": "user", "content": [part]}]})).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("messages[0].content[0].type"));
        assert!(error.message.ends_with(": send them as blocks of type 'image' in 'content'."), "{}", error.message);
    }
}

#[test]
fn what_cannot_be_read_is_named() {
    refused(json!([]), "messages");
    refused(json!([{"role": "robot", "content": "x"}]), "messages[0].role");
    refused(json!([{"role": "user"}]), "messages[0].content");
    refused(json!([{"role": "user", "content": [{"type": "image"}]}]), "messages[0].content[0].source");
    let picture = |source: Value| json!([{"role": "user", "content": [{"type": "image", "source": source}]}]);
    let at = "messages[0].content[0].source";
    refused(picture(json!({"type": "url", "url": "file:///etc/passwd"})), &format!("{at}.url"));
    refused(picture(json!({"type": "url"})), &format!("{at}.url"));
    refused(picture(json!({"type": "file", "file_id": "f"})), &format!("{at}.type"));
    refused(picture(json!({"type": "base64", "media_type": "image/png"})), &format!("{at}.data"));
    refused(picture(json!({"type": "base64", "data": "aGk="})), &format!("{at}.data"));
    refused(json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text");
    refused(json!([{"role": "user", "content": [{"type": "tool_use"}]}]), "messages[0].content[0].type");
    refused(json!([{"role": "user", "content": [{"type": "tool_result"}]}]), "messages[0].content[0].tool_use_id");
    refused(json!([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]), "messages");
}

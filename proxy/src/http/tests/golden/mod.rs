//! The bytes of each dialect's stream of a reply that thinks and calls a tool, but for ids and times. A change of these
//! files is a change that clients see. `BATON_WRITE_GOLDEN=1` writes them again.

use super::*;

/// The stream with every id as `ID` and every time that is there as `0`.
fn normalised(transcript: &str) -> String {
    let mut out = String::with_capacity(transcript.len());
    let mut rest = transcript;
    while let Some(c) = rest.chars().next() {
        let n_hex = rest.bytes().take_while(u8::is_ascii_hexdigit).count();
        if n_hex >= 32 {
            out += "ID";
            rest = &rest[n_hex..];
            continue;
        }
        let timed = ["\"created\":", "\"created_at\":", "\"completed_at\":", "\"total_duration\":"];
        if let Some(key) = timed.into_iter().find(|key| rest.starts_with(key)) {
            let value = &rest[key.len()..];
            let n_value = value.bytes().take_while(|byte| !b",}".contains(byte)).count();
            out += key;
            out += if value.starts_with("null") { "null" } else { "0" };
            rest = &value[n_value..];
            continue;
        }
        out.push(c);
        rest = &rest[c.len_utf8()..];
    }
    out
}

async fn check(path: &str, body: Value, file: &str) {
    let reply = start(calling()).await.post_to(path, body).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    let transcript = normalised(&reply.text);
    let golden = format!("{}/src/http/tests/golden/{file}", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("BATON_WRITE_GOLDEN").is_some() {
        std::fs::write(&golden, &transcript).unwrap();
    }
    assert_eq!(transcript, std::fs::read_to_string(&golden).unwrap(), "{path}");
}

fn user() -> Value {
    json!([{"role": "user", "content": "hi"}])
}

#[tokio::test]
async fn chats() {
    let tool = json!({"type": "function", "function": {"name": "f"}});
    let body = json!({"model": "m", "messages": user(), "tools": [tool], "stream": true,
        "stream_options": {"include_usage": true}});
    check("/v1/chat/completions", body, "chat.sse").await;
    let body = json!({"model": "m", "messages": user(), "functions": [{"name": "f"}], "stream": true});
    check("/v1/chat/completions", body, "functions.sse").await;
}

#[tokio::test]
async fn responses() {
    let body = json!({"model": "m", "input": "hi", "tools": [{"type": "function", "name": "f"}], "stream": true});
    check("/v1/responses", body, "responses.sse").await;
}

#[tokio::test]
async fn messages() {
    let body = json!({"model": "m", "max_tokens": 9, "messages": user(), "tools": [{"name": "f", "input_schema": {}}],
        "thinking": {"type": "adaptive"}, "stream": true});
    check("/v1/messages", body, "messages.sse").await;
}

#[tokio::test]
async fn ollama() {
    let tool = json!({"type": "function", "function": {"name": "f"}});
    check("/api/chat", json!({"model": "m", "messages": user(), "tools": [tool]}), "ollama.ndjson").await;
}

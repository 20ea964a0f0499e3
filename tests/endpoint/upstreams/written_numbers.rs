//! Numbers that 64 bits do not hold reach upstreams, prompts and replies with all their digits.

use harness::mock::{Mock, MockRequest, Step, says};
use harness::{BatonServer, ReloadableServer, upstream};
use serde_json::json;

/// Free-form JSON with every kind of such a number.
fn numbers() -> String {
    let long = "9".repeat(310);
    format!(r#"{{"n":[12345678901234567890123,-98765432109876543210,1e-400,0.1234567890123456789,1e999,{long}]}}"#)
}

/// A schema with these numbers.
fn schema() -> String {
    let constants =
        r#"{"const":12345678901234567890123},"b":{"enum":[1e999,1e-400]},"c":{"maximum":98765432109876543210}"#;
    format!(r#"{{"type":"object","properties":{{"a":{constants}}},"default":{}}}"#, numbers())
}

/// An earlier call, tools and the form of the reply, in each dialect. `more` ends with a comma.
fn bodies(more: &str) -> [(&'static str, String); 4] {
    let (numbers, schema) = (numbers(), schema());
    let text = json!(numbers);
    let function = format!(r#"{{"type":"function","function":{{"name":"f","parameters":{schema}}}}}"#);
    let format = format!(r#"{{"type":"json_schema","json_schema":{{"name":"r","schema":{schema}}}}}"#);
    let user = r#"{"role":"user","content":"hi"}"#;
    let call = |arguments: &str| format!(r#"{{"id":"c","function":{{"name":"f","arguments":{arguments}}}}}"#);
    let chat = |arguments: &str| {
        let calling = format!(r#"{{"role":"assistant","tool_calls":[{}]}}"#, call(arguments));
        format!(r#"[{user},{calling},{{"role":"tool","tool_call_id":"c","content":"x"}}]"#)
    };
    let uses = format!(r#"{{"type":"tool_use","id":"c","name":"f","input":{numbers}}}"#);
    let result = r#"{"type":"tool_result","tool_use_id":"c","content":"x"}"#;
    let messages =
        format!(r#"[{user},{{"role":"assistant","content":[{uses}]}},{{"role":"user","content":[{result}]}}]"#);
    let called = format!(r#"{{"type":"function_call","call_id":"c","name":"f","arguments":{text}}}"#);
    let items = format!(r#"[{user},{called},{{"type":"function_call_output","call_id":"c","output":"x"}}]"#);
    let tool = format!(r#"{{"type":"function","name":"f","parameters":{schema}}}"#);
    let named = format!(r#"{{"type":"json_schema","name":"r","schema":{schema}}}"#);
    [
        (
            "/v1/chat/completions",
            format!(
                r#"{{{more}"model":"m","messages":{},"tools":[{function}],"response_format":{format}}}"#,
                chat(&text.to_string())
            ),
        ),
        (
            "/v1/responses",
            format!(r#"{{{more}"model":"m","input":{items},"tools":[{tool}],"text":{{"format":{named}}}}}"#),
        ),
        (
            "/v1/messages",
            format!(
                r#"{{{more}"model":"m","max_tokens":9,"messages":{messages},"tools":[{{"name":"f","input_schema":{schema}}}],"response_format":{format}}}"#
            ),
        ),
        (
            "/api/chat",
            format!(
                r#"{{{more}"model":"m","stream":false,"messages":{},"tools":[{function}],"format":{schema}}}"#,
                chat(&numbers)
            ),
        ),
    ]
}

/// Posts a text, and returns the reply's status, its warning and its text.
async fn post(server: &BatonServer, path: &str, body: String) -> (u16, String, String) {
    let reply = reqwest::Client::new().post(format!("{}{path}", server.base)).body(body).send().await.unwrap();
    let warning = reply.headers().get("x-baton-warning").map(|value| value.to_str().unwrap().to_owned());
    (reply.status().as_u16(), warning.unwrap_or_default(), reply.text().await.unwrap())
}

/// A reply of every kind of upstream.
fn reply(asked: &MockRequest) -> Vec<Step> {
    if asked.path != "/api/chat" {
        return says("{}");
    }
    let end = json!({ "model": "m", "message": { "content": "{}" }, "done": true, "done_reason": "stop" });
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\nconnection: close\r\n\r\n";
    vec![Step::Send(format!("{head}{end}\n"))]
}

#[track_caller]
fn has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part} is not in {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn upstreams_get_every_number_as_the_client_wrote_it() {
    let (numbers, schema) = (numbers(), schema());
    let parameters = format!(r#""parameters":{schema}"#);
    for kind in ["openai", "ollama"] {
        let mock = Mock::start(|_, asked| reply(asked)).await;
        let front = ReloadableServer::start(&upstream("one", kind, &mock.url, ""));
        for (path, body) in bodies("") {
            let n_before = mock.n_asked();
            let (status, warning, text) = post(&front.server, path, body).await;
            assert_eq!((status, warning.contains("rounded")), (200, false), "{path}: {warning} {text}");
            let asked = mock.asked(n_before).text;
            let (arguments, format) = match kind {
                "openai" => (json!(numbers).to_string(), format!(r#""schema":{schema}"#)),
                _ => (numbers.clone(), format!(r#""format":{schema}"#)),
            };
            has(&asked, &[&parameters, &format!(r#""arguments":{arguments}"#), &format]);
            assert!(!asked.contains("baton"), "{asked}");
            if path == "/v1/responses" {
                has(&text, &[&parameters, &format!(r#""schema":{schema}"#)]);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn variables_of_the_template_reach_an_upstream_as_they_were_written() {
    let mock = Mock::start(|_, asked| reply(asked)).await;
    let front = ReloadableServer::start(&upstream("one", "llama-server", &mock.url, ""));
    let variables = format!(r#""chat_template_kwargs":{{"x":{}}}"#, numbers());
    for (path, body) in bodies(&format!("{variables},")) {
        let (status, _, text) = post(&front.server, path, body).await;
        assert_eq!(status, 200, "{path}: {text}");
        has(&mock.asked(mock.n_asked() - 1).text, &[&variables[..variables.len() - 1]]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_number_that_must_be_read_is_named_and_an_objects_key_for_them_is_refused() {
    let mock = Mock::start(|_, asked| reply(asked)).await;
    let front = ReloadableServer::start(&upstream("one", "openai", &mock.url, ""));
    for (path, body) in bodies(r#""temperature":1e999,"#) {
        // Ollama has it among its options.
        let body = if path == "/api/chat" {
            body.replace(r#""temperature":1e999"#, r#""options":{"temperature":1e999}"#)
        } else {
            body
        };
        let (status, _, text) = post(&front.server, path, body).await;
        assert_eq!(status, 400, "{path}: {text}");
        has(&text, &["temperature", "number out of range"]);
    }
    for (path, body) in bodies(r#""metadata":{"a":{"$baton.number":"1"}},"#) {
        let (status, _, text) = post(&front.server, path, body).await;
        assert_eq!(status, 400, "{path}: {text}");
        has(&text, &["reserved"]);
    }
    assert_eq!(mock.n_asked(), 0);
}

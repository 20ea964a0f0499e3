//! Replies in the forms in which other servers send them, and how they reach each dialect.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};
use harness::mock::{Mock, Step, done, event, head, text, whole};
use harness::{Answer, ReloadableServer, eventually_async, said, upstream};
use serde_json::{Value, json};

fn openai(mock: &Mock) -> ReloadableServer {
    ReloadableServer::start(&upstream("one", "openai", &mock.url, ""))
}

/// An upstream that always sends these steps.
async fn sends(steps: Vec<Step>) -> Mock {
    Mock::start(move |_, _| steps.clone()).await
}

fn delta(delta: &Value) -> Step {
    event(&json!({ "choices": [{ "index": 0, "delta": delta, "finish_reason": null }] }))
}

fn finish(reason: &str) -> Step {
    event(&json!({ "choices": [{ "delta": {}, "finish_reason": reason }] }))
}

const END: &str = "data: [DONE]\n\n";

/// A chat in each dialect, whole or streamed.
async fn ask(front: &ReloadableServer, route: &str, is_streamed: bool) -> Answer {
    let mut body = said("hi", json!({ "stream": is_streamed, "max_tokens": 500 }));
    match route {
        "/v1/responses" => body = json!({ "model": "m", "input": "hi", "stream": is_streamed }),
        "/v1/messages" => body["thinking"] = json!({ "type": "adaptive" }),
        "/v1/completions" | "/completion" | "/api/generate" => {
            body = json!({ "model": "m", "prompt": "hi", "stream": is_streamed });
        }
        _ => {}
    }
    front.post(route, &body).await
}

/// Whether the text has all of these, in this order.
#[track_caller]
fn has(answer: &Answer, words: &[&str]) {
    assert_eq!(answer.status, 200, "{answer:?}");
    let mut rest = answer.text.as_str();
    for word in words {
        let at = rest.find(word).unwrap_or_else(|| panic!("{word:?} is not in its place in {}", answer.text));
        rest = &rest[at + word.len()..];
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_field_that_nobody_needs_spoils_no_reply() {
    let parts = json!([
        { "type": "thinking", "thinking": [{ "type": "text", "text": "hmm" }] },
        { "type": "text", "text": "fine" },
    ]);
    let call = json!({ "index": 0, "id": 7, "function": { "name": "f", "arguments": { "a": 1 } } });
    for usage in [
        r#"{"prompt_tokens":7.0,"completion_tokens":"3","prompt_tokens_details":[]}"#,
        r#"{"prompt_tokens":-1,"completion_tokens":null,"completion_tokens_details":7}"#,
        r#"{"prompt_tokens":1e999,"prompt_tokens":"\ud800"},"usage":1e999"#,
        r#""none""#,
        "[]",
    ] {
        let last = format!("data: {{\"choices\":null,\"usage\":{usage},\"error\":null,\"object\":7}}\n\n");
        let mock = sends(vec![
            head(),
            delta(&json!({ "content": parts })),
            delta(&json!({ "tool_calls": [call] })),
            finish("tool_calls"),
            Step::Send(last),
            Step::Send(END.to_owned()),
        ])
        .await;
        let front = openai(&mock);
        for is_streamed in [false, true] {
            let chat = ask(&front, "/v1/chat/completions", is_streamed).await;
            has(&chat, &["hmm", "\"f\""]);
            assert!(chat.text.contains(r#"{\"a\":1}"#) && chat.text.contains("fine"), "{chat:?}");
            has(&ask(&front, "/v1/responses", is_streamed).await, &["hmm", "fine", r#"{\"a\":1}"#]);
            has(&ask(&front, "/v1/messages", is_streamed).await, &["hmm", "fine", "\"f\""]);
            has(&ask(&front, "/api/chat", is_streamed).await, &["{\"a\":1}"]);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn streamed_calls_reach_every_dialect_whole_however_their_pieces_come() {
    let piece = |index: u32, name: Option<&str>, arguments: &str| json!({ "index": index, "id": name.map(|name| format!("id_{name}")), "function": { "name": name, "arguments": arguments } });
    let calls = |pieces: Value| delta(&json!({ "tool_calls": pieces }));
    let interleaved = vec![
        head(),
        calls(json!([piece(0, Some("f"), "{\"a\":")])),
        calls(json!([piece(1, Some("g"), "{\"b\":")])),
        calls(json!([piece(0, None, "1}")])),
        calls(json!([piece(1, None, "2}")])),
        finish("tool_calls"),
        Step::Send(END.to_owned()),
    ];
    let at_once = vec![
        head(),
        calls(json!([piece(0, Some("f"), ""), piece(1, Some("g"), "")])),
        calls(json!([piece(1, None, "{\"b\":2}"), piece(0, None, "{\"a\":1}")])),
        finish("tool_calls"),
        Step::Send(END.to_owned()),
    ];
    let by_id = |id: &str, arguments: &str| calls(json!([{ "id": id, "function": { "arguments": arguments } }]));
    let unnumbered = vec![
        head(),
        calls(json!([piece(0, Some("f"), ""), piece(1, Some("g"), "")])),
        by_id("id_g", "{\"b\":2}"),
        by_id("id_f", "{\"a\":1}"),
        finish("tool_calls"),
        Step::Send(END.to_owned()),
    ];
    for steps in [interleaved, at_once, unnumbered] {
        let mock = sends(steps).await;
        let front = openai(&mock);
        let chat = ask(&front, "/v1/chat/completions", false).await.json();
        let called = |index: usize| chat["choices"][0]["message"]["tool_calls"][index]["function"].clone();
        assert_eq!(called(0), json!({ "name": "f", "arguments": "{\"a\":1}" }), "{chat}");
        assert_eq!(called(1), json!({ "name": "g", "arguments": "{\"b\":2}" }), "{chat}");
        let message = ask(&front, "/v1/messages", false).await.json();
        let inputs = message["content"].as_array().unwrap().iter().map(|block| block["input"].clone());
        assert_eq!(inputs.collect::<Vec<_>>(), [json!({ "a": 1 }), json!({ "b": 2 })], "{message}");
        let lines = ask(&front, "/api/chat", true).await;
        has(
            &lines,
            &["\"name\":\"f\",\"arguments\":{\"a\":1}", "\"name\":\"g\",\"arguments\":{\"b\":2}", "\"done\":true"],
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_digits_of_a_calls_arguments_reach_every_dialect() {
    const DIGITS: &str = "12345678901234567890123";
    for arguments in [format!("{{\"id\":{DIGITS}}}"), format!("\"{{\\n\\\"id\\\": {DIGITS}}}\"")] {
        let call = format!(
            "data: {{\"choices\":[{{\"delta\":{{\"tool_calls\":[{{\"index\":0,\"id\":\"c\",\"function\":{{\"name\":\"f\",\"arguments\":{arguments}}}}}]}}}}]}}\n\n"
        );
        let mock = sends(vec![head(), Step::Send(call), finish("tool_calls"), Step::Send(END.to_owned())]).await;
        let front = openai(&mock);
        for route in ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"] {
            for is_streamed in [false, true] {
                has(&ask(&front, route, is_streamed).await, &[DIGITS]);
            }
        }
        // A line of Ollama's stays one line.
        let lines = ask(&front, "/api/chat", true).await;
        assert!(lines.text.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()), "{lines:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_reply_ends_by_each_dialects_own_word_and_never_as_a_whole_one() {
    for (reason, openai_word, response, anthropic) in [
        ("content_filter", "content_filter", "content_filter", "refusal"),
        ("model_length", "length", "max_output_tokens", "max_tokens"),
        ("insufficient_system_resource", "length", "max_output_tokens", "max_tokens"),
        ("out_of_luck", "length", "max_output_tokens", "max_tokens"),
    ] {
        let mock = sends(vec![head(), text("half"), finish(reason), Step::Send(END.to_owned())]).await;
        let front = openai(&mock);
        for is_streamed in [false, true] {
            let word = format!("\"finish_reason\":\"{openai_word}\"");
            has(&ask(&front, "/v1/chat/completions", is_streamed).await, &["half", &word]);
            has(&ask(&front, "/v1/completions", is_streamed).await, &[&word]);
            let response = format!("{{\"reason\":\"{response}\"}}");
            let answer = ask(&front, "/v1/responses", is_streamed).await;
            has(&answer, &["\"status\":\"incomplete\""]);
            assert!(answer.text.contains(&response) && answer.text.contains("half"), "{answer:?}");
            has(
                &ask(&front, "/v1/messages", is_streamed).await,
                &["half", &format!("\"stop_reason\":\"{anthropic}\"")],
            );
            has(&ask(&front, "/api/chat", is_streamed).await, &["\"done_reason\":\"length\""]);
            has(&ask(&front, "/completion", is_streamed).await, &["\"stop_type\":\"limit\""]);
        }
        let n_unknown = if reason == "out_of_luck" { 12 } else { 0 };
        let metrics = reqwest::get(format!("{}/metrics", front.server.base)).await.unwrap().text().await.unwrap();
        let line = format!("baton_upstream_unknown_ends_total{{upstream=\"one\"}} {n_unknown}");
        assert!(metrics.contains(&line), "{reason}: {metrics}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_that_was_cut_stays_cut_whatever_its_last_chunk_says() {
    for (reason, word) in [("content_filter", "content_filter"), ("length", "length"), ("out_of_luck", "length")] {
        let mock = sends(vec![head(), text("half"), finish(reason), finish("stop"), Step::Send(END.to_owned())]).await;
        let front = openai(&mock);
        for is_streamed in [false, true] {
            let word = format!("\"finish_reason\":\"{word}\"");
            has(&ask(&front, "/v1/chat/completions", is_streamed).await, &["half", &word]);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_is_one_however_its_name_and_its_ids_are_repeated() {
    let piece = |id: &str, name: &str, arguments: &str| {
        delta(
            &json!({ "tool_calls": [{ "index": 0, "id": id, "function": { "name": name, "arguments": arguments } }] }),
        )
    };
    for (pieces, name) in [
        ([piece("a", "f", "{\"a\":"), piece("b", "f", "1"), piece("c", "f", "}")], "f"),
        ([piece("a", "f", ""), piece("b", "f", "{\"a\":"), piece("c", "f", "1}")], "f"),
        ([piece("a", "get_", ""), piece("", "weather", ""), piece("", "", "{\"a\":1}")], "get_weather"),
    ] {
        let steps = [vec![head()], pieces.to_vec(), vec![finish("tool_calls"), Step::Send(END.to_owned())]].concat();
        let mock = sends(steps).await;
        let chat = ask(&openai(&mock), "/v1/chat/completions", false).await.json();
        let calls = chat["choices"][0]["message"]["tool_calls"].as_array().unwrap();
        let functions: Vec<&Value> = calls.iter().map(|call| &call["function"]).collect();
        assert_eq!(functions, [&json!({ "name": name, "arguments": "{\"a\":1}" })], "{chat}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_choice_is_served_and_others_are_named() {
    let of = |index: u32, text: &str| event(&json!({ "choices": [{ "index": index, "delta": { "content": text } }] }));
    let mock = sends(vec![head(), of(0, "fi"), of(1, "WRONG"), of(0, "ne"), of(1, "WRONG"), done()]).await;
    let front = openai(&mock);
    let answer = ask(&front, "/v1/chat/completions", false).await;
    assert_eq!(answer.content(), "fine");
    assert!(answer.warning.contains("other_choices"), "{answer:?}");
    let message = ask(&front, "/v1/messages", false).await;
    assert!(message.text.contains("\"fine\"") && !message.text.contains("WRONG"), "{message:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_client_says_of_its_schema_reaches_the_upstream() {
    let mock = sends(vec![head(), text("{}"), done()]).await;
    let sent = || {
        let requests = std::mem::take(&mut *mock.log.requests.lock().unwrap());
        requests.into_iter().map(|request| request.body["response_format"]["json_schema"].clone()).collect::<Vec<_>>()
    };
    let front = openai(&mock);
    let schema = json!({ "type": "object" });
    let with = |label: Value| {
        let mut named = json!({ "schema": schema });
        named.as_object_mut().unwrap().extend(label.as_object().unwrap().clone());
        named
    };
    for (label, expected) in [
        (json!({}), json!({ "name": "reply" })),
        (json!({ "name": "n", "strict": null }), json!({ "name": "n" })),
        (json!({ "name": "n", "strict": false }), json!({ "name": "n", "strict": false })),
        (
            json!({ "name": "n", "description": "d", "strict": true }),
            json!({ "name": "n", "description": "d", "strict": true }),
        ),
    ] {
        let format = json!({ "type": "json_schema", "json_schema": with(label.clone()) });
        assert_eq!(front.chat(json!({ "response_format": format })).await.status, 200);
        let mut own = with(label);
        own["type"] = "json_schema".into();
        let body = json!({ "model": "m", "input": "hi", "text": { "format": own } });
        assert_eq!(front.post("/v1/responses", &body).await.status, 200);
        assert_eq!(sent(), [with(expected.clone()), with(expected)]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_that_a_dialect_promises_is_strict_or_its_client_is_warned() {
    let mock = sends(vec![head(), text("{}"), done()]).await;
    let front = openai(&mock);
    let open = json!({ "type": "object", "properties": { "a": { "type": "integer" } }, "additionalProperties": false });
    let mut closed = open.clone();
    closed["required"] = json!(["a"]);
    let asked = |schema: &Value| {
        let form = |field: &str, value: Value| json!({ field: value });
        let of_type = |kind: &str| json!({ "type": kind, "schema": schema });
        [
            ("/api/chat", "format", form("format", schema.clone())),
            ("/v1/messages", "output_config.format", form("output_config", form("format", of_type("json_schema")))),
            ("/v1/chat/completions", "guided_json", form("guided_json", schema.clone())),
            (
                "/v1/chat/completions",
                "structured_outputs.json",
                form("structured_outputs", form("json", schema.clone())),
            ),
            ("/v1/chat/completions", "json_schema", form("json_schema", schema.clone())),
            ("/v1/chat/completions", "response_format", form("response_format", of_type("json_object"))),
        ]
    };
    let sent = || {
        let requests = std::mem::take(&mut *mock.log.requests.lock().unwrap());
        let mut formats = requests.into_iter().map(|request| request.body["response_format"]["json_schema"].clone());
        formats.find(|format| !format.is_null()).expect("a schema")
    };
    for (schema, is_strict) in [(&closed, true), (&open, false)] {
        for is_streamed in [false, true] {
            for (route, field, mut body) in asked(schema) {
                (body["stream"], body["max_tokens"]) = (is_streamed.into(), 500.into());
                let answer = front.post(route, &said("hi", body)).await;
                assert_eq!(answer.status, 200, "{route}: {answer:?}");
                let mut expected = json!({ "name": "reply", "schema": schema });
                let mut warning = format!(
                    "the upstream may not hold {field}, which is no schema of OpenAI's strict mode: a property is not required"
                );
                if is_strict {
                    expected["strict"] = true.into();
                    warning.clear();
                }
                assert_eq!((sent(), answer.warning.as_str()), (expected, warning.as_str()), "{route}: {field}");
            }
        }
    }
    // The client's own `strict`, or its absence, in OpenAI's dialect stays as it is.
    for strict in [json!(null), json!(false), json!(true)] {
        let named = json!({ "name": "n", "schema": open, "strict": strict });
        let format = json!({ "type": "json_schema", "json_schema": named });
        let answer = front.post("/v1/chat/completions", &said("hi", json!({ "response_format": format }))).await;
        assert_eq!((answer.status, answer.warning.as_str()), (200, ""), "{strict}");
        assert_eq!(sent().get("strict"), strict.as_bool().map(Value::from).as_ref());
    }
    // These servers hold every schema.
    for kind in ["vllm", "llama-server"] {
        let front = ReloadableServer::start(&upstream("one", kind, &mock.url, ""));
        let answer = front.post("/api/chat", &said("hi", json!({ "format": open, "stream": false }))).await;
        assert_eq!((answer.status, answer.warning.as_str()), (200, ""), "{kind}: {answer:?}");
        assert_eq!(sent(), json!({ "name": "reply", "schema": open }), "{kind}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_that_a_server_refuses_as_strict_is_sent_without_unless_the_client_said_strict() {
    let mock = Mock::start(|_, asked| match asked.body["response_format"]["json_schema"]["strict"] {
        Value::Bool(true) => whole(400, "", &json!({ "error": { "message": "Invalid schema" } })),
        _ => vec![head(), text("{}"), done()],
    })
    .await;
    let front = openai(&mock);
    let schema = json!({ "type": "object", "properties": {}, "additionalProperties": false });
    for is_streamed in [false, true] {
        let body = said("hi", json!({ "format": schema, "stream": is_streamed }));
        let answer = front.post("/api/chat", &body).await;
        let warning =
            "the upstream may not hold format, which is no schema of OpenAI's strict mode: it refused it as one";
        assert_eq!((answer.status, answer.warning.as_str()), (200, warning), "{answer:?}");
        let requests = std::mem::take(&mut *mock.log.requests.lock().unwrap());
        let strict = |i: usize| requests[i].body["response_format"]["json_schema"].get("strict").cloned();
        assert_eq!((requests.len(), strict(0), strict(1)), (2, Some(json!(true)), None));
    }
    let named = json!({ "name": "n", "schema": schema, "strict": true });
    let format = json!({ "response_format": { "type": "json_schema", "json_schema": named } });
    let answer = front.post("/v1/chat/completions", &said("hi", format)).await;
    assert!(answer.status == 400 && answer.text.contains("Invalid schema"), "{answer:?}");
    assert_eq!((mock.n_asked(), answer.warning.as_str()), (1, ""));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_upstream_that_answers_is_the_one_that_is_warned_of() {
    let failing = Mock::start(|_, _| whole(500, "", &json!({ "error": { "message": "no" } }))).await;
    let holding = sends(vec![head(), text("{}"), done()]).await;
    let servers = upstream("one", "openai", &failing.url, "") + &upstream("two", "vllm", &holding.url, "");
    let front = ReloadableServer::start(&servers);
    let body = said("hi", json!({ "format": { "type": "object" }, "stream": false }));
    for _ in 0..2 {
        let answer = front.post("/api/chat", &body).await;
        assert_eq!((answer.status, answer.warning.as_str()), (200, ""), "{answer:?}");
    }
    assert!(failing.n_asked() > 0, "they take turns");
}

#[tokio::test(flavor = "multi_thread")]
async fn text_and_refusal_are_blocks_of_their_own() {
    let steps = vec![
        head(),
        text("Well."),
        delta(&json!({ "refusal": "I will " })),
        delta(&json!({ "refusal": "not." })),
        done(),
    ];
    let mock = sends(steps).await;
    let front = openai(&mock);
    let message = ask(&front, "/v1/messages", false).await.json();
    let texts = message["content"].as_array().unwrap().iter().map(|block| block["text"].as_str().unwrap());
    assert_eq!(texts.collect::<Vec<_>>(), ["Well.", "I will not."], "{message}");
    let stream = ask(&front, "/v1/messages", true).await;
    has(&stream, &["Well.", "content_block_stop", "content_block_start", "I will ", "not.", "\"refusal\""]);
    // Dialects without a field for it.
    for (route, text) in [
        ("/api/chat", "/message/content"),
        ("/api/generate", "/response"),
        ("/v1/completions", "/choices/0/text"),
        ("/completion", "/content"),
    ] {
        let whole = ask(&front, route, false).await;
        assert_eq!(whole.json().pointer(text), Some(&json!("Well.\n\nI will not.")), "{route}: {whole:?}");
        has(&ask(&front, route, true).await, &["\"Well.\"", "\"\\n\\n\"", "\"I will \"", "\"not.\""]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_stream_with_another_label_is_read_and_what_cannot_be_read_is_called_that() {
    let labelled = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n";
    let mock = sends(vec![Step::Send(labelled.to_owned()), text("fine"), done()]).await;
    assert_eq!(openai(&mock).chat(json!({})).await.content(), "fine");
    let mock = sends(vec![head(), Step::Send("data: {\"choices\":7}\n\n".to_owned())]).await;
    let answer = openai(&mock).chat(json!({})).await;
    assert!(answer.status == 503 && answer.text.contains("sent something that cannot be read"), "{answer:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_reaches_every_dialect() {
    let refusing = vec![
        head(),
        delta(&json!({ "role": "assistant", "content": null, "refusal": "" })),
        delta(&json!({ "refusal": "I will " })),
        delta(&json!({ "refusal": "not." })),
        finish("stop"),
        Step::Send(END.to_owned()),
    ];
    let front_of = sends(refusing).await;
    let front = openai(&front_of);
    let chat = ask(&front, "/v1/chat/completions", false).await.json();
    let message = &chat["choices"][0]["message"];
    assert_eq!((&message["refusal"], &message["content"]), (&json!("I will not."), &Value::Null), "{chat}");
    let response = ask(&front, "/v1/responses", false).await.json();
    assert_eq!(
        response["output"][0]["content"],
        json!([{ "type": "refusal", "refusal": "I will not." }]),
        "{response}"
    );
    assert_eq!(response["status"], "completed");
    let message = ask(&front, "/v1/messages", false).await.json();
    assert_eq!((&message["stop_reason"], &message["content"][0]["text"]), (&json!("refusal"), &json!("I will not.")));
    let line = ask(&front, "/api/chat", false).await.json();
    assert_eq!((&line["message"]["content"], &line["done_reason"]), (&json!("I will not."), &json!("stop")));
    has(&ask(&front, "/completion", false).await, &["I will not."]);
    has(&ask(&front, "/v1/completions", false).await, &["I will not."]);

    let streamed = async |route: &str| ask(&front, route, true).await;
    has(&streamed("/v1/chat/completions").await, &["\"refusal\":\"I will \"", "\"refusal\":\"not.\"", "\"stop\""]);
    let events = ["response.refusal.delta", "response.refusal.done", "I will not.", "response.completed"];
    has(&streamed("/v1/responses").await, &events);
    has(&streamed("/v1/messages").await, &["I will ", "not.", "\"stop_reason\":\"refusal\""]);
    has(&streamed("/api/chat").await, &["I will ", "not.", "\"done_reason\":\"stop\""]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_names_what_it_leaves_out() {
    let annotation = json!([{ "type": "url_citation", "url_citation": { "url": "http://x", "title": "X" } }]);
    let searched = event(&json!({ "citations": ["http://x"], "choices": [{ "delta": { "role": "assistant" } }] }));
    let heard = delta(&json!({ "audio": { "id": "a", "data": "AAAA", "transcript": "heard" } }));
    let steps = vec![head(), searched, heard, delta(&json!({ "annotations": annotation })), done()];
    let mock = sends(steps).await;
    let front = openai(&mock);
    for route in
        ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat", "/v1/completions", "/completion"]
    {
        let answer = ask(&front, route, false).await;
        let expected = "parts of the upstream's reply are not passed on: citations, audio, annotations";
        assert_eq!((answer.status, answer.warning.as_str()), (200, expected), "{route}: {answer:?}");
        assert!(answer.text.contains("heard"), "{route}: {answer:?}");
        // The head of a stream names what came before the first text.
        let streamed = ask(&front, route, true).await;
        assert!(streamed.warning.contains("citations") && streamed.text.contains("heard"), "{route}: {streamed:?}");
        // A comment names what came later. Ollama's lines have none.
        let is_told = streamed.text.contains("\n: parts of the upstream's reply are not passed on: annotations\n");
        assert_eq!(is_told, route != "/api/chat", "{route}: {streamed:?}");
    }
    let plain = sends(vec![head(), text("plain"), done()]).await;
    assert_eq!(ask(&openai(&plain), "/v1/chat/completions", false).await.warning, "");
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_of_models_are_read_in_every_form_and_said_to_be_unreadable_otherwise() {
    let log = tempfile::NamedTempFile::new().unwrap();
    let mock = Mock::start(|_, _| Vec::new()).await;
    mock.list_as(json!({ "files": ["theirs"] }));
    let config = upstream("one", "openai", &mock.url, "models = {}");
    let front = ReloadableServer::logging_to(log.reopen().unwrap(), &config, &[]);
    let listed = async || front.get("/v1/models").await["data"].as_array().unwrap().len();
    eventually_async("the log", async || {
        std::fs::read_to_string(log.path()).unwrap().contains("list of models cannot be read")
    })
    .await;
    assert_eq!(listed().await, 0);
    for (list, n) in [
        (json!([{ "id": "a" }, { "id": "b" }]), 2),
        (json!({ "data": [{ "name": "a" }] }), 1),
        (json!({ "models": ["a", "b", "c"] }), 3),
    ] {
        mock.list_as(list.clone());
        // A failed request causes a probe at once.
        eventually_async("the list", async || {
            let _ = front.chat(json!({ "model": "a" })).await;
            listed().await == n
        })
        .await;
    }
    // A list that is read in part is said to be, too.
    let n_said = || std::fs::read_to_string(log.path()).unwrap().matches("cannot be read as a whole").count();
    let n_before = n_said();
    mock.list_as(json!([{ "id": "a" }, { "id": "x".repeat(600) }]));
    eventually_async("the log", async || {
        let _ = front.chat(json!({ "model": "a" })).await;
        n_said() == n_before + 1 && listed().await == 1
    })
    .await;
}

fn packed(body: &[u8], packing: &str) -> Vec<u8> {
    if packing == "gzip" {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(body).unwrap();
        return encoder.finish().unwrap();
    }
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(body).unwrap();
    encoder.finish().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn event_streams_are_read_by_their_standard_and_unpacked() {
    let hi = r#"{"choices":[{"delta":{"content":"fine"},"finish_reason":null}]}"#;
    let stop = r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#;
    let lines =
        |end: &str| format!("data: {hi}{end}{end}: alive{end}event: x{end}data:{stop}{end}{end}data: [DONE]{end}{end}");
    let several = format!("data: {}\ndata: {}\n\ndata: {stop}\n\n{END}", &hi[..13], &hi[13..]);
    let streams = [
        lines("\n"),
        lines("\r"),
        lines("\r\n"),
        format!("\u{FEFF}{}", lines("\n")),
        several,
        format!("data: {hi}\n\ndata: {stop}\n"),
    ];
    for stream in streams {
        for packing in ["", "gzip", "deflate"] {
            let (header, body) = match packing {
                "" => (String::new(), stream.clone().into_bytes()),
                _ => (format!("content-encoding: {packing}\r\n"), packed(stream.as_bytes(), packing)),
            };
            let head =
                format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{header}connection: close\r\n\r\n");
            let mock = sends(vec![Step::Send(head), Step::SendBytes(body)]).await;
            let answer = openai(&mock).chat(json!({})).await;
            assert_eq!((answer.status, answer.content().as_str()), (200, "fine"), "{packing} {stream:?}");
        }
    }
}

/// A reply that no client asked to be packed, and that grows a thousandfold, ends where an unpacked one would.
#[tokio::test(flavor = "multi_thread")]
async fn a_packed_reply_is_bounded_by_what_it_becomes() {
    let bomb = Arc::new(packed(&vec![b' '; 64 << 20], "gzip"));
    for packing in ["gzip", "br"] {
        let bomb = Arc::clone(&bomb);
        let mock = Mock::start(move |_, _| {
            let head = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-encoding: {packing}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
                bomb.len()
            );
            vec![Step::Send(head), Step::SendBytes(bomb.to_vec()), Step::Wait(Duration::from_secs(1))]
        })
        .await;
        let answer = openai(&mock).chat(json!({ "max_tokens": 5 })).await;
        assert_eq!(answer.status, 503, "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_packed_error_is_read() {
    let body = packed(br#"{"error":{"message":"too hot","code":400}}"#, "gzip");
    let head = format!(
        "HTTP/1.1 400 X\r\ncontent-encoding: gzip\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    let mock = sends(vec![Step::Send(head), Step::SendBytes(body)]).await;
    let answer = openai(&mock).chat(json!({})).await;
    assert!(answer.status == 400 && answer.text.contains("too hot"), "{answer:?}");
    // And a whole reply in one piece is read as a stream is.
    let message = json!({ "content": [{ "type": "text", "text": "well" }], "refusal": null });
    let reply = json!({ "choices": [{ "message": message, "finish_reason": "end_turn" }], "usage": null });
    let mock = sends(whole(200, "", &reply)).await;
    assert_eq!(openai(&mock).chat(json!({ "max_tokens": 5 })).await.content(), "well");
}

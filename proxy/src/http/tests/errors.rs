use baton_schemas::EngineError;

use super::*;

/// A stream and a whole reply that fail before anything was generated: both keep their status.
async fn check(fail: impl Into<RequestError>, status: u16, kind: &str, code: Option<&str>) -> Reply {
    let fail = Act::Fail(fail.into());
    let mut reply = None;
    for fake in [before([fail.clone()]), acts([fail.clone()]), acts([Act::Emit(started(0)), fail])] {
        let server = start(fake).await;
        server.chat(json!({"stream": true})).await.failed(status, kind, code);
        let whole = server.chat(json!({})).await;
        whole.failed(status, kind, code);
        reply = Some(whole);
        assert_eq!(server.n_live(), 0);
    }
    reply.unwrap()
}

#[tokio::test]
async fn an_early_error_keeps_its_status() {
    let missing = RequestError::ModelNotFound { model: "x".into() };
    check(missing, 404, "not_found_error", Some("model_not_found")).await;

    let overflow = EngineError::ContextOverflow { n_prompt: 90, n_ctx: 64 };
    let error = check(overflow, 400, "invalid_request_error", Some("context_length_exceeded")).await.json();
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("maximum context length is 64 tokens"), "{message}");
    assert!(message.contains("exceeds the available context size"), "{message}");
    assert_eq!((&error["error"]["n_prompt_tokens"], &error["error"]["n_ctx"]), (&json!(90), &json!(64)));

    let text = RequestError::TextTooLong { field: "prompt", n_tokens: 90, n_ctx: 64 };
    let error = check(text, 400, "invalid_request_error", Some("context_length_exceeded")).await.json();
    let error = &error["error"];
    assert_eq!((&error["param"], &error["n_prompt_tokens"]), (&json!("prompt"), &json!(90)), "{error}");
    assert!(error["message"].as_str().unwrap().contains("exceeds the available context size"), "{error}");

    let full = RequestError::Overloaded { n_running: 3, n_waiting: 0, retry_after: Duration::from_millis(1500) };
    let reply = check(full, 503, "unavailable_error", Some("queue_full")).await;
    assert_eq!((reply.header("retry-after"), reply.header("retry-after-ms")), ("2", "1500"));

    let reply = check(EngineError::internal("/srv/secret.gguf"), 500, "server_error", Some("internal_error")).await;
    assert_eq!(reply.header("x-should-retry"), "false");
    assert!(!reply.text.contains("secret"));

    let reply = check(EngineError::Unsupported { feature: "this".into() }, 501, "not_supported_error", None).await;
    assert_eq!(reply.header("x-should-retry"), "false");
    check(EngineError::lost("10.0.0.7"), 503, "unavailable_error", None).await;
    check(EngineError::invalid("no"), 400, "invalid_request_error", None).await;
}

#[tokio::test]
async fn a_late_error_is_an_event_and_never_a_success() {
    let fail = |error: EngineError| acts([Act::Emit(started(0)), Act::Emit(text(0, "He")), Act::Fail(error.into())]);
    let server = start(fail(EngineError::lost("10.0.0.7"))).await;
    let reply = server.chat(json!({"stream": true})).await;
    assert_eq!(reply.status, 200);
    let last: Value = serde_json::from_str(reply.events().last().unwrap()).unwrap();
    assert_eq!(last["error"]["type"], "unavailable_error");
    assert!(!reply.text.contains("[DONE]") && !reply.text.contains("10.0.0.7"));
    assert!(reply.chunks().iter().all(|chunk| chunk["choices"][0]["finish_reason"].is_null()));
    // Without a stream there is still a status to give.
    server.chat(json!({})).await.failed(503, "unavailable_error", None);

    // After the hold too.
    let fails = Latch::default();
    let late = before([Act::WaitFor(fails.clone()), Act::Fail(EngineError::QueueFull { limit: 1 }.into())]);
    let server = start_with(late, impatient()).await;
    let reply = server.open("/v1/chat/completions", chat_body(json!({"stream": true}))).await;
    assert_eq!(reply.status, 200);
    fails.open();
    let reply = reply.rest().await;
    assert!(reply.events().last().unwrap().contains("queue_full"));
}

#[tokio::test]
async fn events_that_just_stop_are_a_failure() {
    let server = start(emits([started(0), text(0, "He")])).await;
    server.chat(json!({})).await.failed(503, "unavailable_error", None);
    let reply = server.chat(json!({"stream": true})).await;
    assert!(reply.events().last().unwrap().starts_with(r#"{"error":"#), "{}", reply.text);
    start(emits([])).await.chat(json!({"stream": true})).await.failed(503, "unavailable_error", None);
}

#[tokio::test]
async fn a_panic_is_an_envelope_and_the_server_lives_on() {
    let server = start(before([Act::Panic])).await;
    for _ in 0..2 {
        let reply = server.chat(json!({})).await;
        reply.failed(500, "server_error", Some("internal_error"));
        assert_eq!(reply.header("x-should-retry"), "false");
        assert!(!reply.text.contains("secret"));
    }
    assert_eq!(server.get("/health").await.status, 200);
    let reply = start(Fake { models_panic: true, ..Fake::default() }).await.get("/v1/models").await;
    reply.failed(500, "server_error", Some("internal_error"));

    let server = start(acts([Act::Emit(started(0)), Act::Emit(text(0, "a")), Act::Panic])).await;
    let reply = server.chat(json!({"stream": true})).await;
    assert!(reply.events().last().unwrap().contains("internal_error"), "{}", reply.text);
    assert!(!reply.text.contains("secret"));
}

#[tokio::test]
async fn unknown_routes_and_methods_are_in_the_envelope() {
    let server = start(hello()).await;
    for path in ["/v1", "/v1/nope", "/v1/models/", "/v1/chat/completions/"] {
        let error = server.get(path).await.failed(404, "not_found_error", None);
        let message = error["message"].as_str().unwrap();
        assert!(
            message.contains("POST /v1/chat/completions, ") && message.contains("GET /v1/models/{id}, "),
            "{error}"
        );
        assert!(!message.contains("/api/create") && !message.contains("/v1/health"), "{error}");
    }
    let reply = server.post_to("/openai/v1/chat/completions", json!({})).await;
    let message = reply.failed(404, "not_found_error", None)["message"].to_string();
    assert!(message.contains("Did you mean POST /v1/chat/completions? The routes are: "), "{message}");
    let closed = start_with(hello(), closed_config("k")).await;
    assert_eq!(closed.get("/").await.text, "Ollama is running");
    let browser = reqwest::Client::new().get(closed.url("/")).header("accept", "text/html,*/*");
    let page = Reply::of(browser.send().await.unwrap()).await.text;
    assert!(page.starts_with("<!doctype html>") && page.contains("./baton/page/app.js"), "{page}");
    let reply = server.get("/v1/chat/completions").await;
    let error = reply.failed(405, "invalid_request_error", None);
    assert_eq!(error["message"], "GET is not allowed on /v1/chat/completions. Use POST.");
    assert_eq!(reply.header("allow"), "POST");
    let deleted = reqwest::Client::new().delete(server.url("/v1/models/m")).send().await.unwrap();
    let error = Reply::of(deleted).await.failed(405, "invalid_request_error", None);
    assert_eq!(error["message"], "DELETE is not allowed on /v1/models/m. Use GET.");
}

#[tokio::test]
async fn a_request_id_is_always_sent_back() {
    let server = start(hello()).await;
    let client = reqwest::Client::new();
    let sent = async |id: &str, path: &str| {
        let response = client.get(server.url(path)).header("x-request-id", id).send().await.unwrap();
        Reply::of(response).await.header("x-request-id").to_owned()
    };
    assert_eq!(sent("mine-1", "/health").await, "mine-1");
    assert_eq!(sent("mine-1", "/nope").await, "mine-1");
    assert!(sent("two words", "/health").await.starts_with("req_"));
    assert!(sent(&"x".repeat(129), "/health").await.starts_with("req_"));
    assert_ne!(sent("", "/health").await, sent("", "/health").await);
}

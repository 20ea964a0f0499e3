use baton_schemas::EngineError;

use super::*;

fn user() -> Value {
    json!({"model": "m:latest", "messages": [{"role": "user", "content": "hi"}], "options": {"seed": 3, "num_predict": 7}})
}

fn with(mut body: Value, fields: Value) -> Value {
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn a_chat_streams_lines_and_ends_with_its_metrics() {
    let server = start(hello()).await;
    let reply = server.post_to("/api/chat", user()).await;
    assert_eq!(reply.header("content-type"), "application/x-ndjson");
    assert_eq!(reply.header("x-baton-route"), "direct test");
    let lines = reply.lines();
    let texts: Vec<_> = lines.iter().map(|line| line["message"]["content"].as_str().unwrap()).collect();
    assert_eq!(texts, ["Hel", "lo", ""]);
    assert!(lines.iter().all(|line| line["message"]["role"] == "assistant" && line["model"] == "m:latest"));
    assert_eq!(lines.iter().map(|line| line["done"].as_bool().unwrap()).collect::<Vec<_>>(), [false, false, true]);
    let last = &lines[2];
    assert_eq!((&last["done_reason"], &last["prompt_eval_count"]), (&json!("stop"), &json!(5)));
    assert_eq!((&last["eval_count"], &last["eval_duration"]), (&json!(4), &json!(8_000_000)));
    assert_eq!((&last["prompt_eval_duration"], &last["load_duration"]), (&json!(6_000_000), &json!(0)));
    assert!(last["total_duration"].as_u64().unwrap() > 0);
    let created: jiff::Timestamp = last["created_at"].as_str().unwrap().parse().unwrap();
    assert!(created.duration_until(jiff::Timestamp::now()).as_secs().abs() < 60);
    let requests = server.fake.requests.lock().unwrap();
    assert_eq!((requests[0].0.max_tokens, requests[0].0.sampling.seed), (Some(7), 3));
}

#[tokio::test]
async fn a_whole_reply_is_one_line() {
    let server = start(hello()).await;
    let chat = server.post_to("/api/chat", with(user(), json!({"stream": false}))).await;
    assert_eq!((chat.header("content-type"), chat.header("x-baton-route")), ("application/json", "direct test"));
    let chat = chat.json();
    assert_eq!(chat["message"], json!({"role": "assistant", "content": "Hello"}));
    assert_eq!((&chat["done"], &chat["eval_count"]), (&json!(true), &json!(4)));
    let prompt = json!({"model": "m", "prompt": "hi", "stream": false});
    let generated = server.post_to("/api/generate", prompt.clone()).await.json();
    assert_eq!((&generated["response"], &generated["done_reason"]), (&json!("Hello"), &json!("stop")));
    let lines = server.post_to("/api/generate", with(prompt, json!({"stream": true}))).await.lines();
    assert_eq!(lines.iter().map(|line| line["response"].as_str().unwrap()).collect::<String>(), "Hello");
}

#[tokio::test]
async fn a_generation_ends_with_its_tokens_and_takes_them_back() {
    let context = EventKind::Context { tokens: vec![7, 8, 9] }.of(0);
    let server = start(emits([started(0), text(0, "Hello"), context, finished(0)])).await;
    let prompt = json!({"model": "m", "prompt": "hi", "context": [7, 8], "options": {"num_ctx": 4096}});
    let lines = server.post_to("/api/generate", prompt.clone()).await.lines();
    assert_eq!(lines.last().unwrap()["context"], json!([7, 8, 9]));
    assert!(lines[..lines.len() - 1].iter().all(|line| line.get("context").is_none()), "{lines:?}");
    let whole = server.post_to("/api/generate", with(prompt.clone(), json!({"stream": false}))).await.json();
    assert_eq!((&whole["context"], &whole["response"]), (&json!([7, 8, 9]), &json!("Hello")));
    server.post_to("/api/generate", with(prompt.clone(), json!({"raw": true, "context": []}))).await;
    server.post_to("/api/chat", user()).await;
    let asked: Vec<_> =
        server.fake.requests.lock().unwrap().iter().map(|(r, _)| (r.context.clone(), r.num_ctx)).collect();
    let goes_on = (Some(vec![7, 8]), Some(4096));
    assert_eq!(asked, [goes_on.clone(), goes_on, (None, Some(4096)), (None, None)]);
    let refused = server.post_to("/api/generate", with(prompt, json!({"raw": true}))).await.failed_as_ollama(400);
    assert!(refused.contains("context"), "{refused}");
}

#[tokio::test]
async fn calls_are_whole_and_thoughts_apart() {
    let server = start(calling()).await;
    let call = json!([{"id": "call_1", "function": {"index": 0, "name": "f", "arguments": {"a": 1}}}]);
    let lines = server.post_to("/api/chat", user()).await.lines();
    let messages: Vec<_> = lines.iter().map(|line| line["message"].clone()).collect();
    assert_eq!(
        messages,
        [
            json!({"role": "assistant", "content": "", "thinking": "hm"}),
            json!({"role": "assistant", "content": "", "tool_calls": call}),
            json!({"role": "assistant", "content": ""})
        ]
    );
    assert_eq!(lines[2]["done_reason"], "stop");
    let whole = server.post_to("/api/chat", with(user(), json!({"stream": false}))).await.json();
    assert_eq!(whole["message"], json!({"role": "assistant", "content": "", "thinking": "hm", "tool_calls": call}));
}

#[tokio::test]
async fn a_call_that_is_no_object_is_text() {
    let call = |call| EventKind::ToolCall { call }.of(0);
    let begin = || call(ToolCallDelta::Begin { index: 0, id: "call_1".into(), name: "f".into() });
    let arguments = |fragment: &str| call(ToolCallDelta::Arguments { index: 0, fragment: fragment.into() });
    let end = || call(ToolCallDelta::End { index: 0 });
    for (events, expected) in [
        (vec![begin(), arguments("[1]"), end()], "{\"name\": \"f\", \"arguments\": [1]"),
        (vec![begin(), arguments("{\"a\": "), arguments("1")], "{\"name\": \"f\", \"arguments\": {\"a\": 1"),
    ] {
        let server = start(emits([vec![started(0)], events, vec![finished(0)]].concat())).await;
        let lines = server.post_to("/api/chat", user()).await.lines();
        let said: String = lines.iter().map(|line| line["message"]["content"].as_str().unwrap()).collect();
        let whole = server.post_to("/api/chat", with(user(), json!({"stream": false}))).await.json();
        assert_eq!((&*said, &whole["message"]), (expected, &json!({"role": "assistant", "content": expected})));
    }
}

#[tokio::test]
async fn log_probabilities_reach_both_forms() {
    let server = start(emits([started(0), text_with_logprobs(0, "é"), finished(0)])).await;
    let expected = json!([{"token": "é", "logprob": -0.5, "bytes": [195, 169],
        "top_logprobs": [{"token": "é", "logprob": -0.5, "bytes": [195, 169]}]}]);
    let body = with(user(), json!({"logprobs": true, "top_logprobs": 1}));
    assert_eq!(server.post_to("/api/chat", body.clone()).await.lines()[0]["logprobs"], expected);
    let whole = server.post_to("/api/chat", with(body, json!({"stream": false}))).await;
    assert_eq!(whole.json()["logprobs"], expected);
}

#[tokio::test]
async fn silence_is_broken_by_empty_deltas() {
    let start_comes = Latch::default();
    let acts = acts([
        Act::WaitFor(start_comes.clone()),
        Act::Emit(started(0)),
        Act::Emit(text(0, "a")),
        Act::Emit(finished(0)),
    ]);
    let server = start_with(acts, impatient()).await;
    let mut reply = server.open("/api/chat", user()).await;
    reply.until(|text| text.lines().count() >= 2).await;
    start_comes.open();
    let lines = reply.rest().await.lines();
    let texts: Vec<_> = lines.iter().map(|line| line["message"]["content"].as_str().unwrap()).collect();
    assert!(texts.len() > 3 && texts[0].is_empty() && texts.concat() == "a", "{texts:?}");
    assert_eq!(lines.iter().filter(|line| line["done"] == true).count(), 1);
}

#[tokio::test]
async fn a_stream_that_fails_is_never_done() {
    let broken = || [Act::Emit(started(0)), Act::Emit(text(0, "a")), Act::Fail(EngineError::lost("10.0.0.7").into())];
    let lines = start(acts(broken())).await.post_to("/api/chat", user()).await.lines();
    assert_eq!(lines.len(), 2);
    assert!(lines[1]["error"].as_str().is_some_and(|error| !error.contains("10.0.0.7")), "{lines:?}");
    assert!(lines.iter().all(|line| line["done"] != true));
    let panics = acts([Act::Emit(started(0)), Act::Emit(text(0, "a")), Act::Panic]);
    let reply = start(panics).await.post_to("/api/chat", user()).await;
    assert!(reply.lines()[1]["error"].is_string() && !reply.text.contains("secret"), "{}", reply.text);
}

#[tokio::test]
async fn failures_are_one_string_with_their_status() {
    let missing = RequestError::ModelNotFound { model: "x".into() };
    let thoughtless = RequestError::Incapable { model: "m".into(), capability: "thinking" };
    let full = RequestError::Overloaded { n_running: 4, n_waiting: 0, retry_after: SOON };
    for (error, status, words) in [
        (missing, 404, "model 'x' not found"),
        (full, 503, "4 running and 0 waiting"),
        (thoughtless, 400, "\"m\" does not support thinking"),
    ] {
        for stream in [false, true] {
            let server = start(before([Act::Fail(error.clone())])).await;
            let reply = server.post_to("/api/chat", with(user(), json!({ "stream": stream }))).await;
            let message = reply.failed_as_ollama(status);
            assert!(message.contains(words), "{message}");
        }
    }
    let server = start(hello()).await;
    let refused = |fields: Value| server.post_to("/api/chat", with(user(), fields));
    assert!(refused(json!({"format": "xml"})).await.failed_as_ollama(400).contains("format"));
    assert!(refused(json!({"tools": [{}]})).await.failed_as_ollama(400).contains("tools[0].function"));
    assert!(refused(json!({"think": 3})).await.failed_as_ollama(400).contains("think"));
    assert!(refused(json!({"options": {"top_p": 7}})).await.failed_as_ollama(400).contains("options.top_p"));
    server.post_to("/api/chat", json!("not an object")).await.failed_as_ollama(400);
    assert!(server.get("/api/nope").await.failed_as_ollama(404).contains("POST /api/chat"));
    server.get("/api/chat").await.failed_as_ollama(405);
    assert_eq!(server.n_live(), 0);
}

#[tokio::test]
async fn access_is_refused_in_the_dialects_words() {
    let server = start_with(hello(), closed_config("key")).await;
    server.post_to("/api/chat", user()).await.failed_as_ollama(401);
    let request = reqwest::Client::new().get(server.url("/api/tags"));
    let foreign = request.try_clone().unwrap().bearer_auth("key").header("origin", "https://evil.example");
    Reply::of(foreign.send().await.unwrap()).await.failed_as_ollama(403);
    assert_eq!(Reply::of(request.bearer_auth("key").send().await.unwrap()).await.status, 200);
}

#[tokio::test]
async fn a_handler_that_panics_answers_in_the_dialect_too() {
    let reply = start(Fake { models_panic: true, ..Fake::default() }).await.get("/api/tags").await;
    assert!(!reply.failed_as_ollama(500).contains("secret"));
}

#[tokio::test]
async fn a_request_without_a_prompt_loads_or_unloads() {
    let server = start(hello()).await;
    let loaded = server.post_to("/api/generate", json!({"model": "m"})).await.json();
    assert_eq!((&loaded["done_reason"], &loaded["response"]), (&json!("load"), &json!("")));
    let unloaded = server.post_to("/api/chat", json!({"model": "m", "messages": [], "keep_alive": 0})).await.json();
    assert_eq!((&unloaded["done_reason"], &unloaded["done"]), (&json!("unload"), &json!(true)));
    server.post_to("/api/generate", json!({"model": "nope"})).await.failed_as_ollama(404);
    assert!(server.fake.requests.lock().unwrap().is_empty());
}

#[tokio::test]
async fn models_are_listed_with_their_tags() {
    let server = start(hello()).await;
    let tags = server.get("/api/tags").await.json();
    let names: Vec<_> = tags["models"].as_array().unwrap().iter().map(|m| m["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["m:latest", "org/name:q4", "wei rd/ü:latest"]);
    assert_eq!(
        (&tags["models"][0]["size"], &tags["models"][0]["modified_at"]),
        (&json!(90), &json!("1970-01-01T00:00:01Z"))
    );
    let running = server.get("/api/ps").await.json();
    assert_eq!(running["models"].as_array().unwrap().len(), 2);
    assert_eq!((&running["models"][0]["size"], &running["models"][0]["context_length"]), (&json!(120), &json!(64)));
    for body in [json!({"model": "m"}), json!({"name": "M:latest"}), json!({"model": "alias:latest"})] {
        let show = server.post_to("/api/show", body).await.json();
        assert_eq!(
            (&show["capabilities"], &show["template"]),
            (&json!(["completion", "tools"]), &json!("{{ messages }}"))
        );
        assert_eq!(show["model_info"]["llama.context_length"], 128);
    }
    assert_eq!(server.post_to("/api/show", json!({"model": "x"})).await.failed_as_ollama(404), "model 'x' not found");
    server.post_to("/api/show", json!({"model": "wei rd/ü"})).await.failed_as_ollama(503);
    assert_eq!(server.get("/api/version").await.json()["version"].as_str().unwrap().split('.').count(), 3);
}

#[tokio::test]
async fn liveness_checks_are_answered() {
    let server = start(hello()).await;
    assert_eq!(server.get("/").await.text, "Ollama is running");
    for path in ["/", "/api/tags", "/api/version"] {
        let head = reqwest::Client::new().head(server.url(path)).send().await.unwrap();
        assert_eq!((head.status().as_u16(), head.text().await.unwrap().len()), (200, 0), "{path}");
    }
}

#[tokio::test]
async fn a_present_model_needs_no_pulling_and_no_other_can_be_pulled() {
    let server = start(hello()).await;
    let pulled = server.post_to("/api/pull", json!({"model": "m:latest"})).await;
    assert_eq!(pulled.header("content-type"), "application/x-ndjson");
    assert_eq!(pulled.lines(), [json!({"status": "pulling manifest"}), json!({"status": "success"})]);
    let whole = server.post_to("/api/pull", json!({"name": "m", "stream": false})).await;
    assert_eq!(whole.json(), json!({"status": "success"}));
    let missing = server.post_to("/api/pull", json!({"model": "x"})).await.failed_as_ollama(404);
    assert!(missing.starts_with("model 'x' not found") && missing.contains("allow_model_management"), "{missing}");
    for path in ["/api/create", "/api/copy", "/api/push"] {
        assert!(server.post_to(path, json!({})).await.failed_as_ollama(403).contains("operator"));
    }
    let delete = reqwest::Client::new().delete(server.url("/api/delete")).json(&json!({"model": "m"}));
    Reply::of(delete.send().await.unwrap()).await.failed_as_ollama(403);
}

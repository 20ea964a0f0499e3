use baton_schemas::EngineError;

use super::*;

fn body(fields: Value) -> Value {
    let mut body = json!({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

impl Reply {
    /// Checks status and envelope of a failure in Anthropic's dialect; returns the error.
    fn failed_as_anthropic(&self, status: u16, kind: &str) -> Value {
        assert_eq!(self.status, status, "{}", self.text);
        let body = self.json();
        assert_eq!((&body["type"], &body["error"]["type"]), (&json!("error"), &json!(kind)), "{body}");
        body["error"].clone()
    }
}

#[tokio::test]
async fn a_whole_message_is_one_object() {
    let server = start(hello()).await;
    let reply = server.post_to("/v1/messages?beta=true", body(json!({"stop_sequences": ["x"]}))).await;
    assert_eq!(reply.header("x-baton-route"), "direct test");
    let message = reply.json();
    assert_eq!((&message["type"], &message["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!(message["content"], json!([{"type": "text", "text": "Hello", "citations": null}]));
    assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!("end_turn"), &Value::Null));
    assert_eq!(
        (&message["usage"]["input_tokens"], &message["usage"]["cache_read_input_tokens"]),
        (&json!(3), &json!(2))
    );
    assert_eq!(message["usage"]["output_tokens"], 4);
    let requests = server.fake.requests.lock().unwrap();
    assert_eq!((requests[0].0.max_tokens, &*requests[0].0.stop), (Some(9), &["x".to_owned()][..]));
}

#[tokio::test]
async fn a_stream_begins_with_what_was_cached_and_ends_with_its_reason() {
    let EventKind::Finished { reason, n_completion, n_reasoning, timings, .. } = finished(0).kind else {
        panic!("not an end")
    };
    let stopped = EventKind::Finished { reason, stop: Some("END".into()), n_completion, n_reasoning, timings }.of(0);
    let server = start(emits([started(0), text(0, "Hel"), text(0, "lo"), stopped])).await;
    let reply = server.post_to("/v1/messages", body(json!({"stream": true}))).await;
    assert_eq!(reply.header("content-type"), "text/event-stream");
    let events = reply.named_events();
    assert!(events.iter().all(|(name, data)| data["type"] == *name));
    let names: Vec<_> = events.iter().map(|(name, _)| *name).collect();
    let block = ["content_block_start", "ping", "content_block_delta", "content_block_delta", "content_block_stop"];
    assert_eq!(names, [&["message_start"], &block[..], &["message_delta", "message_stop"]].concat());
    let started = &events[0].1["message"]["usage"];
    assert_eq!((&started["input_tokens"], &started["cache_read_input_tokens"]), (&json!(3), &json!(2)));
    let delta = &events[6].1;
    assert_eq!(
        delta["delta"],
        json!({"stop_reason": "stop_sequence", "stop_sequence": "END", "stop_details": null, "container": null})
    );
    assert_eq!(delta["usage"]["output_tokens"], 4);
}

#[tokio::test]
async fn silence_is_broken_by_pings_after_the_first_event_and_comments_before() {
    let [start_comes, text_comes] = [Latch::default(), Latch::default()];
    let acts = acts([
        Act::WaitFor(start_comes.clone()),
        Act::Emit(started(0)),
        Act::WaitFor(text_comes.clone()),
        Act::Emit(text(0, "a")),
        Act::Emit(finished(0)),
    ]);
    let server = start_with(acts, impatient()).await;
    let mut reply = server.open("/v1/messages", body(json!({"stream": true}))).await;
    reply.until(|text| text.starts_with(":\n\n")).await;
    start_comes.open();
    reply.until(|text| text.contains("event: ping")).await;
    text_comes.open();
    let reply = reply.rest().await;
    let names: Vec<_> = reply.named_events().into_iter().map(|(name, _)| name.to_owned()).collect();
    assert_eq!((&*names[0], &*names[1]), ("message_start", "ping"), "{names:?}");
    assert_eq!(names.last().unwrap(), "message_stop");
}

#[tokio::test]
async fn a_stream_that_fails_ends_with_an_error() {
    let broken =
        acts([Act::Emit(started(0)), Act::Emit(text(0, "a")), Act::Fail(EngineError::lost("10.0.0.7").into())]);
    let reply = start(broken).await.post_to("/v1/messages", body(json!({"stream": true}))).await;
    let events = reply.named_events();
    let (name, data) = events.last().unwrap();
    assert_eq!((*name, &data["error"]["type"]), ("error", &json!("overloaded_error")));
    assert!(!reply.text.contains("10.0.0.7") && events.iter().all(|(name, _)| *name != "message_stop"));
}

#[tokio::test]
async fn refusals_are_in_anthropics_envelope() {
    let config = closed_config("key");
    let server = start_with(hello(), config).await;
    server.post_to("/v1/messages", body(json!({}))).await.failed_as_anthropic(401, "authentication_error");
    let request = reqwest::Client::new().post(server.url("/v1/messages")).header("x-api-key", "key");
    let with_key = request.header("anthropic-version", "2023-06-01").json(&body(json!({}))).send().await.unwrap();
    assert_eq!(Reply::of(with_key).await.status, 200);

    let server = start(hello()).await;
    let refused = |fields: Value| server.post_to("/v1/messages", body(fields));
    let error = refused(json!({"max_tokens": null})).await.failed_as_anthropic(400, "invalid_request_error");
    assert!(error["message"].as_str().unwrap().contains("max_tokens"), "{error}");
    refused(json!({"tools": [{"name": "a b"}]})).await.failed_as_anthropic(400, "invalid_request_error");
    server.get("/v1/messages").await.failed_as_anthropic(405, "invalid_request_error");
    let missing = start(before([Act::Fail(RequestError::ModelNotFound { model: "x".into() })])).await;
    for stream in [false, true] {
        let reply = missing.post_to("/v1/messages", body(json!({ "stream": stream }))).await;
        reply.failed_as_anthropic(404, "not_found_error");
    }
    let panics = start(Fake { models_panic: true, ..Fake::default() }).await;
    let counted = panics.post_to("/v1/messages/count_tokens", body(json!({}))).await;
    let error = counted.failed_as_anthropic(500, "api_error");
    assert!(!error["message"].as_str().unwrap().contains("secret"));
}

#[tokio::test]
async fn tokens_are_counted_without_generating() {
    let server = start(hello()).await;
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    let counted = server.post_to("/v1/messages/count_tokens", body).await;
    assert_eq!(counted.json(), json!({"input_tokens": "user: hi\n".len()}));
    assert!(server.fake.requests.lock().unwrap().is_empty());
    let unknown = json!({"model": "x", "messages": [{"role": "user", "content": "hi"}]});
    server.post_to("/v1/messages/count_tokens", unknown).await.failed_as_anthropic(404, "not_found_error");
}

#[tokio::test]
async fn calls_are_blocks_and_thinking_is_one_for_those_who_asked() {
    let server = start(calling()).await;
    let tools = json!({"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}});
    let call =
        json!({"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}, "caller": {"type": "direct"}});
    let whole = server.post_to("/v1/messages?beta=true", body(tools.clone())).await.json();
    assert_eq!((&whole["content"], &whole["stop_reason"]), (&json!([call]), &json!("tool_use")));
    let mut asking = body(tools);
    asking["thinking"] = json!({"type": "enabled", "budget_tokens": 1024});
    let whole = server.post_to("/v1/messages", asking.clone()).await.json();
    assert_eq!(whole["content"][0]["thinking"], "hm");
    assert_eq!(whole["content"][1], call);
    asking["stream"] = json!(true);
    let reply = server.post_to("/v1/messages", asking).await;
    let events = reply.named_events();
    let deltas: Vec<_> = events.iter().filter_map(|(_, data)| data["delta"]["type"].as_str()).collect();
    assert_eq!(deltas, ["thinking_delta", "signature_delta", "input_json_delta", "input_json_delta"]);
    let end = events.iter().find(|(name, _)| *name == "message_delta").unwrap();
    assert_eq!(end.1["delta"]["stop_reason"], "tool_use");
    assert!(server.fake.requests.lock().unwrap().iter().all(|(request, _)| request.tools.is_forced()));
}

#[tokio::test]
async fn a_count_is_of_the_prompt_with_its_tools() {
    let server = start(hello()).await;
    let count = |extra: Value| server.post_to("/v1/messages/count_tokens", body(extra));
    let without = count(json!({})).await.json()["input_tokens"].as_u64().unwrap();
    let tools = json!([{"name": "f", "input_schema": {"type": "object"}}]);
    let with = count(json!({"tools": tools})).await.json()["input_tokens"].as_u64().unwrap();
    let told_not_to = count(json!({"tools": tools, "tool_choice": {"type": "none"}})).await.json();
    assert!(with > without);
    assert_eq!(told_not_to["input_tokens"], without);
}

#[tokio::test]
async fn anthropics_clients_read_the_models_in_their_form() {
    let server = start(hello()).await;
    let get = async |path: &str| {
        let request = reqwest::Client::new().get(server.url(path)).header("anthropic-version", "2023-06-01");
        Reply::of(request.send().await.unwrap()).await
    };
    let list = get("/v1/models").await.json();
    let ids: Vec<&str> = list["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!((&list["first_id"], &list["has_more"]), (&json!(ids[0]), &json!(false)), "{list}");
    assert_eq!(list["last_id"], *ids.last().unwrap());
    assert_eq!(list["data"][0]["type"], "model");
    assert!(list["data"][0]["created_at"].as_str().is_some_and(|at| at.ends_with('Z')), "{list}");
    let shown = get(&format!("/v1/models/{}", ids[0])).await.json();
    assert_eq!(shown, list["data"][0]);
    let unknown = get("/v1/models/nope").await;
    assert_eq!((unknown.status, &unknown.json()["error"]["type"]), (404, &json!("not_found_error")));
    assert_eq!(unknown.json()["type"], "error");
}

#[tokio::test]
async fn routes_answer_without_v1_too() {
    let server = start(hello()).await;
    let said = json!([{"role": "user", "content": "hi"}]);
    for (path, body) in [
        ("/chat/completions", json!({"model": "m", "messages": said})),
        ("/completions", json!({"model": "m", "prompt": "hi"})),
        ("/responses", json!({"model": "m", "input": "hi"})),
        ("/messages", json!({"model": "m", "max_tokens": 9, "messages": said})),
    ] {
        let (bare, whole) =
            (server.post_to(path, body.clone()).await, server.post_to(&format!("/v1{path}"), body).await);
        assert_eq!((bare.status, whole.status), (200, 200), "{path}");
        let keys = |reply: &Reply| reply.json().as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(keys(&bare), keys(&whole), "{path}");
        let wrong = server.get(path).await;
        assert_eq!((wrong.status, wrong.header("allow")), (405, "POST"), "{path}");
    }
    assert_eq!(server.get("/models").await.json(), server.get("/v1/models").await.json());
    // Errors have the envelope of the route's dialect.
    assert_eq!(server.post_to("/messages", json!({})).await.json()["type"], "error");
    let document = server.get("/openapi.json").await.json();
    assert!(document["paths"]["/v1/models"].is_object() && document["paths"]["/models"].is_null());
}

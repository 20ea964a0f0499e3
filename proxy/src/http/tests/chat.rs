use super::*;

#[tokio::test]
async fn a_whole_reply() {
    let server = start(hello()).await;
    let reply = server.chat(json!({"max_tokens": 7, "seed": 3})).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    assert_eq!(reply.header("content-type"), "application/json");
    assert_eq!(reply.header("x-baton-route"), "direct test");
    let body = reply.json();
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert!(body["created"].is_u64());
    assert_eq!(body["object"], "chat.completion");
    assert_eq!(body["system_fingerprint"], concat!("baton-", env!("CARGO_PKG_VERSION")));
    assert_eq!(
        body["choices"],
        json!([{"index": 0, "message": {"role": "assistant", "content": "Hello", "refusal": null},
                "logprobs": null, "finish_reason": "stop"}])
    );
    assert_eq!(
        body["usage"],
        json!({"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9,
               "prompt_tokens_details": {"cached_tokens": 2}, "completion_tokens_details": {"reasoning_tokens": 0}})
    );
    assert_eq!(body["timings"]["predicted_per_second"], 500.0);
    let requests = server.fake.requests.lock().unwrap();
    assert_eq!((requests[0].0.max_tokens, requests[0].0.sampling.seed), (Some(7), 3));
    assert_eq!(requests[0].1.request_id, reply.header("x-request-id"));
}

#[tokio::test]
async fn calls_and_reasoning_have_openais_shape() {
    let server = start(calling()).await;
    let whole = server.chat(json!({})).await.json();
    assert_eq!(
        whole["choices"],
        json!([{"index": 0, "message": {"role": "assistant", "content": null, "refusal": null,
                "reasoning_content": "hm", "reasoning": "hm", "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
                "logprobs": null, "finish_reason": "tool_calls"}])
    );
    assert_eq!(whole["usage"]["completion_tokens_details"]["reasoning_tokens"], 1);

    let chunks = server.chat(json!({"stream": true})).await.chunks();
    let deltas: Vec<_> = chunks.iter().map(|chunk| chunk["choices"][0]["delta"].clone()).collect();
    let fragment = |text: &str| json!({"tool_calls": [{"index": 0, "function": {"arguments": text}}]});
    assert_eq!(
        deltas,
        [
            json!({"role": "assistant", "content": ""}),
            json!({"reasoning_content": "hm", "reasoning": "hm"}),
            json!({"tool_calls": [
                {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}]}),
            fragment("{\"a\": "),
            fragment("1}"),
            json!({}),
        ]
    );
    assert_eq!(chunks[5]["choices"][0]["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn a_stream_keeps_its_order_id_and_time() {
    let server = start(hello()).await;
    let reply = server.chat(json!({"stream": true, "stream_options": {"include_usage": true}})).await;
    assert_eq!(reply.header("content-type"), "text/event-stream");
    assert_eq!(reply.header("cache-control"), "no-cache");
    assert_eq!(reply.header("x-accel-buffering"), "no");
    assert_eq!(reply.header("x-baton-route"), "direct test");
    assert_eq!(reply.events().last(), Some(&"[DONE]"));

    let chunks = reply.chunks();
    let deltas: Vec<_> = chunks.iter().map(|chunk| chunk["choices"][0]["delta"].clone()).collect();
    assert_eq!(
        deltas,
        [
            json!({"role": "assistant", "content": ""}),
            json!({"content": "Hel"}),
            json!({"content": "lo"}),
            json!({}),
            json!(null)
        ]
    );
    assert_eq!(chunks[3]["choices"][0]["finish_reason"], "stop");
    assert_eq!(chunks[4]["choices"], json!([]));
    assert_eq!(chunks[4]["usage"]["completion_tokens"], 4);
    assert_eq!(chunks[4]["timings"]["cache_n"], 2);
    for chunk in &chunks {
        assert_eq!((&chunk["id"], &chunk["created"]), (&chunks[0]["id"], &chunks[0]["created"]));
        assert_eq!(chunk["object"], "chat.completion.chunk");
    }
    let plain = server.chat(json!({"stream": true})).await;
    assert!(plain.chunks().iter().all(|chunk| chunk.get("usage").is_none()));
}

#[tokio::test]
async fn choices_are_in_order_whichever_comes_first() {
    let fake = || emits([started(1), started(0), text(1, "b"), text(0, "a"), finished(1), text(0, "A"), finished(0)]);
    let server = start(fake()).await;
    let body = server.chat(json!({"n": 2})).await.json();
    let contents: Vec<_> =
        body["choices"].as_array().unwrap().iter().map(|c| (&c["index"], &c["message"]["content"])).collect();
    assert_eq!(contents, [(&json!(0), &json!("aA")), (&json!(1), &json!("b"))]);
    assert_eq!(body["usage"]["prompt_tokens"], 5);
    assert_eq!(body["usage"]["completion_tokens"], 8);

    let reply = server.chat(json!({"n": 2, "stream": true})).await;
    let indexes: Vec<_> = reply.chunks().iter().map(|chunk| chunk["choices"][0]["index"].as_u64().unwrap()).collect();
    assert_eq!(indexes, [0, 1, 1, 0, 1, 0, 0]);
    let roles = reply.chunks().iter().filter(|chunk| chunk["choices"][0]["delta"]["role"] == "assistant").count();
    assert_eq!(roles, 2);
}

#[tokio::test]
async fn log_probabilities_reach_both_forms() {
    let server = start(emits([started(0), text_with_logprobs(0, "é"), finished(0)])).await;
    let expected = json!({"content": [{"token": "é", "logprob": -0.5, "bytes": [195, 169],
        "top_logprobs": [{"token": "é", "logprob": -0.5, "bytes": [195, 169]}]}], "refusal": null});
    let fields = json!({"logprobs": true, "top_logprobs": 1});
    assert_eq!(server.chat(fields.clone()).await.json()["choices"][0]["logprobs"], expected);
    let mut fields = fields;
    fields["stream"] = json!(true);
    assert_eq!(server.chat(fields).await.chunks()[1]["choices"][0]["logprobs"], expected);
    // Not asked for, not sent.
    assert_eq!(server.chat(json!({})).await.json()["choices"][0]["logprobs"], json!(null));
}

#[tokio::test]
async fn text_of_any_script_arrives_whole() {
    let words = ["naïve ", "日本語 ", "🏳️‍🌈 ", "\u{0}\"\\\n", "\u{2028}data: x\n\n"];
    let events = [started(0)].into_iter().chain(words.map(|word| text(0, word))).chain([finished(0)]);
    let server = start(emits(events)).await;
    let whole = server.chat(json!({})).await.json();
    assert_eq!(whole["choices"][0]["message"]["content"], words.concat());
    let streamed: String = server
        .chat(json!({"stream": true}))
        .await
        .chunks()
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(streamed, words.concat());
}

#[tokio::test]
async fn silence_before_and_in_a_stream_is_broken_by_heartbeats() {
    let [text_comes, end_comes] = [Latch::default(), Latch::default()];
    let slow = acts([
        Act::Emit(started(0)),
        Act::WaitFor(text_comes.clone()),
        Act::Emit(text(0, "a")),
        Act::WaitFor(end_comes.clone()),
        Act::Emit(finished(0)),
    ]);
    let stream = || chat_body(json!({"stream": true}));
    let server = start_with(slow, impatient()).await;
    let mut reply = server.open("/v1/chat/completions", stream()).await;
    reply.until(|text| text.starts_with(":\n\n:\n\n:\n\n")).await;
    text_comes.open();
    reply.until(|text| text.split_once("\"a\"").is_some_and(|(_, later)| later.contains("\n\n:\n\n"))).await;
    end_comes.open();
    let reply = reply.rest().await;
    // Known by the time the head went out, though no token was.
    assert_eq!(reply.header("x-baton-route"), "direct test");
    assert_eq!(reply.events().last(), Some(&"[DONE]"));

    let admitted = Latch::default();
    let queued = Fake { before: vec![Act::WaitFor(admitted.clone())], ..hello() };
    let server = start_with(queued, impatient()).await;
    let mut reply = server.open("/v1/chat/completions", stream()).await;
    reply.until(|text| text.starts_with(":\n\n")).await;
    admitted.open();
    let reply = reply.rest().await;
    assert_eq!(reply.header("x-baton-route"), "pending");
    let named = reply.events().iter().filter(|event| **event == ": x-baton-route: direct test").count();
    assert_eq!(named, 1, "{}", reply.text);
    assert_eq!(reply.chunks()[1]["choices"][0]["delta"]["content"], "Hel");
    assert_eq!(reply.events().last(), Some(&"[DONE]"));
}

#[tokio::test]
async fn a_fast_stream_has_no_heartbeat() {
    let reply = start(hello()).await.chat(json!({"stream": true})).await;
    assert!(reply.events().iter().all(|event| *event != ":"));
}

#[tokio::test]
async fn models_are_found_by_any_spelling_of_their_id() {
    let server = start(hello()).await;
    let list = server.get("/v1/models").await.json();
    assert_eq!(list["object"], "list");
    let owned = json!({"id": "m", "object": "model", "created": 1, "owned_by": "baton", "aliases": ["alias"]});
    assert_eq!(list["data"][0], owned);
    assert_eq!(list["data"][1], json!({"id": "org/name:q4", "object": "model", "created": 2, "owned_by": "baton"}));
    for path in ["m", "M:latest", "alias", "Alias"] {
        assert_eq!(server.get(&format!("/v1/models/{path}")).await.json(), owned, "{path}");
    }
    for path in ["org/name:q4", "org%2Fname%3Aq4", "org%2fname:q4", "ORG/Name:Q4"] {
        assert_eq!(server.get(&format!("/v1/models/{path}")).await.json()["id"], "org/name:q4", "{path}");
    }
    assert_eq!(server.get("/v1/models/wei%20rd/%C3%BC").await.json()["id"], "wei rd/ü");
    for path in ["nope", "org", "org%2F%FF", "m/"] {
        server.get(&format!("/v1/models/{path}")).await.failed(404, "not_found_error", Some("model_not_found"));
    }
    let head = reqwest::Client::new().head(server.url("/v1/models")).send().await.unwrap();
    assert_eq!((head.status().as_u16(), head.text().await.unwrap().len()), (200, 0));
}

#[tokio::test]
async fn health_tells_whether_a_request_would_be_answered() {
    let server = start(hello()).await;
    for path in ["/health", "/v1/health"] {
        let reply = server.get(path).await;
        assert_eq!((reply.status, reply.text.as_str()), (200, r#"{"status":"ok"}"#));
    }
    let loading = Fake { readiness: Some(Readiness::Loading { reason: "loading m".into() }), ..Fake::default() };
    let reply = start(loading).await.get("/health").await;
    reply.failed(503, "unavailable_error", None);
    assert_eq!((reply.json()["status"].as_str(), reply.header("retry-after")), (Some("loading"), "2"));
    let gone = Fake { readiness: Some(Readiness::Unavailable { reason: "it crashed".into() }), ..Fake::default() };
    let reply = start(gone).await.get("/health").await;
    assert_eq!(reply.failed(503, "unavailable_error", None)["message"], "it crashed");
    assert_eq!(reply.json()["status"], "unavailable");
}

#[tokio::test]
async fn functions_are_called_in_their_own_form() {
    let server = start(calling()).await;
    let functions = json!({"functions": [{"name": "f"}], "function_call": {"name": "f"}});
    let choice = server.chat(functions.clone()).await.json()["choices"][0].clone();
    assert_eq!(choice["message"]["function_call"], json!({"name": "f", "arguments": "{\"a\": 1}"}));
    assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("function_call"), &Value::Null));
    assert!(choice["message"].get("tool_calls").is_none());
    let mut streamed = functions;
    streamed["stream"] = json!(true);
    let chunks = server.chat(streamed).await.chunks();
    let calls: Vec<_> = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]["function_call"]).collect();
    let name: String = calls.iter().filter_map(|call| call["name"].as_str()).collect();
    let arguments: String = calls.iter().filter_map(|call| call["arguments"].as_str()).collect();
    assert_eq!((&*name, &*arguments), ("f", "{\"a\": 1}"));
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "function_call");
}

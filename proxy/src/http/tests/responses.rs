use baton_schemas::EngineError;

use super::*;

fn body(fields: Value) -> Value {
    let mut body = json!({"model": "m", "input": "hi"});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn a_whole_response_is_one_object() {
    let server = start(hello()).await;
    let reply = server.post_to("/v1/responses", body(json!({"max_output_tokens": 9}))).await;
    assert_eq!(reply.header("x-baton-route"), "direct test");
    let response = reply.json();
    assert_eq!((&response["status"], &response["store"]), (&json!("completed"), &json!(false)));
    assert_eq!(response["output"][0]["content"][0]["text"], "Hello");
    assert_eq!((&response["usage"]["input_tokens"], &response["usage"]["output_tokens"]), (&json!(5), &json!(4)));
    assert_eq!(response["usage"]["input_tokens_details"]["cached_tokens"], 2);
    assert_eq!((&response["temperature"], &response["top_p"]), (&json!(0.8), &json!(0.25)), "as tokens were drawn");
    assert_eq!(server.fake.requests.lock().unwrap()[0].0.max_tokens, Some(9));
}

#[tokio::test]
async fn a_stream_is_numbered_and_ends_with_the_whole_response() {
    let server = start(hello()).await;
    let reply = server.post_to("/v1/responses", body(json!({"stream": true}))).await;
    assert_eq!(reply.header("content-type"), "text/event-stream");
    let events = reply.named_events();
    for (idx, (name, data)) in events.iter().enumerate() {
        assert_eq!((data["sequence_number"].as_u64(), data["type"].as_str()), (Some(idx as u64), Some(*name)));
    }
    let names: Vec<_> = events.iter().map(|(name, _)| name.trim_start_matches("response.")).collect();
    assert_eq!(
        names,
        [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed"
        ]
    );
    let last = &events.last().unwrap().1["response"];
    assert_eq!((&events[0].1["response"]["top_p"], &last["top_p"]), (&json!(0.25), &json!(0.25)));
    assert_eq!(last["output"][0]["content"][0]["text"], "Hello");
    assert_eq!(
        (&last["id"], &last["created_at"]),
        (&events[0].1["response"]["id"], &events[0].1["response"]["created_at"])
    );
}

#[tokio::test]
async fn a_response_without_text_has_all_its_events_too() {
    let server = start(emits([started(0), finished(0)])).await;
    let reply = server.post_to("/v1/responses", body(json!({"stream": true}))).await;
    let names: Vec<_> = reply.named_events().into_iter().map(|(name, _)| name.to_owned()).collect();
    assert_eq!(names.len(), 8, "{names:?}");
    assert_eq!(names.last().unwrap(), "response.completed");
}

#[tokio::test]
async fn a_stream_that_fails_says_so_and_never_completes() {
    let broken =
        acts([Act::Emit(started(0)), Act::Emit(text(0, "a")), Act::Fail(EngineError::lost("10.0.0.7").into())]);
    let reply = start(broken).await.post_to("/v1/responses", body(json!({"stream": true}))).await;
    let events = reply.named_events();
    let (name, data) = events.last().unwrap();
    assert_eq!((*name, &data["response"]["status"]), ("response.failed", &json!("failed")));
    assert!(data["response"]["error"]["message"].as_str().is_some_and(|m| !m.contains("10.0.0.7")), "{data}");
    assert!(events.iter().all(|(name, _)| *name != "response.completed"));
    let early = start(before([Act::Fail(EngineError::lost("10.0.0.7").into())])).await;
    for stream in [false, true] {
        let refused = early.post_to("/v1/responses", body(json!({ "stream": stream }))).await;
        refused.failed(503, "unavailable_error", None);
    }
    let refused = early.post_to("/v1/responses", body(json!({"previous_response_id": "resp_1"}))).await;
    assert_eq!(
        refused.failed(400, "invalid_request_error", Some("unsupported_parameter"))["param"],
        "previous_response_id"
    );
}

#[tokio::test]
async fn reasoning_and_calls_are_items() {
    let server = start(calling()).await;
    let tool = json!({"type": "function", "name": "f", "parameters": {"type": "object"}});
    let asked = json!({"tools": [tool], "tool_choice": "required", "parallel_tool_calls": false});
    let whole = server.post_to("/v1/responses", body(asked.clone())).await.json();
    assert_eq!((&whole["tool_choice"], &whole["tools"][0]["name"]), (&json!("required"), &json!("f")));
    let output = &whole["output"];
    assert_eq!(output[0]["content"], json!([{"type": "reasoning_text", "text": "hm"}]));
    assert_eq!(
        (&output[1]["type"], &output[1]["call_id"], &output[1]["arguments"], &output[1]["status"]),
        (&json!("function_call"), &json!("call_1"), &json!("{\"a\": 1}"), &json!("completed"))
    );
    assert_eq!(whole["usage"]["output_tokens_details"]["reasoning_tokens"], 1);
    let mut streamed = body(asked);
    streamed["stream"] = json!(true);
    let reply = server.post_to("/v1/responses", streamed).await;
    let events = reply.named_events();
    let names: Vec<_> = events.iter().skip(2).map(|(name, _)| name.trim_start_matches("response.")).collect();
    let reasoning = ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"];
    let call = [
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ];
    assert_eq!(names, [&reasoning[..], &call[..]].concat());
    assert_eq!(events.last().unwrap().1["response"]["output"][1]["name"], "f");
}

#[tokio::test]
async fn tools_of_openais_servers_are_skipped_with_a_warning() {
    let server = start(hello()).await;
    let hosted = json!([{"type": "web_search"}, {"type": "mcp", "server_label": "s"}]);
    for stream in [false, true] {
        let reply = server.post_to("/v1/responses", body(json!({"tools": hosted, "stream": stream}))).await;
        assert_eq!(
            reply.header("x-baton-warning"),
            "tools that run on the API owner's servers are not offered: web_search, mcp"
        );
    }
    assert_eq!(server.post_to("/v1/responses", body(json!({}))).await.header("x-baton-warning"), "");
    let refused = server.post_to("/v1/responses", body(json!({"tools": [{"type": "local_shell"}]}))).await;
    assert_eq!(refused.failed(400, "invalid_request_error", Some("unsupported_parameter"))["param"], "tools[0].type");
}

#[tokio::test]
async fn calls_go_back_to_the_clients_namespaces_and_custom_tools() {
    let server = start(calling()).await;
    let space = |kind: &str| json!([{"type": "namespace", "name": "n", "tools": [{"type": kind, "name": "f"}]}]);
    let whole = server.post_to("/v1/responses", body(json!({"tools": space("function")}))).await.json();
    // The scripted engine calls `f`, which is not the name that the model has seen.
    assert_eq!((&whole["output"][1]["name"], &whole["output"][1]["namespace"]), (&json!("f"), &json!(null)));
    assert_eq!(
        whole["tools"],
        json!([{"type": "namespace", "name": "n", "description": "", "tools": [
        {"type": "function", "name": "f", "description": null, "strict": null,
            "parameters": {"type": "object", "properties": {}}}]}])
    );
    assert_eq!(server.fake.requests.lock().unwrap()[0].0.tools.tools[0].name, "n__f");
    let tools = json!([{"type": "custom", "name": "f"}]);
    let whole = server.post_to("/v1/responses", body(json!({ "tools": tools }))).await.json();
    let call = &whole["output"][1];
    // The scripted arguments are `{"a": 1}`, so they are the input as they are.
    assert_eq!((&call["type"], &call["input"]), (&json!("custom_tool_call"), &json!("{\"a\": 1}")));
    assert!(call["id"].as_str().is_some_and(|id| id.starts_with("ctc_")), "{call}");
}

use super::*;

#[tokio::test]
async fn text_becomes_tokens_and_tokens_text() {
    let server = start(hello()).await;
    let tokens = server.post_to("/tokenize", json!({"content": "ab", "add_special": true})).await;
    assert_eq!(tokens.json(), json!({"tokens": [97, 98, 1, 1]}));
    let text = server.post_to("/detokenize", json!({"tokens": [97, 98], "model": "m"})).await;
    assert_eq!(text.json(), json!({"content": "<97><98>", "prompt": "<97><98>"}));
    let pieces = server.post_to("/tokenize", json!({"content": "aé", "with_pieces": true})).await.json();
    assert_eq!(pieces["tokens"][0], json!({"id": 97, "piece": "a"}));
    assert_eq!(pieces["tokens"][1], json!({"id": 195, "piece": [195]}));
    let vllms = server.post_to("/tokenize", json!({"prompt": "ab", "add_special_tokens": false})).await;
    assert_eq!(vllms.json(), json!({"tokens": [97, 98, 0, 1], "count": 4}));
    let messages = json!([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]);
    let prompt = server.post_to("/apply-template", json!({ "messages": messages })).await;
    assert_eq!(prompt.json(), json!({"prompt": "system: s\nuser: u\n"}));
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let prompt = server.post_to("/apply-template", json!({ "messages": messages, "tools": tools })).await;
    assert_eq!(prompt.json(), json!({"prompt": "tool: f\nsystem: s\nuser: u\n"}));
    server.post_to("/tokenize", json!({"content": 3})).await.failed(400, "invalid_request_error", None);
    let unknown = json!({"content": "a", "model": "x"});
    server.post_to("/tokenize", unknown).await.failed(404, "not_found_error", Some("model_not_found"));
}

#[tokio::test]
async fn props_tell_the_model_and_no_path() {
    let server = start(hello()).await;
    let props = server.get("/props").await.json();
    assert_eq!((&props["total_slots"], &props["model_path"]), (&json!(2), &json!("m")));
    assert_eq!(props["default_generation_settings"]["n_ctx"], 64);
    assert_eq!(props["chat_template"], "{{ messages }}");
    let tokenizer = server.get("/tokenizer_info").await.json();
    assert_eq!((&tokenizer["chat_template"], &tokenizer["model_max_length"]), (&json!("{{ messages }}"), &json!(64)));
    assert_eq!(tokenizer["pad_token"], Value::Null);
    assert_eq!(server.get("/props?model=org/name:q4").await.json()["model_alias"], "org/name:q4");
    server.get("/props?model=x").await.failed(404, "not_found_error", Some("model_not_found"));
}

#[tokio::test]
async fn slots_tell_how_many_are_taken() {
    let busy = |active_slots| Fake { active_slots, ..Fake::default() };
    let slots = start(busy(1)).await.get("/slots").await.json();
    let slot =
        |id: u32, is_processing| json!({"id": id, "n_ctx": 64, "speculative": false, "is_processing": is_processing});
    assert_eq!(slots, json!([slot(0, true), slot(1, false)]));
    let server = start(busy(2)).await;
    assert_eq!(server.get("/slots").await.status, 200);
    server.get("/slots?fail_on_no_slot=1").await.failed(503, "unavailable_error", Some("queue_full"));
}

#[tokio::test]
async fn a_completion_has_llama_servers_form() {
    let server = start(hello()).await;
    let whole = server.post_to("/completion", json!({"prompt": "hi", "n_predict": 4})).await;
    assert_eq!(whole.header("x-baton-route"), "direct test");
    let reply = whole.json();
    assert_eq!((&reply["content"], &reply["stop"]), (&json!("Hello"), &json!(true)), "{reply}");
    assert_eq!((&reply["tokens_evaluated"], &reply["tokens_predicted"]), (&json!(5), &json!(4)));
    assert!(reply["timings"]["predicted_n"].is_u64() && reply["stop_type"].is_string(), "{reply}");
    // Without a name, the first model answers.
    let name = server.get("/v1/models").await.json()["data"][0]["id"].clone();
    assert_eq!(reply["model"], name);
    let streamed = server.post_to("/completion", json!({"prompt": "hi", "stream": true})).await;
    let events: Vec<Value> = streamed
        .events()
        .iter()
        .map(|event| serde_json::from_str(event.trim_start_matches("data: ")).unwrap())
        .collect();
    let (last, first) = events.split_last().unwrap();
    let text: String = first.iter().map(|event| event["content"].as_str().unwrap()).collect();
    assert_eq!((text.as_str(), &last["content"], &last["stop"]), ("Hello", &json!(""), &json!(true)));
    let wrong = server.post_to("/completion", json!({"prompt": "hi", "n_probs": 2})).await;
    assert_eq!(wrong.failed(400, "invalid_request_error", None)["param"], "n_probs");
}

#[tokio::test]
async fn infill_and_embedding_have_llama_servers_form() {
    let server = start(hello()).await;
    let gap = json!({"input_prefix": "a", "prompt": "b", "input_suffix": "c", "n_predict": 4});
    assert_eq!(server.post_to("/infill", gap).await.json()["content"], "Hello");
    let input = server.fake.requests.lock().unwrap()[0].0.input.clone();
    assert_eq!(input, baton_schemas::generate::Input::Infill { prefix: "ab".into(), suffix: "c".into() });
    let vectors = server.post_to("/embedding", json!({"content": ["a", "b"], "model": "m"})).await.json();
    let of = |at: usize| vectors[at]["embedding"][0].as_array().map(Vec::len);
    assert_eq!((vectors[1]["index"].as_u64(), of(0).is_some(), of(0)), (Some(1), true, of(1)), "{vectors}");
}

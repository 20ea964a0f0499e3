use super::*;

#[tokio::test]
async fn text_becomes_tokens_and_tokens_text() {
    let server = start(hello()).await;
    let tokens = server.post_to("/tokenize", json!({"content": "ab", "add_special": true})).await;
    assert_eq!(tokens.json(), json!({"tokens": [97, 98, 1, 1]}));
    let text = server.post_to("/detokenize", json!({"tokens": [97, 98], "model": "m"})).await;
    assert_eq!(text.json(), json!({"content": "<97><98>"}));
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

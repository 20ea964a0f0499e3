use baton_schemas::EngineError;

use super::*;

#[tokio::test]
async fn openais_route_answers_in_both_encodings() {
    let server = start(hello()).await;
    let floats = server.post_to("/v1/embeddings", json!({"model": "m", "input": ["hi", "there"]})).await.json();
    assert_eq!(
        floats,
        json!({"object": "list", "model": "m", "usage": {"prompt_tokens": 6, "total_tokens": 6}, "data": [
            {"object": "embedding", "index": 0, "embedding": [2.0, 0.5]},
            {"object": "embedding", "index": 1, "embedding": [5.0, 0.5]}]})
    );
    let body = json!({"model": "m", "input": [1, 2], "encoding_format": "base64"});
    let base64 = server.post_to("/v1/embeddings", body).await.json();
    // 2.0 and -0.5 in little-endian bytes.
    assert_eq!(base64["data"][0]["embedding"], "AAAAQAAAAL8=");
    let request = server.fake.embed_request.lock().unwrap().take().unwrap();
    assert_eq!((request.inputs, request.truncate), (vec![EmbedInput::Tokens(vec![1, 2])], false));
}

#[tokio::test]
async fn ollamas_routes_answer_with_their_own_shapes() {
    let server = start(hello()).await;
    let reply = server.post_to("/api/embed", json!({"model": "m:latest", "input": ["a", "bcd"]})).await.json();
    assert_eq!(reply["embeddings"], json!([[1.0, 0.5], [3.0, 0.5]]));
    assert_eq!((&reply["model"], &reply["prompt_eval_count"]), (&json!("m:latest"), &json!(6)));
    assert_eq!(reply["load_duration"], 500_000);
    assert!(reply["total_duration"].as_u64().unwrap() > 0);
    assert!(server.fake.embed_request.lock().unwrap().take().unwrap().truncate);
    let older = server.post_to("/api/embeddings", json!({"model": "m", "prompt": "hello"})).await.json();
    assert_eq!(older, json!({"embedding": [5.0, 0.5]}));
    // Without a text the model is only loaded.
    let nothing = server.post_to("/api/embed", json!({"model": "m"})).await.json();
    assert_eq!((&nothing["embeddings"], &nothing["prompt_eval_count"]), (&json!([]), &json!(0)));
    assert_eq!(server.post_to("/api/embeddings", json!({"model": "m"})).await.json(), json!({"embedding": []}));
    server.post_to("/api/embed", json!({"model": "nope"})).await.failed_as_ollama(404);
}

#[tokio::test]
async fn failures_have_each_dialects_envelope() {
    let too_long = RequestError::InputTooLong { field: "input", idx: 1, n_tokens: 9, n_ctx: 8 };
    let server = start(before([Act::Fail(too_long)])).await;
    let failed = server.post_to("/v1/embeddings", json!({"model": "m", "input": "x"})).await;
    let error = failed.failed(400, "invalid_request_error", Some("context_length_exceeded"));
    assert_eq!((&error["param"], &error["n_prompt_tokens"], &error["n_ctx"]), (&json!("input"), &json!(9), &json!(8)));
    let failed = server.post_to("/api/embed", json!({"model": "m", "input": "x"})).await;
    let error = failed.json();
    assert!(error["error"].as_str().is_some_and(|text| text.contains("is 8 tokens, but input 1 has 9")), "{error}");
    assert_eq!((failed.status, &error["code"], &error["n_ctx"]), (400, &json!("context_length_exceeded"), &json!(8)));

    let unsupported = EngineError::Unsupported { feature: "embeddings".into() };
    let server = start(before([Act::Fail(unsupported.into())])).await;
    let failed = server.post_to("/v1/embeddings", json!({"model": "m", "input": "x"})).await;
    failed.failed(501, "not_supported_error", None);
    for path in ["/api/embed", "/api/embeddings"] {
        let refused = server.post_to(path, json!({"model": "m", "input": "x", "prompt": "x"})).await;
        assert!(refused.failed_as_ollama(501).contains("embeddings"));
        server.post_to(path, json!({})).await.failed_as_ollama(400);
    }
    let missing = server.post_to("/v1/embeddings", json!({"model": "x", "input": "x"})).await;
    missing.failed(404, "not_found_error", Some("model_not_found"));
    let wrong = server.post_to("/v1/embeddings", json!({"model": "m", "input": ""})).await;
    assert_eq!(wrong.failed(400, "invalid_request_error", None)["param"], "input");
}

#[tokio::test]
async fn a_client_that_leaves_cancels_its_vectors() {
    let server = start(before([Act::Hang])).await;
    let request = reqwest::Client::new().post(server.url("/v1/embeddings")).json(&json!({"model": "m", "input": "x"}));
    let waiting = tokio::spawn(request.send());
    server.until_live(1).await;
    waiting.abort();
    server.until_live(0).await;
}
